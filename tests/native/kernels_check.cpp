// The kernels under the sanitizers, apart from OpenVINO: every format, shapes with odd tails, unaligned exact-sized
// buffers, rows that are not finite. Every instruction set must agree with the portable one, to the bit for integers.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

#include "block/graph.hpp"
#include "block/program.hpp"
#include "linear/kernel.hpp"
#include "native/pool.hpp"

using namespace plancast;
using namespace plancast::linear;

int check_attention();  // attention_check.cpp: how many cases failed

namespace {

std::mt19937 generator(1);
int failures = 0;

// Exactly `bytes` bytes, one past an aligned address: the sanitizer sees any access beyond.
class Buffer {
public:
    explicit Buffer(size_t bytes, size_t shift = 1) : memory_(new uint8_t[bytes + shift]), shift_(shift) {}
    uint8_t* data() { return memory_.get() + shift_; }

private:
    std::unique_ptr<uint8_t[]> memory_;
    size_t shift_;
};

struct Form {
    const char *kind, *activations, *low;
    size_t group;
    bool f16;
};

constexpr Form kForms[] = {
    {"int8", "int16", "none", 0, false},  {"int8", "int16", "none", 32, true},   {"int8", "int8", "none", 0, true},
    {"int8", "int8", "none", 64, false},  {"int8", "int8", "minimum", 32, true}, {"int8", "int8", "zero", 0, false},
    {"int4", "int8", "none", 32, true},   {"int4", "int8", "none", 128, false},  {"int4", "int8", "minimum", 32, true},
    {"int4", "int8", "zero", 64, false},  {"int4", "int8", "zero", 0, true},     {"bf16", "bf16", "none", 0, false},
    {"bf16", "bf16x2", "none", 0, false},
};
constexpr size_t kShapes[][2] = {{64, 64}, {33, 7}, {1, 1}, {31, 34}, {70, 161}, {32, 300}};
constexpr size_t kRows[] = {0, 1, 2, 6, 13};
constexpr Isa kIsas[] = {Isa::avx2, Isa::avx_vnni, Isa::avx512_vnni, Isa::avx512_bf16, Isa::amx};

void fill(const Weight& w, uint8_t* at) {
    for (size_t i = 0; i < w.strips() * w.strip_bytes(); ++i)
        at[i] = static_cast<uint8_t>(generator());
    std::uniform_real_distribution<float> small(0.001f, 0.01f);
    for (size_t strip = 0; strip < w.strips() && w.kind != Kind::bf16; ++strip)
        for (size_t group = 0, block = 0; group < w.groups(); ++group) {
            uint8_t* header = at + strip * w.strip_bytes() + group * w.header_bytes() + block * w.block_bytes();
            block += w.group_blocks();
            const size_t numbers = kStrip * (w.low == Low::minimum ? 2 : 1);
            for (size_t n = 0; n < numbers; ++n) {
                const float scale = small(generator);
                const auto half = static_cast<uint16_t>(0x1000 + generator() % 0x0800);  // 2^-11 .. 2^-9
                std::memcpy(header + n * (w.f16_scale ? 2 : 4), w.f16_scale ? static_cast<const void*>(&half) : &scale,
                            w.f16_scale ? 2 : 4);
            }
        }
    if (w.kind == Kind::bf16)
        for (size_t i = 1; i < w.strips() * w.strip_bytes(); i += 2)
            at[i] = static_cast<uint8_t>(0x3c + generator() % 3) | (generator() & 0x80);  // no huge values
}

std::vector<float> activations(size_t rows, size_t columns) {
    std::normal_distribution<float> normal;
    std::vector<float> x(rows * columns);
    for (float& value : x)
        value = normal(generator);
    for (size_t row = 0; row < rows; ++row)
        for (size_t k = 0; k < columns; ++k) {
            float& value = x[row * columns + k];
            if (row == 3)
                value = 0;
            else if (row == 4)
                value *= 1e-39f;
            else if (row == 5)
                value *= 3e30f;
        }
    if (rows > 8) {
        x[6 * columns] = std::numeric_limits<float>::quiet_NaN();
        x[7 * columns + columns / 2] = std::numeric_limits<float>::infinity();
        x[8 * columns + columns - 1] = -std::numeric_limits<float>::max();
    }
    return x;
}

bool same(float a, float b, bool exact) {
    if (std::isnan(a) || std::isnan(b))
        return std::isnan(a) == std::isnan(b) || !exact;
    return exact ? a == b : std::fabs(a - b) <= 1e-3f * (1 + std::fabs(a));
}

void check(const Form& form, size_t channels, size_t columns, size_t rows) {
    Weight w{};
    w.channels = channels;
    w.columns = columns;
    w.group = form.group;
    w.f16_scale = form.f16;
    if (!read_format(form.kind, form.activations, form.low, w))
        throw std::runtime_error("a format is not known");
    Buffer packed(w.strips() * w.strip_bytes());
    fill(w, packed.data());
    w.data = packed.data();
    const std::vector<float> x = activations(rows, columns);
    const std::vector<float> bias = activations(1, channels), residual = activations(rows, channels);
    const auto run = [&](Isa isa, size_t threads) {
        std::vector<float> y(rows * channels);
        RowsBuffer buffer;
        Source source;
        source.x = x.data();
        source.stride = columns;
        multiply(w, source, rows, Target{y.data(), channels, bias.data(), residual.data(), channels}, buffer, threads,
                 isa);
        return y;
    };
    const std::vector<float> expected = run(Isa::portable, 1);
    for (const Isa isa : kIsas) {
        if (!has_isa(isa))
            continue;
        const std::vector<float> y = run(isa, 2);
        for (size_t i = 0; i < y.size(); ++i) {
            const bool exact = w.kind != Kind::bf16;
            const size_t row = i / channels;
            if ((!exact && row > 4) || same(expected[i], y[i], exact))
                continue;
            std::printf("%s %s %s group %zu, %zu x %zu, %zu rows, %s: y[%zu] is %g, not %g\n", form.kind,
                        form.activations, form.low, form.group, channels, columns, rows, isa_name(isa), i, y[i],
                        expected[i]);
            ++failures;
            break;
        }
        // A row with NaN or infinity is NaN all along, and no other row is.
        for (size_t i = 0; w.kind != Kind::bf16 && rows > 8 && i < y.size(); ++i) {
            const size_t row = i / channels;
            if (std::isnan(y[i]) != (row == 6 || row == 7)) {
                std::printf("%s, row %zu: y is %g\n", isa_name(isa), row, y[i]);
                ++failures;
                break;
            }
        }
    }
}

void check_rows(size_t columns) {
    const std::vector<float> x = activations(12, columns), gain = activations(1, columns);
    for (size_t row = 0; row < 12; ++row) {
        std::vector<float> expected(columns), y(columns), expected_gate(columns), gate(columns);
        std::vector<float> expected_gelu(columns), gelu(columns);
        const float* at = x.data() + row * columns;
        kernels(Isa::portable).rms_norm(at, gain.data(), 1e-5f, columns, expected.data());
        kernels(Isa::portable).silu_mul(at, gain.data(), columns, expected_gate.data());
        kernels(Isa::portable).gelu_mul(at, gain.data(), columns, expected_gelu.data());
        for (const Isa isa : kIsas) {
            if (!has_isa(isa))
                continue;
            kernels(isa).rms_norm(at, gain.data(), 1e-5f, columns, y.data());
            kernels(isa).silu_mul(at, gain.data(), columns, gate.data());
            kernels(isa).gelu_mul(at, gain.data(), columns, gelu.data());
            for (size_t k = 0; k < columns; ++k)
                if (!same(expected[k], y[k], true) || !same(expected_gate[k], gate[k], true) ||
                    !same(expected_gelu[k], gelu[k], true)) {
                    std::printf("rows of %zu, row %zu, %s: %g %g %g, not %g %g %g\n", columns, row, isa_name(isa), y[k],
                                gate[k], gelu[k], expected[k], expected_gate[k], expected_gelu[k]);
                    ++failures;
                    break;
                }
        }
        for (size_t k = 0; k < columns; ++k) {
            const double exact = at[k] / (1 + std::exp(-static_cast<double>(at[k]))) * gain[k];
            if (std::isfinite(exact) && std::fabs(expected_gate[k] - exact) > 3e-6 * std::fabs(exact) + 1e-30) {
                std::printf("silu(%g) * %g is %g, not %g\n", at[k], gain[k], expected_gate[k], exact);
                ++failures;
                break;
            }
            const double x = at[k], inside = std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
            const double gelued = 0.5 * x * (1 + std::tanh(inside)) * gain[k];
            if (std::isfinite(gelued) && std::fabs(expected_gelu[k] - gelued) > 1e-6 * std::fabs(x * gain[k]) + 1e-30) {
                std::printf("gelu(%g) * %g is %g, not %g\n", x, gain[k], expected_gelu[k], gelued);
                ++failures;
                break;
            }
            if (std::isnan(at[k]) && !(std::isnan(expected_gate[k]) && std::isnan(expected_gelu[k])))
                ++failures;
        }
    }
}

// Three norms of six columns each, their gate, and the last one's norm again: each step's bits are the kernels' own.
void check_heads(const block::Program& program, size_t rows) {
    constexpr size_t kWidth = 20, kHead = 6;
    const std::vector<float> x = activations(rows, kWidth), gain = activations(1, kHead);
    std::vector<float> gates(rows * 9), last(rows * kHead);
    program.run({x.data(), gain.data()}, {gates.data(), last.data()}, rows, 0, 2);
    const Kernels& kernel = kernels(best_isa());
    for (size_t row = 0; row < rows; ++row) {
        float normed[18], gate[9], again[kHead];
        for (size_t first = 0; first < 18; first += kHead)
            kernel.rms_norm(x.data() + row * kWidth + 1 + first, gain.data(), 1e-5f, kHead, normed + first);
        kernel.gelu_mul(normed, normed + 9, 9, gate);
        kernel.rms_norm(normed + 12, gain.data(), 1e-5f, kHead, again);
        bool right = true;
        for (size_t k = 0; k < 9; ++k)
            right = right && same(gate[k], gates[row * 9 + k], true);
        for (size_t k = 0; k < kHead; ++k)
            right = right && same(again[k], last[row * kHead + k], true);
        if (!right) {
            std::printf("norms of heads: row %zu of %zu is not the kernels'\n", row, rows);
            ++failures;
            return;
        }
    }
}

// Steps around a block, whose buffers are exactly as large as their rows.
void check_graph(size_t rows) {
    block::Graph graph({3, 0});
    std::vector<float> gain = activations(1, 6), floats = activations(5, 3);
    std::vector<int8_t> bytes(15, 7);
    std::vector<uint16_t> halves(15, 0x4040);  // 3
    std::vector<float> scales = activations(1, 5), finer = activations(5, 3), frequencies = activations(1, 3);
    using block::Table;
    const size_t ids = 1, joined = graph.join({graph.look_up({Table::f32, 3, floats.data(), nullptr, 0}, ids), 0});
    const size_t made = graph.block(block::Program::parse("input 6;value 6 0;add 1 0 0 6 0 0 6"), {joined}, nullptr);
    const size_t whole = graph.look_up({Table::i8, 3, bytes.data(), scales.data(), 3}, ids);
    const size_t half = graph.scale(graph.look_up({Table::bf16, 3, halves.data(), finer.data(), 1}, ids), 0.5f);
    const size_t angles = graph.angles(false, ids, frequencies.data(), 3);
    const size_t normed = graph.norm(graph.take(made, ids), gain.data(), 1e-5f);
    graph.give(whole);
    graph.give(normed);
    graph.give(half);
    graph.give(angles);
    const std::vector<float> x = activations(rows, 3);
    std::vector<int64_t> chosen(rows);
    for (size_t row = 0; row < rows; ++row)
        chosen[row] = static_cast<int64_t>((rows - row) % std::min<size_t>(rows, 5));
    std::vector<float> one(rows * 3), two(rows * 6), three(rows * 3), four(rows * 3);
    const void* data[] = {x.data(), chosen.data()};
    const uint64_t lengths[] = {rows, rows};
    float* outputs[] = {one.data(), two.data(), three.data(), four.data()};
    graph.run(data, lengths, outputs, 2);
    for (size_t row = 0; row < rows; ++row) {
        const auto id = static_cast<size_t>(chosen[row]);
        float sum[6], expected[6];
        for (size_t k = 0; k < 3; ++k) {
            sum[k] = 2 * floats[static_cast<size_t>(chosen[id]) * 3 + k];
            sum[k + 3] = 2 * x[id * 3 + k];
        }
        kernels(best_isa()).rms_norm(sum, gain.data(), 1e-5f, 6, expected);
        for (size_t k = 0; k < 6; ++k)
            if (!same(expected[k], two[row * 6 + k], true) || one[row * 3 + k % 3] != 7 * scales[id] ||
                three[row * 3 + k % 3] != 3 * finer[id * 3 + k % 3] * 0.5f ||
                four[row * 3 + k % 3] != std::cos(static_cast<float>(id) * frequencies[k % 3])) {
                std::printf("graph: row %zu of %zu is wrong\n", row, rows);
                ++failures;
                return;
            }
    }
}

void check_program() {
    const char* text =
        "input 8;input 4;input 4;value 8 -1;step";
    try {
        block::Program::parse(text);
        ++failures;
    } catch (const std::runtime_error&) {
    }
    const auto program = block::Program::parse(
        "input 8;input 4;input 4;value 8 -1;value 8 -1;value 8 0;value 4 1;norm 3 0 0 8 3 1e-05;"
        "rope 4 3 0 8 1 0 4 2 0 4;add 5 4 0 8 0 0 8;gate 6 5 0 4 5 4 4");
    const auto heads = block::Program::parse(
        "input 20;value 18 -1;value 9 0;value 6 1;head_norm 1 0 1 18 1 1e-05 6;gelu_gate 2 1 0 9 1 9 9;"
        "head_norm 3 1 12 6 1 1e-05 6");
    for (const size_t rows : {size_t{0}, size_t{1}, size_t{9}, size_t{300}}) {
        const std::vector<float> x = activations(rows, 8), cos = activations(rows, 4), gain = activations(1, 8);
        std::vector<float> one(rows * 8), two(rows * 4);
        program.run({x.data(), cos.data(), cos.data(), gain.data()}, {one.data(), two.data()}, rows, 0, 2);
        check_heads(heads, rows);
        check_graph(rows);
    }
    const char* wrong[] = {"input 8;value 8 -1;value 8 0;add 2 1 0 8 0 0 8;add 1 0 0 8 0 0 8",
                           "input 8;value 8 0;add 1 0 0 8 0 0 8;copy 1 0 0 8",
                           "input 8;value 8 0;value 8 1;copy 1 0 0 8",
                           "input 8;value 8 0;input 8;copy 1 0 0 8",
                           "input 8;value 8 0;norm 1 0 0 8 2 1e-05;constants 1 0",
                           // heads that do not fit, of no columns, into a value of another width
                           "input 8;value 8 0;head_norm 1 0 0 8 1 1e-05 3", "input 8;value 8 0;head_norm 1 0 0 8 1 1e-05 0",
                           "input 8;value 9 0;head_norm 1 0 0 8 1 1e-05 4", "input 8;value 8 0;head_norm 1 0 0 8 1 1e-05",
                           // a cache that ends behind its pool's block
                           "input 8;value 8 0;attend 1 0 0 8 0 0 4 0 0 4 2 1 4 4 0 0 0 32 0 1 0 0 0 -1 -1 0 1;pool 2 1023 0 512",
                           // attention: a value that is too narrow, another type, heads that do not fit, an early end
                           "input 8;value 4 0;attend 1 0 0 8 0 0 4 0 0 4 2 1 4 4 0 0 0 32 0 1 0 0 0 -1 -1 0 1",
                           "input 8;value 8 0;attend 1 0 0 8 0 0 4 0 0 4 2 1 4 4 0 7 0 32 0 1 0 0 0 -1 -1 0 1",
                           "input 8;value 8 0;attend 1 0 0 8 0 0 4 0 0 4 2 2 4 4 0 0 0 32 0 1 0 0 0 -1 -1 0 1",
                           "input 8;value 8 0;attend 1 0 0 8 0 0 4 0 0 4 2 1 4 4 0 0 0 32 0 1 0 0",
                           "input 8;value 8 0;add 1 0 0 9 0 0 8", "input 8;value 8 0;add 0 0 0 8 0 0 8",
                           "input 8;value 8 0;dance 1 0 0 8", "input 8;value 8 0;add 1 0 0", "input 8;value 8 0;add 5 0 0 8 0 0 8"};
    for (const char* one : wrong) {
        try {
            block::Program::parse(one);
            std::printf("taken: %s\n", one);
            ++failures;
        } catch (const std::runtime_error&) {
        }
    }
}

// Two layers whose attention lies between sums: many rows at once give what few at a time do, and what a program a
// layer does. `dtype`: of the cells.
void check_stack(int dtype) {
    constexpr size_t kWidth = 64, kHeads = 2, kSize = 32, kRows = 300, kBlocks = (kRows + 31) / 32;
    const std::string type = std::to_string(dtype);
    const auto layer = [&](size_t x, size_t first, size_t caches, int output) {  // makes five values from `first` on
        const auto n = [](size_t number) { return std::to_string(number); };
        return "value 64 -1;value 64 -1;value 64 -1;value 64 -1;value 64 " + std::to_string(output) +
               ";add " + n(first) + " " + n(x) + " 0 64 " + n(x) + " 0 64" +
               ";add " + n(first + 1) + " " + n(first) + " 0 64 " + n(x) + " 0 64" +
               ";attend " + n(first + 2) + " " + n(first + 1) + " 0 64 " + n(first) + " 0 32 " + n(first) + " 32 32 2 1 32 32 100 " +
               type + " " + type + " 32 3 0.2 0 0 0 -1 -1 " + n(caches) + " " + n(caches + 1) +
               ";add " + n(first + 3) + " " + n(first + 2) + " 0 64 " + n(first + 1) + " 0 64" +
               ";add " + n(first + 4) + " " + n(first + 3) + " 0 64 " + n(x) + " 0 64";
    };
    const auto whole = block::Program::parse("input 64;" + layer(0, 1, 0, -1) + ";" + layer(5, 6, 2, 0));
    const auto one = block::Program::parse("input 64;" + layer(0, 1, 0, 0));
    const size_t page_bytes = 2 * (whole.steps[2].problem.key_block_bytes + whole.steps[2].problem.value_block_bytes);
    const size_t places[] = {page_bytes / 2, 0, page_bytes * 3 / 4, page_bytes / 4};
    std::string pool = ";pool 4 " + std::to_string(page_bytes);
    for (const size_t first : places)
        pool += " " + std::to_string(first);
    const auto joined = block::Program::parse("input 64;" + layer(0, 1, 0, -1) + ";" + layer(5, 6, 2, 0) + pool);
    attention::Problem p = whole.steps[2].problem;
    const size_t page = std::max(p.key_format.page_bytes(kSize), p.value_format.page_bytes(kSize));
    std::normal_distribution<float> normal;
    std::vector<float> x(kRows * kWidth);
    for (float& value : x)
        value = normal(generator);
    std::vector<int32_t> blocks(kBlocks);
    for (size_t i = 0; i < kBlocks; ++i)
        blocks[i] = static_cast<int32_t>(kBlocks - 1 - i);
    const int32_t block_starts[] = {0, kBlocks};
    std::vector<std::unique_ptr<Buffer>> caches;
    for (size_t i = 0; i < 4; ++i)
        caches.push_back(std::make_unique<Buffer>(kBlocks * page, 64));
    const auto run = [&](const block::Program& program, const float* rows, size_t past, size_t count, size_t cache,
                         float* y, size_t threads) {
        const auto before = static_cast<int32_t>(past);
        const int32_t starts[] = {0, static_cast<int32_t>(count)};
        std::vector<const void*> ports{rows, &before, starts, blocks.data(), block_starts};
        for (size_t i = 0; i < program.caches; ++i)
            ports.push_back(caches[cache + i]->data());
        program.run(ports, {y}, count, 1, threads);
    };
    std::vector<float> expected(kRows * kWidth), between(kRows * kWidth), y(kRows * kWidth);
    run(whole, x.data(), 0, kRows, 0, expected.data(), 2);
    for (const size_t step : {size_t{1}, size_t{7}, size_t{290}, size_t{300}})
        for (const size_t threads : {1, 2}) {
            for (size_t past = 0; past < kRows; past += step)
                run(whole, x.data() + past * kWidth, past, std::min(step, kRows - past), 0, y.data() + past * kWidth, threads);
            if (y != expected) {
                std::printf("cells %d, %zu rows at a time: not what all at once are\n", dtype, step);
                ++failures;
            }
        }
    {  // all caches in one memory
        Buffer memory(kBlocks * page_bytes, 64);
        const int32_t before = 0, starts[] = {0, kRows};
        std::vector<const void*> ports{x.data(), &before, starts, blocks.data(), block_starts};
        for (const size_t first : places)
            ports.push_back(memory.data() + first);
        joined.run(ports, {y.data()}, kRows, 1, 2);
        if (y != expected) {
            std::printf("cells %d: not the same in one pool\n", dtype);
            ++failures;
        }
    }
    run(one, x.data(), 0, kRows, 0, between.data(), 2);
    run(one, between.data(), 0, kRows, 2, y.data(), 2);
    if (y != expected) {
        std::printf("cells %d: two layers are not one after the other\n", dtype);
        ++failures;
    }
}

}  // namespace

int main() {
    for (const Form& form : kForms)
        for (const auto& shape : kShapes)
            for (const size_t rows : kRows)
                check(form, shape[0], shape[1], rows);
    for (const size_t columns : {1, 7, 16, 33, 576})
        check_rows(columns);
    check_program();
    for (int dtype = 0; dtype < 7; ++dtype)
        check_stack(dtype);
    failures += check_attention();
    std::printf("%d failures\n", failures);
    return failures != 0;
}
