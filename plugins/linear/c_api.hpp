// What Python calls through ctypes: one product, for tests and measurements.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct PlancastLinear {
    const uint8_t* packed;
    uint64_t channels, columns, group;
    int32_t kind;         // 0 int8, 1 int4, 2 bf16
    int32_t activations;  // 0 int8, 1 int16, 2 bf16, 3 bf16x2
    int32_t f16_scale;
    int32_t low;  // 0 none, 1 minimum, 2 zero point
};

// y [rows, channels] = x [rows, columns] W^T (+ bias [channels], or null) (+ residual [rows, channels], or null), with
// the instruction set `isa` (null: the best). Returns 0, or 1 where this machine does not have it.
int plancast_linear(const PlancastLinear* weight, const float* x, uint64_t rows, const float* bias,
                    const float* residual, float* y, uint64_t threads, const char* isa);

// The name of the best instruction set of this machine, whatever PLANCAST_ISA says.
const char* plancast_isa(void);

// Reads `bytes` at `data` once on `threads` threads; returns a sum of them, so that nothing is left out.
uint64_t plancast_read(const uint8_t* data, uint64_t bytes, uint64_t threads);

// `count` integer (kind 0) or bf16 (kind 2) dot products of 64 bytes, or of tiles, on each of `threads` threads, as many side
// by side as keep the units busy: what the machine can do at best. AVX2: products of 32 bytes summed in 16 bits, or f32 FMA.
// Returns the multiply-adds of each; 0 where it has no such unit.
uint64_t plancast_peak(int32_t kind, uint64_t count, uint64_t threads);

}
