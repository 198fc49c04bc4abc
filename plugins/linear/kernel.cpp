#include "linear/kernel.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#define PLANCAST_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#endif

namespace plancast::linear {

namespace {

// Every path turns an exact integer sum into y by these same two roundings.
inline float scaled(int32_t sum, float row_scale, float scale, const float* bias, size_t channel) {
    const float value = static_cast<float>(sum) * (row_scale * scale);
    return bias ? value + bias[channel] : value;
}

void store_strip(const Problem& p, size_t strip, size_t row, const int32_t* sums) {
    const size_t first = strip * kStrip;
    const size_t count = std::min(kStrip, p.channels - first);
    float* y = p.y + row * p.channels + first;
    for (size_t n = 0; n < count; ++n)
        y[n] = scaled(sums[n], p.row_scale[row], p.scale[first + n], p.bias, first + n);
}

void multiply_portable(const Problem& p, size_t strip) {
    const int8_t* weight = p.packed + strip * p.pairs() * kStrip * 2;
    for (size_t row = 0; row < p.rows; ++row) {
        const int16_t* a = p.quantized + row * p.padded();
        int32_t sums[kStrip] = {};
        for (size_t k = 0; k < p.pairs(); ++k)
            for (size_t n = 0; n < kStrip; ++n) {
                const int8_t* w = weight + (k * kStrip + n) * 2;
                sums[n] += a[2 * k] * w[0] + a[2 * k + 1] * w[1];
            }
        store_strip(p, strip, row, sums);
    }
}

float quantize_portable(const float* x, size_t columns, int32_t levels, int16_t* out) {
    float largest = 0;
    bool finite = true;
    for (size_t k = 0; k < columns; ++k) {
        largest = std::max(largest, std::fabs(x[k]));
        finite = finite && std::isfinite(x[k]);
    }
    std::fill(out, out + (columns + 1) / 2 * 2, int16_t{0});
    if (!finite)
        return std::numeric_limits<float>::quiet_NaN();
    if (largest == 0)
        return 0;
    const float inverse = static_cast<float>(levels) / largest;
    for (size_t k = 0; k < columns; ++k) {
        const float level = std::nearbyint(x[k] * inverse);
        out[k] = static_cast<int16_t>(std::clamp(level, -static_cast<float>(levels), static_cast<float>(levels)));
    }
    return largest * (1.0f / static_cast<float>(levels));
}

#ifdef PLANCAST_X86

TARGET_AVX2 void multiply_avx2(const Problem& p, size_t strip) {
    const int8_t* weight = p.packed + strip * p.pairs() * kStrip * 2;
    for (size_t row = 0; row < p.rows; row += 2) {
        const size_t rows = std::min<size_t>(2, p.rows - row);
        const int16_t* a0 = p.quantized + row * p.padded();
        const int16_t* a1 = rows == 2 ? a0 + p.padded() : a0;
        __m256i sum0[4], sum1[4];
        for (int i = 0; i < 4; ++i)
            sum0[i] = sum1[i] = _mm256_setzero_si256();
        for (size_t k = 0; k < p.pairs(); ++k) {
            int32_t pair0, pair1;
            std::memcpy(&pair0, a0 + 2 * k, 4);
            std::memcpy(&pair1, a1 + 2 * k, 4);
            const __m256i b0 = _mm256_set1_epi32(pair0), b1 = _mm256_set1_epi32(pair1);
            for (int i = 0; i < 4; ++i) {
                const auto* from = reinterpret_cast<const __m128i*>(weight + k * 64 + i * 16);
                const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(from));
                sum0[i] = _mm256_add_epi32(sum0[i], _mm256_madd_epi16(w, b0));
                sum1[i] = _mm256_add_epi32(sum1[i], _mm256_madd_epi16(w, b1));
            }
        }
        int32_t sums[kStrip];
        for (int i = 0; i < 4; ++i)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * 8), sum0[i]);
        store_strip(p, strip, row, sums);
        if (rows == 2) {
            for (int i = 0; i < 4; ++i)
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + i * 8), sum1[i]);
            store_strip(p, strip, row + 1, sums);
        }
    }
}

TARGET_VNNI void store_vnni(const Problem& p, size_t strip, size_t row, __m512i low, __m512i high) {
    const size_t first = strip * kStrip;
    const size_t count = std::min(kStrip, p.channels - first);
    const __mmask16 masks[2] = {static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1),
                                static_cast<__mmask16>(count >= 32 ? 0xffff : count > 16 ? (1u << (count - 16)) - 1 : 0)};
    const __m512 row_scale = _mm512_set1_ps(p.row_scale[row]);
    const __m512i sums[2] = {low, high};
    for (int half = 0; half < 2; ++half) {
        const size_t channel = first + half * 16;
        const __m512 scale = _mm512_mul_ps(row_scale, _mm512_maskz_loadu_ps(masks[half], p.scale + channel));
        __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[half]), scale);
        if (p.bias)
            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(masks[half], p.bias + channel));
        _mm512_mask_storeu_ps(p.y + row * p.channels + channel, masks[half], value);
    }
}

// The weights come from memory once a step: asking this far ahead (bytes) keeps sums and reads side by side.
constexpr size_t kPrefetchAhead = 4096;

// A tile of rows keeps 2 accumulators a row in registers while the strip's weights stream by once.
template <int kRows>
TARGET_VNNI void tile_vnni(const Problem& p, size_t strip, size_t row) {
    const int8_t* weight = p.packed + strip * p.pairs() * kStrip * 2;
    const int16_t* a[kRows];
    __m512i low[kRows], high[kRows];
    for (int m = 0; m < kRows; ++m) {
        a[m] = p.quantized + (row + m) * p.padded();
        low[m] = high[m] = _mm512_setzero_si512();
    }
    for (size_t k = 0; k < p.pairs(); ++k) {
        const auto* from = reinterpret_cast<const __m256i*>(weight + k * 64);
        _mm_prefetch(reinterpret_cast<const char*>(from) + kPrefetchAhead, _MM_HINT_T0);
        const __m512i w0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from));
        const __m512i w1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256(from + 1));
#pragma GCC unroll 12
        for (int m = 0; m < kRows; ++m) {
            int32_t pair;
            std::memcpy(&pair, a[m] + 2 * k, 4);
            const __m512i b = _mm512_set1_epi32(pair);
            low[m] = _mm512_dpwssd_epi32(low[m], w0, b);
            high[m] = _mm512_dpwssd_epi32(high[m], w1, b);
        }
    }
    for (int m = 0; m < kRows; ++m)
        store_vnni(p, strip, row + m, low[m], high[m]);
}

TARGET_VNNI void multiply_vnni(const Problem& p, size_t strip) {
    size_t row = 0;
    for (; row + 8 <= p.rows; row += 8)
        tile_vnni<8>(p, strip, row);
    switch (p.rows - row) {
        case 7: tile_vnni<7>(p, strip, row); break;
        case 6: tile_vnni<6>(p, strip, row); break;
        case 5: tile_vnni<5>(p, strip, row); break;
        case 4: tile_vnni<4>(p, strip, row); break;
        case 3: tile_vnni<3>(p, strip, row); break;
        case 2: tile_vnni<2>(p, strip, row); break;
        case 1: tile_vnni<1>(p, strip, row); break;
        default: break;
    }
}

TARGET_VNNI float quantize_vnni(const float* x, size_t columns, int32_t levels, int16_t* out) {
    __m512 largest_lanes = _mm512_setzero_ps();
    __mmask16 not_finite = 0;
    for (size_t k = 0; k < columns; k += 16) {
        const auto mask = static_cast<__mmask16>(columns - k >= 16 ? 0xffff : (1u << (columns - k)) - 1);
        const __m512 value = _mm512_maskz_loadu_ps(mask, x + k);
        not_finite |= _mm512_fpclass_ps_mask(value, 0x99);  // quiet NaN, signalling NaN, either infinity
        largest_lanes = _mm512_max_ps(largest_lanes, _mm512_abs_ps(value));
    }
    std::fill(out, out + (columns + 1) / 2 * 2, int16_t{0});
    if (not_finite)
        return std::numeric_limits<float>::quiet_NaN();
    const float largest = _mm512_reduce_max_ps(largest_lanes);
    if (largest == 0)
        return 0;
    const __m512 inverse = _mm512_set1_ps(static_cast<float>(levels) / largest);
    const __m512i top = _mm512_set1_epi32(levels), bottom = _mm512_set1_epi32(-levels);
    for (size_t k = 0; k < columns; k += 16) {
        const auto mask = static_cast<__mmask16>(columns - k >= 16 ? 0xffff : (1u << (columns - k)) - 1);
        const __m512i level = _mm512_cvt_roundps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + k), inverse),
                                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m512i clipped = _mm512_max_epi32(_mm512_min_epi32(level, top), bottom);
        _mm256_mask_storeu_epi16(out + k, mask, _mm512_cvtsepi32_epi16(clipped));
    }
    return largest * (1.0f / static_cast<float>(levels));
}

#endif

Isa detect() {
    Isa isa = Isa::portable;
#ifdef PLANCAST_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        isa = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
        isa = Isa::avx512_vnni;
#endif
    if (const char* wanted = std::getenv("PLANCAST_ISA")) {
        const std::string name = wanted;
        const Isa asked = name == "portable" ? Isa::portable : name == "avx2" ? Isa::avx2 : Isa::avx512_vnni;
        isa = std::min(isa, asked);
    }
    return isa;
}

}  // namespace

Isa best_isa() {
    static const Isa isa = detect();
    return isa;
}

int32_t activation_levels(size_t columns) {
    return static_cast<int32_t>(std::min<int64_t>(32767, 2147483647LL / (128 * static_cast<int64_t>(columns))));
}

float quantize_row([[maybe_unused]] Isa isa, const float* x, size_t columns, int32_t levels, int16_t* out) {
#ifdef PLANCAST_X86
    if (isa == Isa::avx512_vnni)
        return quantize_vnni(x, columns, levels, out);
#endif
    return quantize_portable(x, columns, levels, out);
}

void multiply_strip([[maybe_unused]] Isa isa, const Problem& problem, size_t strip) {
#ifdef PLANCAST_X86
    if (isa == Isa::avx512_vnni)
        return multiply_vnni(problem, strip);
    if (isa == Isa::avx2)
        return multiply_avx2(problem, strip);
#endif
    multiply_portable(problem, strip);
}

}  // namespace plancast::linear
