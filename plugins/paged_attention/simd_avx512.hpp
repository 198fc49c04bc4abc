// Sixteen lanes in one register. The other simd_*.hpp have the same functions, which give the same bits.


struct F {
    __m512 v;
};
struct I {  // 16 x int32, or 32 x int16
    __m512i v;
};
constexpr int kRows = 12;  // rows that a kernel keeps in registers

static inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
static inline F set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
static inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline F less_then(F a, F b, F yes, F no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
static inline F scale_by_power(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }  // x * 2^n, n integral, -127..127
// x in the lanes whose index is within first..last, `other` elsewhere.
static inline F keep_lanes(F x, int first, int last, F other) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 keep = _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(first), _MM_CMPINT_NLT) &
                           _mm512_cmp_epi32_mask(lane, _mm512_set1_epi32(last), _MM_CMPINT_LE);
    return {_mm512_mask_blend_ps(keep, other.v, x.v)};
}
static inline F lane_numbers() {
    return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline float sum4(__m128 x) {
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
static inline float sum(F a) {
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    return sum4(_mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)));
}
static inline float largest(F a) {
    const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

static inline F from_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline F from_bf16(const uint16_t* p) {
    const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
}
static inline void from_bf16_pairs(const uint16_t* p, F& first, F& second) {
    const __m512i x = _mm512_loadu_si512(p);
    first = {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))};
    second = {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
// To the nearest bf16 number, as a float; NaN stays.
static inline F round_to_bf16(F a) {
    const __m512i x = _mm512_castps_si512(a.v), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i rounded = _mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), _mm512_castsi512_ps(rounded), a.v)};
}
static inline __m256i bytes16(const uint8_t* p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline F from_e5m2(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_slli_epi16(bytes16(p), 8))}; }
static inline F from_e4m3(const uint8_t* p) {  // 2^-8 of the value
    const __m256i x = bytes16(p);
    const __m256i magnitude = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(0x3f80));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(x, 8), _mm256_set1_epi16(static_cast<int16_t>(0x8000)));
    return {_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign))};
}

static inline I zero_int() { return {_mm512_setzero_si512()}; }
static inline I load_int(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_int(int16_t* p, I x) { _mm512_storeu_si512(p, x.v); }
static inline I from_i8(const uint8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline I from_low_nibbles(const uint8_t* p) {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_and_si512(x, _mm512_set1_epi16(15))};
}
static inline I from_high_nibbles(const uint8_t* p) {
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_srli_epi16(x, 4)};
}
static inline I broadcast_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, 4);
    return {_mm512_set1_epi32(pair)};
}
// Not by its intrinsic: GCC 12 then moves sums to another register and back at each product, which takes as much of the
// core's front end as the products themselves.
static inline I dot_pairs(I sums, I a, I b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums.v) : "v"(a.v), "v"(b.v));
    return sums;
}
static inline I subtract_int(I a, int32_t b) { return {_mm512_sub_epi32(a.v, _mm512_set1_epi32(b))}; }
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline void store_rounded(int16_t* p, F x) {  // to nearest even, 16 numbers within int16
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}
