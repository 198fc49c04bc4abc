// The kernels for AVX-512 with VNNI and BF16.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear/isa.hpp"

#ifdef PLANCAST_X86

namespace plancast::linear {

namespace avx512_bf16 {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")))
#define INLINE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"), always_inline)) inline

#include "linear/isa_avx512.inc"

struct V : Base {
    INLINE static Float dot_bf16(Float sum, Int weight, const uint8_t* pair) {
        return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weight), reinterpret_cast<__m512bh>(quad(reinterpret_cast<const int8_t*>(pair))));
    }
};
constexpr int kWide = 2, kMost = 6;

#include "linear/tile_base.inc"

#include "linear/tile_bf16.inc"

// All but bf16 products is as without BF16.
void multiply(const Weight& w, const Rows& a, size_t strip, size_t first, size_t count, const Target& t,
              const Reading& reading) {
    (w.kind == Kind::bf16 ? multiply_bf16 : kAvx512Vnni.multiply)(w, a, strip, first, count, t, reading);
}

void quantize(const float* x, const Weight& w, const Rows& a, size_t row) {
    kAvx512Vnni.quantize(x, w, a, row);
}

void rms_norm(const float* x, const float* gain, float epsilon, size_t columns, float* y) {
    kAvx512Vnni.rms_norm(x, gain, epsilon, columns, y);
}

void silu_mul(const float* gate, const float* up, size_t columns, float* y) {
    kAvx512Vnni.silu_mul(gate, up, columns, y);
}

void gelu_mul(const float* gate, const float* up, size_t columns, float* y) {
    kAvx512Vnni.gelu_mul(gate, up, columns, y);
}

void rotate(const float* x, const float* cos, const float* sin, size_t half, float* y) {
    kAvx512Vnni.rotate(x, cos, sin, half, y);
}

}  // namespace avx512_bf16

const Kernels kAvx512Bf16 = {avx512_bf16::quantize, avx512_bf16::multiply, avx512_bf16::rms_norm,
                             avx512_bf16::silu_mul, avx512_bf16::gelu_mul, avx512_bf16::rotate};

}  // namespace plancast::linear

#endif
