// The kernels in plain C++: right everywhere, and what the others are tested against.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "linear/isa.hpp"

namespace plancast::linear {

namespace portable {

#define TARGET
#define INLINE inline

struct V {
    static constexpr size_t kLanes = 8;
    static constexpr bool kRoundsBlocks = false;
    struct Int {
        uint32_t lane[kLanes];  // unsigned: sums wrap
    };
    struct Bytes {
        uint8_t lane[kLanes][4];
    };
    struct Float {
        float lane[kLanes];
    };
    template <typename T, typename F>
    static T each(const F& f) {
        T out;
        for (size_t n = 0; n < kLanes; ++n)
            out.lane[n] = f(n);
        return out;
    }
    static Float zero() { return {}; }
    static Int set1(int32_t x) {
        return each<Int>([&](size_t) { return static_cast<uint32_t>(x); });
    }
    static Float set1(float x) {
        return each<Float>([&](size_t) { return x; });
    }
    static Int load(const uint8_t* at) {
        Int out;
        std::memcpy(&out, at, sizeof out);
        return out;
    }
    static Float load_f32(const float* at) {
        Float out;
        std::memcpy(&out, at, sizeof out);
        return out;
    }
    static Float load_f16(const uint8_t* at) {
        return each<Float>([&](size_t n) {
            uint16_t half;
            std::memcpy(&half, at + 2 * n, 2);
            const int exponent = half >> 10 & 31, digits = half & 1023;
            const float sign = half & 0x8000 ? -1.0f : 1.0f;
            if (exponent == 31)
                return digits ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
            return sign * (exponent ? std::ldexp(static_cast<float>(digits + 1024), exponent - 25)
                                    : std::ldexp(static_cast<float>(digits), -24));
        });
    }
    static Float load_bytes(const uint8_t* at) {
        return each<Float>([&](size_t n) { return static_cast<float>(at[n]); });
    }
    static Float negative(Float x) {
        return each<Float>([&](size_t n) { return 0.0f - x.lane[n]; });
    }
    static void store(float* at, Float x) { std::memcpy(at, &x, sizeof x); }
    static void prefetch(const uint8_t*, bool) {}
    static Int quad(const int8_t* at) {
        int32_t bytes;
        std::memcpy(&bytes, at, 4);
        return set1(bytes);
    }
    static uint32_t byte(uint32_t word, int i) { return word >> (8 * i) & 255; }
    static Int dot(Int sum, Int weight, Int values) {
        return each<Int>([&](size_t n) {
            uint32_t out = sum.lane[n];
            for (int i = 0; i < 4; ++i) {
                const auto value = static_cast<int8_t>(byte(values.lane[n], i));
                out += static_cast<uint32_t>(static_cast<int32_t>(byte(weight.lane[n], i)) * value);
            }
            return out;
        });
    }
    static Int dot4(Int sum, Int weight, Int values) { return dot(sum, weight, values); }
    static Int low_nibbles(Int x) {
        return each<Int>([&](size_t n) { return x.lane[n] & 0x0f0f0f0fu; });
    }
    static Int high_nibbles(Int x) {
        return each<Int>([&](size_t n) { return x.lane[n] >> 4 & 0x0f0f0f0fu; });
    }
    static Int add(Int x, Int y) {
        return each<Int>([&](size_t n) { return x.lane[n] + y.lane[n]; });
    }
    static Int times256(Int x) {
        return each<Int>([&](size_t n) { return x.lane[n] << 8; });
    }
    static Float to_float(Int x) {
        return each<Float>([&](size_t n) { return static_cast<float>(static_cast<int32_t>(x.lane[n])); });
    }
    static Float mul(Float x, Float y) {
        return each<Float>([&](size_t n) { return x.lane[n] * y.lane[n]; });
    }
    static Float add(Float x, Float y) {
        return each<Float>([&](size_t n) { return x.lane[n] + y.lane[n]; });
    }
    static Float fma(Float x, Float y, Float z) {
        return each<Float>([&](size_t n) { return std::fma(x.lane[n], y.lane[n], z.lane[n]); });
    }
    static float bf16(uint32_t bits) {
        float out;
        std::memcpy(&out, &bits, 4);
        return out;
    }
    static Float dot_bf16(Float sum, Int weight, const uint8_t* pair) {
        uint32_t values;
        std::memcpy(&values, pair, 4);
        return each<Float>([&](size_t n) {
            const uint32_t w = weight.lane[n];
            const float even = std::fma(bf16(w << 16), bf16(values << 16), sum.lane[n]);
            return std::fma(bf16(w & 0xffff0000u), bf16(values & 0xffff0000u), even);
        });
    }
};
constexpr int kWide = 2, kMost = 1, kRows = 1, kRowsLow = 1, kRowsInt16 = 1, kRowsShifted = 0;

#include "linear/rows.inc"
#include "linear/tile_base.inc"

#include "linear/tile.inc"
#include "linear/tile_bf16.inc"

void multiply(const Weight& w, const Rows& a, size_t strip, size_t first, size_t count, const Target& t,
              const Reading& reading) {
    (w.kind == Kind::bf16 ? multiply_bf16 : multiply_integers)(w, a, strip, first, count, t, reading);
}

}  // namespace portable

const Kernels kPortable = {portable::quantize, portable::multiply, portable::rms_norm, portable::silu_mul,
                           portable::gelu_mul, portable::rotate};

}  // namespace plancast::linear
