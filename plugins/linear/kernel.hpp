// y = x W^T (+ bias): int8 weights in strips of 32 channels, activations quantized row by row (see op.py).
#pragma once

#include <cstddef>
#include <cstdint>

namespace plancast::linear {

constexpr size_t kStrip = 32;

enum class Isa { portable, avx2, avx512_vnni };

// The best instruction set of this machine, or the one that PLANCAST_ISA names (portable | avx2 | avx512_vnni) where
// the machine has it. Read once.
Isa best_isa();

// The largest quantized activation: sums of int8 products stay within 32 bits.
int32_t activation_levels(size_t columns);

// One row f32 [columns] -> int16 [padded columns, a multiple of 2; the padding is 0]; returns the row's scale: 0 for a
// row of zeros, NaN for one that is not finite.
float quantize_row(Isa isa, const float* x, size_t columns, int32_t levels, int16_t* out);

// Rows [0, rows) of strip `strip`: y[m * channels + n] for its channels n (at most 32, fewer in the last strip).
// `quantized` is [rows, padded], `packed` the whole weight [strips, pairs, 32, 2].
struct Problem {
    const int16_t* quantized;
    const float* row_scale;
    const int8_t* packed;
    const float* scale;
    const float* bias;  // may be null
    float* y;
    size_t rows, columns, channels;
    size_t pairs() const { return (columns + 1) / 2; }
    size_t padded() const { return pairs() * 2; }
    size_t strips() const { return (channels + kStrip - 1) / kStrip; }
};
void multiply_strip(Isa isa, const Problem& problem, size_t strip);

}  // namespace plancast::linear
