// Sixteen lanes in plain C++, for any machine; see simd_avx512.hpp.


struct F {
    float v[16];
};
struct I {
    union {
        int32_t v[16];
        int16_t h[32];
    };
};
constexpr int kRows = 2;

template <class Op>
static inline F lanes(Op op) {
    F r;
    for (int i = 0; i < 16; ++i)
        r.v[i] = op(i);
    return r;
}
static inline F load(const float* p) {
    return lanes([=](int i) { return p[i]; });
}
static inline void store(float* p, F x) {
    for (int i = 0; i < 16; ++i)
        p[i] = x.v[i];
}
static inline F set1(float x) {
    return lanes([=](int) { return x; });
}
static inline F add(F a, F b) {
    return lanes([&](int i) { return a.v[i] + b.v[i]; });
}
static inline F sub(F a, F b) {
    return lanes([&](int i) { return a.v[i] - b.v[i]; });
}
static inline F mul(F a, F b) {
    return lanes([&](int i) { return a.v[i] * b.v[i]; });
}
static inline F div(F a, F b) {
    return lanes([&](int i) { return a.v[i] / b.v[i]; });
}
static inline F fma(F a, F b, F c) {
    return lanes([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
static inline float max_of(float a, float b) { return a > b ? a : b; }
static inline F max(F a, F b) {
    return lanes([&](int i) { return max_of(a.v[i], b.v[i]); });
}
static inline F abs(F a) {
    return lanes([&](int i) { return std::fabs(a.v[i]); });
}
static inline F round(F a) {
    return lanes([&](int i) { return std::nearbyintf(a.v[i]); });
}
static inline F less_then(F a, F b, F yes, F no) {
    return lanes([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
static inline F power_of_two(F n) {
    return lanes([&](int i) {
        if (!(n.v[i] > -127 && n.v[i] < 128))
            return 0.0f;  // only NaN comes here, and what it is multiplied with is NaN
        const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
        float r;
        __builtin_memcpy(&r, &bits, 4);
        return r;
    });
}
static inline F scale_by_power(F x, F n) { return mul(x, power_of_two(n)); }
static inline F keep_lanes(F x, int first, int last, F other) {
    return lanes([&](int i) { return i >= first && i <= last ? x.v[i] : other.v[i]; });
}
static inline F lane_numbers() {
    return lanes([](int i) { return static_cast<float>(i); });
}
static inline float sum(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i)
            a.v[i] += a.v[i + half];
    return a.v[0];
}
static inline float largest(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i)
            a.v[i] = max_of(a.v[i], a.v[i + half]);
    return a.v[0];
}

static inline float from_bits(uint32_t bits) {
    float r;
    __builtin_memcpy(&r, &bits, 4);
    return r;
}
static inline float half_value(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00)
        return from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // As a float with the same fields it is 2^-112 of the value; a half's denormals are integers times 2^-24.
    const float value = magnitude < 0x400 ? static_cast<float>(magnitude) * 0x1p-24f
                                          : from_bits((magnitude << 13) + (112u << 23));
    return sign ? -value : value;
}
static inline F from_f16(const uint16_t* p) {
    return lanes([=](int i) { return half_value(p[i]); });
}
static inline F round_to_bf16(F a) {
    return lanes([&](int i) {
        uint32_t bits;
        __builtin_memcpy(&bits, &a.v[i], 4);
        return a.v[i] != a.v[i] ? a.v[i] : from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
    });
}
static inline F from_bf16(const uint16_t* p) {
    return lanes([=](int i) { return from_bits(static_cast<uint32_t>(p[i]) << 16); });
}
static inline void from_bf16_pairs(const uint16_t* p, F& first, F& second) {
    first = lanes([=](int i) { return from_bits(static_cast<uint32_t>(p[2 * i]) << 16); });
    second = lanes([=](int i) { return from_bits(static_cast<uint32_t>(p[2 * i + 1]) << 16); });
}
static inline F from_e5m2(const uint8_t* p) {
    return lanes([=](int i) { return half_value(static_cast<uint16_t>(p[i] << 8)); });
}
static inline F from_e4m3(const uint8_t* p) {
    return lanes([=](int i) { return half_value(static_cast<uint16_t>((p[i] & 0x80) << 8 | (p[i] & 0x7f) << 7)); });
}

template <class Op>
static inline I halves(Op op) {
    I r;
    for (int i = 0; i < 32; ++i)
        r.h[i] = static_cast<int16_t>(op(i));
    return r;
}
static inline I zero_int() {
    return halves([](int) { return 0; });
}
static inline I load_int(const int16_t* p) {
    return halves([=](int i) { return p[i]; });
}
static inline void store_int(int16_t* p, I x) {
    for (int i = 0; i < 32; ++i)
        p[i] = x.h[i];
}
static inline I from_i8(const uint8_t* p) {
    return halves([=](int i) { return static_cast<int8_t>(p[i]); });
}
static inline I from_low_nibbles(const uint8_t* p) {
    return halves([=](int i) { return p[i] & 15; });
}
static inline I from_high_nibbles(const uint8_t* p) {
    return halves([=](int i) { return p[i] >> 4; });
}
static inline I broadcast_pair(const int16_t* p) {
    return halves([=](int i) { return p[i & 1]; });
}
static inline I dot_pairs(I s, I a, I b) {
    for (int i = 0; i < 16; ++i)
        s.v[i] += a.h[2 * i] * b.h[2 * i] + a.h[2 * i + 1] * b.h[2 * i + 1];
    return s;
}
static inline I subtract_int(I a, int32_t b) {
    for (int i = 0; i < 16; ++i)
        a.v[i] -= b;
    return a;
}
static inline F to_float(I a) {
    return lanes([&](int i) { return static_cast<float>(a.v[i]); });
}
static inline void store_rounded(int16_t* p, F x) {
    for (int i = 0; i < 16; ++i) {
        const float r = std::nearbyintf(x.v[i]);
        p[i] = r >= -32768 && r <= 32767 ? static_cast<int16_t>(r) : int16_t{0};
    }
}
