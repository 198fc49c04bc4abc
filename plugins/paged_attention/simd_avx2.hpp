// Sixteen lanes in two registers; see simd_avx512.hpp.


struct F {
    __m256 a, b;
};
struct I {
    __m256i a, b;
};
constexpr int kRows = 4;

#define PLANCAST_TWICE(name, op) \
    static inline F name(F x, F y) { return {op(x.a, y.a), op(x.b, y.b)}; }
PLANCAST_TWICE(add, _mm256_add_ps)
PLANCAST_TWICE(sub, _mm256_sub_ps)
PLANCAST_TWICE(mul, _mm256_mul_ps)
PLANCAST_TWICE(div, _mm256_div_ps)
PLANCAST_TWICE(max, _mm256_max_ps)
#undef PLANCAST_TWICE

static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline F round(F x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline F less_then(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
static inline F power_of_two(F n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23))};
}
static inline F scale_by_power(F x, F n) { return mul(x, power_of_two(n)); }
static inline __m256 keep8(__m256 x, __m256i lane, int first, int last, __m256 other) {
    const __m256i out = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane),
                                        _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(last)));
    return _mm256_blendv_ps(x, other, _mm256_castsi256_ps(out));
}
static inline F keep_lanes(F x, int first, int last, F other) {
    return {keep8(x.a, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), first, last, other.a),
            keep8(x.b, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15), first, last, other.b)};
}
static inline F lane_numbers() {
    return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline float sum(F x) {
    const __m256 b = _mm256_add_ps(x.a, x.b);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
static inline float largest(F x) {
    const __m256 b = _mm256_max_ps(x.a, x.b);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

static inline __m128i load8(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
static inline F from_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load8(p)), _mm256_cvtph_ps(load8(p + 8))}; }
static inline F from_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load8(p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load8(p + 8)), 16))};
}
static inline void from_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
    second = {_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}
static inline __m256 round_to_bf16(__m256 a) {
    const __m256i x = _mm256_castps_si256(a), odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i rounded = _mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
    return _mm256_blendv_ps(_mm256_castsi256_ps(rounded), a, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
static inline F round_to_bf16(F x) { return {round_to_bf16(x.a), round_to_bf16(x.b)}; }
static inline F from_half_bits(__m256i x) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
static inline F from_e5m2(const uint8_t* p) {
    return from_half_bits(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load8(p)), 8));
}
static inline F from_e4m3(const uint8_t* p) {  // the sign, twice by its extension, then the magnitude
    const __m256i x = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load8(p)), 7);
    return from_half_bits(_mm256_and_si256(x, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
}

static inline I zero_int() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I load_int(const int16_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16))};
}
static inline void store_int(int16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), x.b);
}
static inline I from_i8(const uint8_t* p) { return {_mm256_cvtepi8_epi16(load8(p)), _mm256_cvtepi8_epi16(load8(p + 16))}; }
static inline I from_u8(const uint8_t* p) { return {_mm256_cvtepu8_epi16(load8(p)), _mm256_cvtepu8_epi16(load8(p + 16))}; }
static inline I from_low_nibbles(const uint8_t* p) {
    const I x = from_u8(p);
    const __m256i mask = _mm256_set1_epi16(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
static inline I from_high_nibbles(const uint8_t* p) {
    const I x = from_u8(p);
    return {_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)};
}
static inline I broadcast_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
static inline I dot_pairs(I s, I x, I y) {
    return {_mm256_add_epi32(s.a, _mm256_madd_epi16(x.a, y.a)), _mm256_add_epi32(s.b, _mm256_madd_epi16(x.b, y.b))};
}
static inline I subtract_int(I x, int32_t y) {
    const __m256i other = _mm256_set1_epi32(y);
    return {_mm256_sub_epi32(x.a, other), _mm256_sub_epi32(x.b, other)};
}
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline void store_rounded(int16_t* p, F x) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
