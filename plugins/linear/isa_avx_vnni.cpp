// The kernels for AVX2 with AVX-VNNI: the 256-bit integer dot product of client CPUs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear/isa.hpp"

#ifdef PLANCAST_X86

namespace plancast::linear {

namespace avx_vnni {

#define TARGET __attribute__((target("avx2,fma,f16c,avxvnni")))
#define INLINE __attribute__((target("avx2,fma,f16c,avxvnni"), always_inline)) inline

#include "linear/isa_avx2.inc"

struct V : Base {
    INLINE static Int dot(Int sum, Int weight, Int values) { return _mm256_dpbusd_avx_epi32(sum, weight, values); }
    INLINE static Int dot4(Int sum, Int weight, Int values) { return dot(sum, weight, values); }
};
constexpr int kWide = 2, kMost = 3, kRows = 3, kRowsLow = 2, kRowsInt16 = 2, kRowsShifted = 0;

#include "linear/rows.inc"
#include "linear/tile_base.inc"

#include "linear/tile.inc"
#include "linear/tile_bf16.inc"

void multiply(const Weight& w, const Rows& a, size_t strip, size_t first, size_t count, const Target& t,
              const Reading& reading) {
    (w.kind == Kind::bf16 ? multiply_bf16 : multiply_integers)(w, a, strip, first, count, t, reading);
}

}  // namespace avx_vnni

const Kernels kAvxVnni = {avx_vnni::quantize, avx_vnni::multiply, avx_vnni::rms_norm, avx_vnni::silu_mul,
                          avx_vnni::gelu_mul, avx_vnni::rotate};

}  // namespace plancast::linear

#endif
