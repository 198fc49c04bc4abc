#include "linear/c_api.hpp"

#include <atomic>
#include <cstring>
#include <string>

#include "linear/isa.hpp"
#include "linear/kernel.hpp"
#include "native/pool.hpp"

#if defined(__GNUC__)
#define PLANCAST_EXPORT __attribute__((visibility("default")))
#else
#define PLANCAST_EXPORT
#endif

using namespace plancast;
using namespace plancast::linear;

namespace {

constexpr Isa kAll[] = {Isa::amx, Isa::avx512_bf16, Isa::avx512_vnni, Isa::avx_vnni, Isa::avx2, Isa::portable};

#ifdef PLANCAST_X86

// Chains side by side, at least as many as the latency times the throughput of any unit so far: on Zen 5 VDPBF16PS has
// 93 % of its rate with twelve. AVX2 has registers for no more.
#define PLANCAST_TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define PLANCAST_SIXTEEN(X) PLANCAST_TWELVE(X) X(12) X(13) X(14) X(15)

__attribute__((target("avx512f,avx512vnni"))) int32_t dots_int8(uint64_t count) {
    const __m512i a = _mm512_set1_epi8(1);
#define PLANCAST_CHAIN(N) __m512i sum##N = _mm512_setzero_si512();
    PLANCAST_SIXTEEN(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    for (uint64_t i = 0; i < count; i += 16) {
#define PLANCAST_CHAIN(N) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sum##N) : "v"(a));
        PLANCAST_SIXTEEN(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    }
    __m512i all = a;
#define PLANCAST_CHAIN(N) all = _mm512_add_epi32(all, sum##N);
    PLANCAST_SIXTEEN(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    return _mm512_reduce_add_epi32(all);
}

__attribute__((target("avx512f,avx512bf16"))) int32_t dots_bf16(uint64_t count) {
    const __m512i a = _mm512_setzero_si512();
#define PLANCAST_CHAIN(N) __m512 sum##N = _mm512_setzero_ps();
    PLANCAST_SIXTEEN(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    for (uint64_t i = 0; i < count; i += 16) {
#define PLANCAST_CHAIN(N) __asm__ volatile("vdpbf16ps %1, %1, %0" : "+v"(sum##N) : "v"(a));
        PLANCAST_SIXTEEN(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    }
    __m512 all = _mm512_setzero_ps();
#define PLANCAST_CHAIN(N) all = _mm512_add_ps(all, sum##N);
    PLANCAST_SIXTEEN(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    return static_cast<int32_t>(_mm512_reduce_add_ps(all));
}

// Bytes to sums of 16 bits, and their sum; f32 of bf16.
__attribute__((target("avx2,fma"))) int32_t dots_avx2(uint64_t count, bool bf16) {
    const __m256i a = _mm256_setzero_si256();
    __m256i part;
#define PLANCAST_CHAIN(N) __m256i sum##N = _mm256_setzero_si256();
    PLANCAST_TWELVE(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    for (uint64_t i = 0; i < count; i += 12) {
        if (bf16) {
#define PLANCAST_CHAIN(N) __asm__ volatile("vfmadd231ps %1, %1, %0" : "+x"(sum##N) : "x"(a));
            PLANCAST_TWELVE(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
        } else {
#define PLANCAST_CHAIN(N) \
    __asm__ volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum##N), "=&x"(part) : "x"(a));
            PLANCAST_TWELVE(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
        }
    }
    __m256i all = a;
#define PLANCAST_CHAIN(N) all = _mm256_add_epi32(all, sum##N);
    PLANCAST_TWELVE(PLANCAST_CHAIN)
#undef PLANCAST_CHAIN
    return _mm256_extract_epi32(all, 0);
}

#endif

}  // namespace

extern "C" {

PLANCAST_EXPORT int plancast_linear(const PlancastLinear* weight, const float* x, uint64_t rows, const float* bias,
                                    const float* residual, float* y, uint64_t threads, const char* isa) {
    Isa wanted = best_isa();
    if (isa) {
        bool known = false;
        for (const Isa one : kAll)
            if (std::strcmp(isa, isa_name(one)) == 0) {
                wanted = one;
                known = true;
            }
        if (!known || !has_isa(wanted))
            return 1;
    }
    Weight w{};
    w.data = weight->packed;
    w.channels = weight->channels;
    w.columns = weight->columns;
    w.kind = static_cast<Kind>(weight->kind);
    w.activations = static_cast<Activations>(weight->activations);
    w.group = weight->group;
    w.f16_scale = weight->f16_scale != 0;
    w.low = static_cast<Low>(weight->low);
    thread_local RowsBuffer buffer;
    RowsBuffer& mine = buffer;
    Source source;
    source.x = x;
    source.stride = w.columns;
    linear::multiply(w, source, rows, Target{y, w.channels, bias, residual, w.channels}, mine, threads, wanted);
    return 0;
}

PLANCAST_EXPORT const char* plancast_isa(void) {
    for (const Isa isa : kAll)
        if (has_isa(isa))
            return isa_name(isa);
    return "portable";
}

PLANCAST_EXPORT uint64_t plancast_read(const uint8_t* data, uint64_t bytes, uint64_t threads) {
    std::atomic<uint64_t> total{0};
    const uint64_t words = bytes / 8, tasks = 8 * threads;
    parallel(tasks, threads, [&](size_t index) {
        const Part part(words, index, tasks);
        uint64_t lane[16] = {};
        size_t i = part.first;
        for (; i + 16 <= part.last; i += 16) {
#if defined(__GNUC__)
            __builtin_prefetch(data + 8 * i + 4096);
            __builtin_prefetch(data + 8 * i + 4096 + 64);
#endif
            for (int j = 0; j < 16; ++j) {
                uint64_t word;
                std::memcpy(&word, data + 8 * (i + j), 8);
                lane[j] += word;
            }
        }
        uint64_t sum = 0;
        for (const uint64_t one : lane)
            sum += one;
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    return total.load();
}

PLANCAST_EXPORT uint64_t plancast_peak([[maybe_unused]] int32_t kind, [[maybe_unused]] uint64_t count,
                                       [[maybe_unused]] uint64_t threads) {
#ifdef PLANCAST_X86
    // Short tasks: a call does its first one before it wakes a thread, which must find others left.
    constexpr uint64_t kTasks = 16;
    const bool bf16 = kind == 2;
    const uint64_t tasks = kTasks * threads, each = (count + kTasks - 1) / kTasks;
    if (has_isa(Isa::amx)) {
        std::atomic<uint64_t> width{0};
        parallel(tasks, threads, [&](size_t) { width = amx_peak(bf16, each); });
        return width;
    }
    std::atomic<int32_t> sink{0};
    if (!has_isa(bf16 ? Isa::avx512_bf16 : Isa::avx512_vnni)) {
        if (has_isa(Isa::avx512_vnni) || has_isa(Isa::avx_vnni) || !has_isa(Isa::avx2))
            return 0;
        parallel(tasks, threads, [&](size_t) { sink += dots_avx2(each, bf16); });
        return bf16 ? 8 : 32;
    }
    parallel(tasks, threads, [&](size_t) { sink += bf16 ? dots_bf16(each) : dots_int8(each); });
    return bf16 ? 32 : 64;
#else
    return 0;
#endif
}

}  // extern "C"
