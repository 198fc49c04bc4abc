// The kernels for AVX-512 with VNNI.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear/isa.hpp"

#ifdef PLANCAST_X86

namespace plancast::linear {

namespace avx512_vnni {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"), always_inline)) inline

#include "linear/isa_avx512.inc"

struct V : Base {
    INLINE static Float dot_bf16(Float sum, Int weight, const uint8_t* pair) {
        const Int values = quad(reinterpret_cast<const int8_t*>(pair)), upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
        const Float even = fma(_mm512_castsi512_ps(_mm512_slli_epi32(weight, 16)),
                               _mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), sum);
        return fma(_mm512_castsi512_ps(_mm512_and_si512(weight, upper)),
                   _mm512_castsi512_ps(_mm512_and_si512(values, upper)), even);
    }
};
constexpr int kWide = 2, kMost = 6, kRows = 6, kRowsLow = 4, kRowsInt16 = 5, kRowsShifted = 4;

#include "linear/rows.inc"
#include "linear/tile_base.inc"

#include "linear/tile.inc"
#include "linear/tile_bf16.inc"

void multiply(const Weight& w, const Rows& a, size_t strip, size_t first, size_t count, const Target& t,
              const Reading& reading) {
    (w.kind == Kind::bf16 ? multiply_bf16 : multiply_integers)(w, a, strip, first, count, t, reading);
}

}  // namespace avx512_vnni

const Kernels kAvx512Vnni = {avx512_vnni::quantize, avx512_vnni::multiply, avx512_vnni::rms_norm,
                             avx512_vnni::silu_mul, avx512_vnni::gelu_mul, avx512_vnni::rotate};

}  // namespace plancast::linear

#endif
