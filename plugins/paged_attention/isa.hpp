// What each instruction set brings: a file isa_*.cpp includes its vectors (simd_*.hpp), then cells.inc, softmax.inc,
// work.inc and what computes products: tiles.inc, its own tiles_*.inc and attend.inc, or those of AMX. Everything in them
// is of its own namespace without a name, and nothing of the standard library is instantiated there but what is always
// inlined: no code of one instruction set may be linked in for another.
#pragma once

#include "paged_attention/kernel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define PLANCAST_X86 1
#endif

namespace plancast::attention {

constexpr size_t kLanes = 16;

// How this thread rounds while it lives, whatever its caller chose: denormals are kept where cells are written, as
// kv_formats.py says, and count as 0 where they are read. There a single one among the numbers costs Intel's cores as
// much as a hundred products (measured: decode over a cache with 2 % of them took ten times as long).
class Denormals {
public:
#ifdef PLANCAST_X86
    explicit Denormals(bool keep) : before(_mm_getcsr()) { _mm_setcsr(keep ? kDefault : kDefault | kFlush); }
    ~Denormals() { _mm_setcsr(before); }

private:
    static constexpr unsigned kDefault = 0x1f80, kFlush = 0x8040;  // flush to zero, and denormals are zeros
    const unsigned before;
#else
    explicit Denormals(bool) {}
#endif
    Denormals(const Denormals&) = delete;
    Denormals& operator=(const Denormals&) = delete;
};

extern const Kernels kPortable;
#ifdef PLANCAST_X86
extern const Kernels kAvx2, kAvx512, kAvx512Bf16, kAmx;
#endif

}  // namespace plancast::attention
