// The kernels for AMX (tiles of 16 rows by 64 bytes) with AVX-512 VNNI and BF16.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "linear/isa.hpp"

#ifdef PLANCAST_X86

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace plancast::linear {

namespace amx {

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")))
#define INLINE_ATTRIBUTES __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16"), always_inline))
#define INLINE INLINE_ATTRIBUTES inline

#include "linear/isa_avx512.inc"

struct V : Base {};
constexpr int kWide = 2, kMost = 16;

#include "linear/tile_base.inc"

#include "linear/tile_amx.inc"

void multiply(const Weight& w, const Rows& a, size_t strip, size_t first, size_t count, const Target& t,
              const Reading& reading) {
    (w.kind == Kind::bf16 ? multiply_bf16 : multiply_integers)(w, a, strip, first, count, t, reading);
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

}  // namespace amx

const Kernels kAmx = {amx::quantize, amx::multiply, amx::rms_norm, amx::silu_mul,
                      amx::gelu_mul, amx::rotate, amx::release};

bool has_amx() {
    static const bool has = [] {
        unsigned a = 7, b = 0, c = 0, d = 0;
        __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        const bool offered = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // AMX-BF16, AMX-TILE, AMX-INT8
        a = 1, c = 0;
        __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        if (!offered || !(c >> 27 & 1))  // XGETBV
            return false;
        unsigned low = 0, high = 0;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
        if ((low >> 17 & 3) != 3)  // the system keeps the tiles' state
            return false;
#if defined(__linux__)
        // Linux gives the state to those who ask: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA; for all threads of the process.
        return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
        return false;
#endif
    }();
    return has;
}

uint64_t amx_peak(bool bf16, uint64_t count) {
    amx::configure(amx::kWhole);
    for (uint64_t i = 0; i < count; i += 4) {
        if (bf16)
            __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n\ttdpbf16ps %tmm7, %tmm4, %tmm1\n\t"
                             "tdpbf16ps %tmm6, %tmm5, %tmm2\n\ttdpbf16ps %tmm7, %tmm5, %tmm3");
        else
            __asm__ volatile("tdpbsud %tmm6, %tmm4, %tmm0\n\ttdpbsud %tmm7, %tmm4, %tmm1\n\t"
                             "tdpbsud %tmm6, %tmm5, %tmm2\n\ttdpbsud %tmm7, %tmm5, %tmm3");
    }
    amx::release();
    return bf16 ? 16 * 16 * 32 : 16 * 16 * 64;
}

}  // namespace plancast::linear

#endif
