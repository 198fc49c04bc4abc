// The kernels of a product for each instruction set, and which one this machine gets. Free of OpenVINO.
//
// Integer sums are exact, and what follows them is done in one order with one rounding a step: int8 and int4 weights give
// the same bits with every instruction set. bf16 products are rounded by the hardware's own rules.
#pragma once

#include <vector>

#include "linear/weight.hpp"
#include "native/pool.hpp"

namespace plancast::linear {

enum class Isa { portable, avx2, avx_vnni, avx512_vnni, avx512_bf16, amx };

// Which weights a thread reads: on from where it is up to `end`, then from `next`, its next task's. Null: unknown.
struct Reading {
    const uint8_t *end = nullptr, *next = nullptr;

    // What it reads `distance` bytes after `at`, to be asked for in time; null: nothing, as far as is known.
    const uint8_t* after(const uint8_t* at, size_t distance) const {
        if (!end)
            return nullptr;
        const size_t left = static_cast<size_t>(end - at);
        return distance < left ? at + distance : next ? next + (distance - left) : nullptr;
    }
};

struct Kernels {
    // One row f32 [columns] into row `row` of `rows`.
    void (*quantize)(const float* x, const Weight& weight, const Rows& rows, size_t row);
    // Rows [first, first + count) times strip `strip`; weights are read ahead as `reading` says.
    void (*multiply)(const Weight& weight, const Rows& rows, size_t strip, size_t first, size_t count,
                     const Target& target, const Reading& reading);
    // y = x / sqrt(mean(x^2) + epsilon) * gain, f32 [columns].
    void (*rms_norm)(const float* x, const float* gain, float epsilon, size_t columns, float* y);
    // y = silu(gate) * up, f32 [columns].
    void (*silu_mul)(const float* gate, const float* up, size_t columns, float* y);
    // y = gelu(gate) * up, f32 [columns]; GELU as its tanh form has it.
    void (*gelu_mul)(const float* gate, const float* up, size_t columns, float* y);
    // y = x rotated, f32 [2 * half]: y[k] = x[k] cos[k] - x[k + half] sin[k], and with the halves changed about, +. y is not x.
    void (*rotate)(const float* x, const float* cos, const float* sin, size_t half, float* y);
    // Called by each thread after its last `multiply` of a task; null: nothing to do.
    void (*release)() = nullptr;
    // Whether int8 activations of int8 weights take 16 bits, too.
    bool wide = false;
};

// The best instruction set of this machine, or the best up to the one that PLANCAST_ISA names (portable | avx2 |
// avx_vnni | avx512_vnni | avx512_bf16 | amx). Read once.
Isa best_isa();
const char* isa_name(Isa isa);
bool has_isa(Isa isa);
const Kernels& kernels(Isa isa);

// The largest quantized int16 activation: sums of int8 products stay within 32 bits, and its upper byte in 8.
int32_t activation_levels(size_t columns);

// Tiles of 16 rows read past the last one; what comes of that is dropped.
constexpr size_t kRowsBehind = 15;

// Memory for the activations of one product after another.
class RowsBuffer {
public:
    // Room for `rows` rows of what `weight` takes, and for kRowsBehind more that kernels may read. What stood there is lost.
    const Rows& reserve(const Weight& weight, size_t rows, bool wide);

private:
    std::vector<uint8_t> storage_;
    Rows rows_{};
};

// The rows that a product takes, [rows, columns], and what is done to each before it is rounded.
struct Source {
    enum Step { plain, rms_norm, silu_mul, gelu_mul } step = plain;
    const float* x = nullptr;
    size_t stride = 0;          // of x and up, in floats
    const float* up = nullptr;  // silu_mul, gelu_mul: the rows that silu(x) or gelu(x) is multiplied by
    const float* gain = nullptr;  // rms_norm: [columns]
    float epsilon = 0;
};

// y = source W^T on at most `threads` threads. `upcoming`: what is read after it (see native/pool.hpp).
void multiply(const Weight& weight, const Source& source, size_t rows, const Target& target, RowsBuffer& buffer,
              size_t threads, Isa isa, const Upcoming& upcoming = {});
// What `multiply` of so many rows reads first of a weight; nothing where reading it is not what takes the time.
Upcoming reads_first(const Weight& weight, size_t rows, size_t threads);

// One row of a source: where it lies, or in `buffer` [columns] what comes of it.
const float* source_row(const Source& source, size_t row, size_t columns, const Kernels& kernel, float* buffer);

// Rows fewer than this are not worth sharing out when each takes a microsecond or less.
constexpr size_t kRowsOfOne = 6;

}  // namespace plancast::linear
