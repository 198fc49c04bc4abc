#include "linear/kernel.hpp"

#include <cstdlib>

#include "linear/isa.hpp"
#include "native/pool.hpp"

namespace plancast::linear {

namespace {

constexpr Isa kBestFirst[] = {Isa::amx, Isa::avx512_bf16, Isa::avx512_vnni, Isa::avx_vnni, Isa::avx2, Isa::portable};

// With fewer rows than this a product waits for memory, or nearly: each thread streams few stretches of the weights.
constexpr size_t kRowsOfStream = 33;
constexpr size_t kRowsOfTask = 128;  // their activations stay in the second-level cache

// Into how many stretches the weights of few rows are cut.
size_t stretches_of(size_t strips, size_t threads) {
    return std::min(strips, 2 * threads);
}

bool has_avx_vnni() {
#if defined(PLANCAST_X86)
    if (!__builtin_cpu_supports("avx2"))
        return false;
    unsigned a = 7, b = 0, c = 1, d = 0;  // GCC 12 has no name for it
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    return a >> 4 & 1;
#else
    return false;
#endif
}

}  // namespace

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::amx: return "amx";
        case Isa::avx512_bf16: return "avx512_bf16";
        case Isa::avx512_vnni: return "avx512_vnni";
        case Isa::avx_vnni: return "avx_vnni";
        case Isa::avx2: return "avx2";
        default: return "portable";
    }
}

bool has_isa(Isa isa) {
#ifdef PLANCAST_X86
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    switch (isa) {
        case Isa::amx: return avx512 && __builtin_cpu_supports("avx512bf16") && has_amx();
        case Isa::avx512_bf16: return avx512 && __builtin_cpu_supports("avx512bf16");
        case Isa::avx512_vnni: return avx512;
        case Isa::avx_vnni: return avx2 && has_avx_vnni();
        case Isa::avx2: return avx2;
        default: return true;
    }
#else
    return isa == Isa::portable;
#endif
}

Isa best_isa() {
    static const Isa best = [] {
        const char* wanted = std::getenv("PLANCAST_ISA");
        bool reached = !wanted || !*wanted;
        for (const Isa isa : kBestFirst) {
            reached = reached || std::string(wanted) == isa_name(isa);
            if (reached && has_isa(isa))
                return isa;
        }
        return Isa::portable;
    }();
    return best;
}

const Kernels& kernels([[maybe_unused]] Isa isa) {
#ifdef PLANCAST_X86
    switch (isa) {
        case Isa::amx: return kAmx;
        case Isa::avx512_bf16: return kAvx512Bf16;
        case Isa::avx512_vnni: return kAvx512Vnni;
        case Isa::avx_vnni: return kAvxVnni;
        case Isa::avx2: return kAvx2;
        default: break;
    }
#endif
    return kPortable;
}

int32_t activation_levels(size_t columns) {
    // 127 * 256 + 127: the lower byte is signed.
    return static_cast<int32_t>(
        std::min<int64_t>(32639, 2147483647LL / (128 * static_cast<int64_t>(std::max<size_t>(columns, 1)))));
}

bool read_format(const std::string& kind, const std::string& activations, const std::string& low, Weight& w) {
    if (kind == "bf16") {
        w.kind = Kind::bf16;
        w.activations = activations == "bf16" ? Activations::bf16 : Activations::bf16x2;
        w.low = Low::none;
        return (activations == "bf16" || activations == "bf16x2") && low == "none";
    }
    w.kind = kind == "int8" ? Kind::int8 : Kind::int4;
    w.activations = activations == "int8" ? Activations::int8 : Activations::int16;
    w.low = low == "minimum" ? Low::minimum : low == "zero" ? Low::zero : Low::none;
    const bool known = (kind == "int8" || kind == "int4") && (low == "none" || low == "minimum" || low == "zero");
    return known && (activations == "int8" || (activations == "int16" && kind == "int8" && low == "none"));
}

const Rows& RowsBuffer::reserve(const Weight& w, size_t rows, bool wide) {
    const bool cells = w.activations == Activations::int8, int16 = w.activations == Activations::int16;
    const size_t planes = int16 || w.activations == Activations::bf16x2 ? 2 : 1;
    const size_t cell_bytes = sizeof(Cell) + (wide && w.kind == Kind::int8 ? kBlock : 0);
    rows_.row_bytes = cells ? w.blocks() * cell_bytes : w.padded() * planes * (int16 ? 1 : 2);
    const size_t readable = rows + kRowsBehind;
    // A tile may read 32 bytes past the end of a row, too.
    const size_t values = (readable * rows_.row_bytes + 32 + 63) / 64 * 64;
    const size_t scales = int16 ? rows : 0, starts = int16 ? readable * w.groups() : 0, totals = cells ? rows : 0;
    const size_t needed = values + 4 * (scales + starts + totals) + 64;
    if (storage_.size() < needed)
        storage_.resize(needed);
    uint8_t* at = storage_.data() + (64 - reinterpret_cast<uintptr_t>(storage_.data()) % 64) % 64;
    rows_.values = at;
    rows_.scale = reinterpret_cast<float*>(at + values);
    rows_.start = reinterpret_cast<int32_t*>(at + values + 4 * scales);
    rows_.total = reinterpret_cast<float*>(at + values + 4 * (scales + starts));
    if (cells)  // what stood there may be slow to add: tiny numbers
        std::fill_n(at + rows * rows_.row_bytes, kRowsBehind * rows_.row_bytes, uint8_t{0});
    return rows_;
}

const float* source_row(const Source& source, size_t row, size_t columns, const Kernels& kernel, float* buffer) {
    const float* x = source.x + row * source.stride;
    switch (source.step) {
        case Source::rms_norm: kernel.rms_norm(x, source.gain, source.epsilon, columns, buffer); return buffer;
        case Source::silu_mul: kernel.silu_mul(x, source.up + row * source.stride, columns, buffer); return buffer;
        case Source::gelu_mul: kernel.gelu_mul(x, source.up + row * source.stride, columns, buffer); return buffer;
        default: return x;
    }
}

Upcoming reads_first(const Weight& w, size_t rows, size_t threads) {
    if (rows >= kRowsOfStream)
        return {};
    const size_t stretches = stretches_of(w.strips(), threads);
    return {w.data, Part(w.strips(), 0, stretches).last * w.strip_bytes()};
}

void multiply(const Weight& w, const Source& source, size_t rows, const Target& target, RowsBuffer& buffer,
              size_t threads, Isa isa, const Upcoming& upcoming) {
    const Kernels& kernel = kernels(isa);
    const Rows rounded = buffer.reserve(w, rows, kernel.wide);
    const size_t rounders = rows < kRowsOfOne ? 1 : std::min(rows, 4 * threads);
    parallel(rounders, threads, [&](size_t index) {
        thread_local std::vector<float> changed;
        if (source.step != Source::plain && changed.size() < w.columns)
            changed.resize(w.columns);
        const Part part(rows, index, rounders);
        for (size_t row = part.first; row < part.last; ++row)
            kernel.quantize(source_row(source, row, w.columns, kernel, changed.data()), w, rounded, row);
    });
    const size_t strips = w.strips();
    const bool stream = rows < kRowsOfStream;
    const size_t heights = stream ? 1 : (rows + kRowsOfTask - 1) / kRowsOfTask;
    const size_t few = stretches_of(strips, threads), stretches = stream ? few : std::max(few, strips / 2);
    // By value: another core fetches what lies together in one go.
    const auto task = [=, &kernel](size_t index) {
        const Part part(strips, index / heights, stretches), height(rows, index % heights, heights);
        const uint8_t* end = w.data + part.last * w.strip_bytes();
        // With nobody held up, this thread gets the task that comes so many after this one.
        const size_t then = (index + threads) / heights;
        const bool moves = then > index / heights && then < stretches;
        const Reading reading{end, moves ? w.data + Part(strips, then, stretches).first * w.strip_bytes() : nullptr};
        for (size_t strip = part.first; strip < part.last; ++strip)
            kernel.multiply(w, rounded, strip, height.first, height.last - height.first, target, reading);
        if (kernel.release)
            kernel.release();
    };
    parallel(stretches * heights, threads, task, upcoming);
}

}  // namespace plancast::linear
