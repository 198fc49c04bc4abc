// What each instruction set brings. A file isa_*.cpp defines the vectors `V` and includes tile.inc and rows.inc; on a
// machine of another kind it defines nothing.
#pragma once

#include "linear/kernel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define PLANCAST_X86 1
#endif

namespace plancast::linear {

// Values smaller than this count as zero: their inverse would not be finite.
constexpr float kLeast = 7.8886090522101181e-31f;  // 2^-100
constexpr float kZeros[kBlock] = {};
// The weights come from memory once a step: asking this far ahead (bytes) keeps sums and reads side by side.
constexpr size_t kAhead = 4096;

extern const Kernels kPortable;
#ifdef PLANCAST_X86
extern const Kernels kAvx2, kAvxVnni, kAvx512Vnni, kAvx512Bf16, kAmx;

// Whether the processor has AMX with int8 and bf16, and the system lets this process use it: asks for it once.
bool has_amx();
// As plancast_peak on this thread.
uint64_t amx_peak(bool bf16, uint64_t count);
#endif

}  // namespace plancast::linear
