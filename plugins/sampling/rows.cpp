#include "sampling/rows.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

#if defined(__x86_64__)
#define PLANCAST_AVX2 __attribute__((target("avx2,fma")))
#define PLANCAST_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")))
#endif
#define INLINE inline __attribute__((always_inline))

// The nearest whole number is added to the exponent, and a polynomial does the rest (Cephes' exp2f, Moshier).
INLINE float exp2_of(float x) {
    const float low = x;
    x = x > 128.0f ? 128.0f : x;  // keeps NaN; 2^128 is infinity to the bit
    const float shifted = x + 12582912.0f;  // 1.5 * 2^23: the last bits are the nearest whole number
    const float r = x - (shifted - 12582912.0f);
    float p = 1.535336188319500e-4f;
    p = p * r + 1.339887440266574e-3f;
    p = p * r + 9.618437357674640e-3f;
    p = p * r + 5.550332471162809e-2f;
    p = p * r + 2.402264791363012e-1f;
    p = p * r + 6.931472028550421e-1f;
    p = p * r + 1.0f;
    uint32_t bits, power;
    std::memcpy(&bits, &p, 4);
    std::memcpy(&power, &shifted, 4);
    bits += power << 23;
    std::memcpy(&p, &bits, 4);
    return low < -125.0f ? 0.0f : p;
}

// `row` may be `values`.
INLINE void exp2_line(const float* row, int64_t count, float scale, float* values,
                      float* __restrict sums) {
    for (int64_t c = 0; c < count; ++c) {
        const float value = exp2_of(row[c] * scale);
        values[c] = value;
        sums[c] += value;
    }
}

INLINE void exp2_lines(const float* row, int64_t n, float scale, float* values, int64_t columns, float* sums) {
    for (int64_t start = 0; start < n; start += columns)
        exp2_line(row + start, std::min(columns, n - start), scale, values + start, sums);
}

// The largest value of each chunk; NaN stays.
INLINE void chunk_maxima(const float* __restrict row, int64_t n, int64_t columns, float* __restrict maxima) {
    std::memcpy(maxima, row, std::min(n, columns) * sizeof(float));
    for (int64_t start = columns; start < n; start += columns) {
        const int64_t count = std::min(columns, n - start);
        for (int64_t c = 0; c < count; ++c) {
            const float value = row[start + c], most = maxima[c];
            maxima[c] = (most != most) | (value <= most) ? most : value;
        }
    }
}

constexpr int64_t kLanes = 64;  // of maxima and sums, so that they stay in registers

// The first of the largest values, or of NaNs. Into `share`: what exp of it is of the sum of exp of all.
INLINE int64_t likeliest_of(const float* row, int64_t n, float* share) {
    constexpr float kLog2e = 1.44269504f;
    const int64_t lanes = std::min(n, kLanes), whole = n - n % lanes;
    float maxima[kLanes], sums[kLanes] = {};
    chunk_maxima(row, n, lanes, maxima);
    int64_t at = n;
    float most = maxima[0];
    for (int64_t c = 1; c < lanes; ++c)
        most = (most != most) | (maxima[c] <= most) ? most : maxima[c];
    for (int64_t c = 0; c < lanes; ++c)
        for (int64_t i = c; i < at && (maxima[c] == most || maxima[c] != maxima[c]); i += lanes)
            if (row[i] == most || row[i] != row[i])
                at = i;
    for (int64_t start = 0; start < whole; start += lanes)
        for (int64_t c = 0; c < lanes; ++c)
            sums[c] += exp2_of((row[start + c] - most) * kLog2e);
    double total = 0.0;
    for (int64_t c = 0; c < lanes; ++c)
        total += sums[c];
    for (int64_t i = whole; i < n; ++i)
        total += exp2_of((row[i] - most) * kLog2e);
    *share = static_cast<float>(1.0 / total);
    return at;
}

using Lines = void (*)(const float*, int64_t, float, float*, int64_t, float*);

using Maxima = void (*)(const float*, int64_t, int64_t, float*);

using Likeliest = int64_t (*)(const float*, int64_t, float*);

struct Passes {
    Lines lines;
    Maxima maxima;
    Likeliest likeliest;
};

int64_t portable_likeliest(const float* row, int64_t n, float* share) {
    return likeliest_of(row, n, share);
}

void portable_maxima(const float* row, int64_t n, int64_t columns, float* maxima) {
    chunk_maxima(row, n, columns, maxima);
}

void portable_lines(const float* row, int64_t n, float scale, float* values, int64_t columns, float* sums) {
    exp2_lines(row, n, scale, values, columns, sums);
}

#if defined(__x86_64__)
PLANCAST_AVX2 void avx2_lines(const float* row, int64_t n, float scale, float* values, int64_t columns, float* sums) {
    exp2_lines(row, n, scale, values, columns, sums);
}

PLANCAST_AVX512 void avx512_lines(const float* row, int64_t n, float scale, float* values, int64_t columns,
                                  float* sums) {
    exp2_lines(row, n, scale, values, columns, sums);
}

PLANCAST_AVX2 void avx2_maxima(const float* row, int64_t n, int64_t columns, float* maxima) {
    chunk_maxima(row, n, columns, maxima);
}

PLANCAST_AVX512 void avx512_maxima(const float* row, int64_t n, int64_t columns, float* maxima) {
    chunk_maxima(row, n, columns, maxima);
}
PLANCAST_AVX2 int64_t avx2_likeliest(const float* row, int64_t n, float* share) {
    return likeliest_of(row, n, share);
}

PLANCAST_AVX512 int64_t avx512_likeliest(const float* row, int64_t n, float* share) {
    return likeliest_of(row, n, share);
}
#endif

// PLANCAST_ISA lowers the choice, as it does for the products.
Passes choose() {
#if defined(__x86_64__)
    const char* asked = std::getenv("PLANCAST_ISA");
    const bool portable = asked && !std::strcmp(asked, "portable");
    const bool narrow = asked && !std::strncmp(asked, "avx", 3) && std::strncmp(asked, "avx512", 6);
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && !portable;
    if (avx2 && !narrow && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return {avx512_lines, avx512_maxima, avx512_likeliest};
    if (avx2)
        return {avx2_lines, avx2_maxima, avx2_likeliest};
#endif
    return {portable_lines, portable_maxima, portable_likeliest};
}

const Passes& passes() {
    static const Passes chosen = choose();
    return chosen;
}

// Positions of the values >= least, unordered, looked for in the chunks whose sum allows for one. Their sum into
// `weight`. -1 where more than `most` chunks do: then a pass over all is no slower.
int64_t heavier(const float* values, int64_t n, int64_t columns, const float* sums, float least, int64_t most,
                int64_t* ids, double* weight) {
    int64_t found = 0, looked = 0;
    *weight = 0.0;
    for (int64_t c = 0; c < columns; ++c) {
        if (sums[c] < least)
            continue;
        if (++looked > most)
            return -1;
        for (int64_t i = c; i < n; i += columns)
            if (values[i] >= least) {
                ids[found++] = i;
                *weight += values[i];
            }
    }
    return found;
}

constexpr int64_t BINS = 8192;  // of the histogram of weights, 128 a binade; those below the last are one

// Sign, exponent and seven bits of mantissa: they order positive floats.
INLINE uint32_t leading(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits >> 16;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) double plancast_exp2_chunks(const float* row, int64_t n, float scale,
                                                                              float* values, int64_t columns,
                                                                              float* sums) {
    std::memset(sums, 0, columns * sizeof(float));
    passes().lines(row, n, scale, values, columns, sums);
    double total = 0.0;
    for (int64_t c = 0; c < columns; ++c)
        total += sums[c];
    return total;
}

extern "C" __attribute__((visibility("default"))) int64_t plancast_nucleus(const float* values, int64_t n,
                                                                           int64_t columns, const float* sums,
                                                                           double total, double mass, int64_t* ids) {
    // Mostly a few tokens, each likelier than a small part of what is left out, make the mass. 1e-4: the sums are f32.
    for (const double parts : {32.0, 512.0}) {
        double weight;
        const auto least = static_cast<float>((total - mass) / parts);
        const int64_t found = heavier(values, n, columns, sums, least, columns / 8, ids, &weight);
        if (found < 0)
            break;  // the next threshold is lower
        if (found > 0 && weight >= mass * (1 + 1e-4)) {
            std::sort(ids, ids + found);
            return found;
        }
    }
    // What is left out weighs total - mass, so the heaviest of it weighs at least the mean, and what is kept no less.
    const auto least = static_cast<float>((total - mass) / n * (1 - 1e-3));
    int64_t found = 0;
    uint32_t highest = 0;
    for (int64_t i = 0; i < n; ++i) {
        ids[found] = i;
        found += values[i] >= least;
    }
    for (int64_t i = 0; i < found; ++i)
        highest = std::max(highest, leading(values[ids[i]]));
    thread_local std::vector<double> weights;
    weights.assign(BINS, 0.0);
    const auto bin = [&](int64_t id) {
        return std::min<int64_t>(highest - leading(values[id]), BINS - 1);
    };
    for (int64_t i = 0; i < found; ++i)
        weights[bin(ids[i])] += values[ids[i]];
    int64_t last = 0;
    double cumulative = weights[0];
    while (last < BINS - 1 && cumulative < mass)
        cumulative += weights[++last];
    ++last;  // one bin more than the crossing one: `mass` and these sums differ by rounding
    int64_t kept = 0;
    for (int64_t i = 0; i < found; ++i) {
        const int64_t id = ids[i];
        ids[kept] = id;
        kept += bin(id) <= last;
    }
    return kept;
}

extern "C" __attribute__((visibility("default"))) int64_t plancast_largest(const float* row, int64_t n,
                                                                           int64_t columns, int64_t k, double drop,
                                                                           float* scratch, float* largest,
                                                                           int64_t* ids) {
    float* maxima = scratch;
    float* order = scratch + columns;
    columns = std::min(columns, n);
    passes().maxima(row, n, columns, maxima);
    *largest = maxima[0];
    for (int64_t c = 1; c < columns; ++c)
        *largest = (*largest != *largest) | (maxima[c] <= *largest) ? *largest : maxima[c];
    if (*largest != *largest)
        return 0;
    // The k largest chunk maxima are k values, so the k-th largest value is no less than the k-th largest of them.
    std::memcpy(order, maxima, columns * sizeof(float));
    std::nth_element(order, order + k - 1, order + columns, [](float a, float b) { return a > b; });
    const float bound = std::max(order[k - 1], static_cast<float>(*largest + drop));
    int64_t found = 0;
    for (int64_t c = 0; c < columns; ++c) {
        if (maxima[c] < bound)
            continue;
        for (int64_t i = c; i < n; i += columns) {
            ids[found] = i;
            found += row[i] >= bound;
        }
    }
    std::sort(ids, ids + found);
    return found;
}

extern "C" __attribute__((visibility("default"))) int64_t plancast_likeliest(const float* row, int64_t n,
                                                                             float* share) {
    return passes().likeliest(row, n, share);
}
