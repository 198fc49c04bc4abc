// A packed weight [channels, columns] in memory, as op.py lays it out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace plancast::linear {

constexpr size_t kStrip = 32;  // channels side by side
constexpr size_t kBlock = 32;  // columns side by side; activations of int8 have a scale each

enum class Kind : uint8_t { int8, int4, bf16 };

// How the activations of a product are rounded: int8 with a scale for each block of 32 columns; int16 (12 to 15 bits)
// with a scale a row; bf16; the sum of two bf16.
enum class Activations : uint8_t { int8, int16, bf16, bf16x2 };

// What is added to scale * q: nothing (int8 q is centred on 0, int4 q on 8), a minimum (q is unsigned), or -scale * a zero
// point.
enum class Low : uint8_t { none, minimum, zero };

struct Weight {
    const uint8_t* data;
    size_t channels, columns;
    Kind kind;
    Activations activations;
    size_t group;    // columns that share a scale, a multiple of 32; 0: all of them
    bool f16_scale;  // scales (and minima) are f16, not f32
    Low low;

    size_t strips() const { return (channels + kStrip - 1) / kStrip; }
    size_t blocks() const { return (columns + kBlock - 1) / kBlock; }
    size_t padded() const { return blocks() * kBlock; }
    size_t group_blocks() const { return group ? group / kBlock : std::max<size_t>(blocks(), 1); }
    size_t groups() const { return (blocks() + group_blocks() - 1) / group_blocks(); }
    // Before the blocks of a group stand its scales, then its minima (as the scales) or zero points (bytes).
    size_t vector_bytes() const { return kStrip * (f16_scale ? 2 : 4); }
    size_t header_bytes() const {
        if (kind == Kind::bf16)
            return 0;
        return vector_bytes() + (low == Low::minimum ? vector_bytes() : low == Low::zero ? kStrip : 0);
    }
    size_t block_bytes() const {
        return kStrip * kBlock * (kind == Kind::bf16 ? 4 : kind == Kind::int8 ? 2 : 1) / 2;
    }
    size_t strip_bytes() const { return groups() * header_bytes() + blocks() * block_bytes(); }
    // What stands for zero: unsigned bytes and nibbles hold q + offset.
    int32_t offset() const {
        if (kind == Kind::int8)
            return low == Low::minimum ? 0 : 128;
        return low == Low::none ? 8 : 0;
    }
    bool has_low() const { return low != Low::none; }
};

// Sets the kind, the activations and the low of `weight` by op.py's names. False: no kernel takes them together.
bool read_format(const std::string& kind, const std::string& activations, const std::string& low, Weight& weight);

// The activations of a product, rounded, row by row at row_bytes.
//
// int8: cells, one a block of 32 columns. int16 and bf16x2: two planes of padded columns behind each other; int16 has its
// upper bytes, then its lower ones (both signed: a = 256 upper + lower), bf16x2 the rounded values, then the rest.
// On AVX2 int8 weights take both in 16 bits (tile_avx2.inc).
struct Rows {
    uint8_t* values;
    size_t row_bytes;
    float* scale;    // int16: [rows]
    int32_t* start;  // int16: [rows, groups]: -offset * the sum of a row's values
    float* total;    // int8: [rows]: the sum of the cells' sums
};

// What a row of int8 activations holds for a block: one pointer a row reaches all of it.
struct Cell {
    int8_t values[kBlock];
    float scale;
    int32_t start;  // -offset * the sum of the values
    float sum;      // scale * the sum of the values, for minima and zero points
    uint32_t unused;
};

// Where a product goes: y[row * y_stride + channel] (= | += residual) value + bias.
struct Target {
    float* y;
    size_t y_stride;
    const float* bias;      // [channels], or null
    const float* residual;  // [rows, channels] at residual_stride, or null
    size_t residual_stride;
};

}  // namespace plancast::linear
