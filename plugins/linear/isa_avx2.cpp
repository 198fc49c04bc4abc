// The kernels for AVX2 with FMA and F16C.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear/isa.hpp"

#ifdef PLANCAST_X86

namespace plancast::linear {

namespace avx2 {

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline

#include "linear/isa_avx2.inc"

using V = Base;
constexpr int kWide = 2, kMost = 4;

#include "linear/rows.inc"
#include "linear/tile_base.inc"

#include "linear/tile_avx2.inc"
#include "linear/tile_bf16.inc"

void multiply(const Weight& w, const Rows& a, size_t strip, size_t first, size_t count, const Target& t,
              const Reading& reading) {
    (w.kind == Kind::bf16 ? multiply_bf16 : multiply_integers)(w, a, strip, first, count, t, reading);
}

}  // namespace avx2

const Kernels kAvx2 = {avx2::quantize_wide, avx2::multiply, avx2::rms_norm, avx2::silu_mul, avx2::gelu_mul,
                       avx2::rotate, nullptr, true};

}  // namespace plancast::linear

#endif
