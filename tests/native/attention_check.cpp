// Paged attention under the sanitizers: every KV format and instruction set over shapes with odd tails, with every
// attribute, in buffers of just the size that they need. Every instruction set must agree with the portable one to the
// bit, but for AMX on cells of bf16 and FP8.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "paged_attention/kernel.hpp"

using namespace plancast::attention;

namespace {

std::mt19937 generator(2);

struct Shape {
    size_t kv_heads, group, head_size, v_head_size;
};
constexpr Shape kShapes[] = {{1, 1, 64, 64}, {3, 3, 64, 64}, {1, 4, 128, 128}, {1, 8, 96, 64}, {2, 2, 32, 128}, {1, 5, 80, 80}};

struct Attributes {
    float softcap;
    size_t sliding_window;
    bool sinks, alibi;
};
constexpr Attributes kAttributes[] = {{0, 0, false, false}, {20, 0, true, false}, {0, 40, false, true}};

// Tokens in the cache before the step, and new ones, of each sequence.
constexpr int32_t kPast[] = {0, 1, 31, 300, 0, 127};
constexpr int32_t kNew[] = {1, 1, 2, 1, 70, 5};
constexpr size_t kSequences = 6;
constexpr Isa kIsas[] = {Isa::avx2, Isa::avx512, Isa::avx512_bf16, Isa::amx};
const char* const kNames[] = {"f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2"};

std::vector<float> random_floats(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(count);
    for (float& value : values)
        value = normal(generator);
    return values;
}

int check(Dtype dtype, const Shape& shape, const Attributes& attributes) {
    Problem p{};
    p.sequences = kSequences;
    p.num_kv_heads = shape.kv_heads;
    p.num_heads = shape.kv_heads * shape.group;
    p.head_size = shape.head_size;
    p.v_head_size = shape.v_head_size;
    p.scale = 0.125f;
    p.softcap = attributes.softcap;
    p.sliding_window = attributes.sliding_window;
    p.key_format = p.value_format = Format{dtype, 32, dtype == Dtype::int4, 0, false};
    p.dense();
    std::vector<int32_t> starts{0}, block_starts{0}, ids;
    for (size_t i = 0; i < kSequences; ++i) {
        starts.push_back(starts.back() + kNew[i]);
        block_starts.push_back(block_starts.back() + (kPast[i] + kNew[i] + 31) / 32);
    }
    const auto blocks = static_cast<size_t>(block_starts.back());
    for (size_t i = 0; i < blocks; ++i)
        ids.push_back(static_cast<int32_t>(blocks - 1 - i));
    const auto tokens = static_cast<size_t>(starts.back());
    const std::vector<float> q = random_floats(tokens * p.query_stride), k = random_floats(tokens * p.key_stride),
                             v = random_floats(tokens * p.value_stride), per_head = random_floats(p.num_heads);
    p.query = q.data();
    p.key = k.data();
    p.value = v.data();
    p.past_lens = kPast;
    p.query_starts = starts.data();
    p.block_ids = ids.data();
    p.block_starts = block_starts.data();
    p.sinks = attributes.sinks ? per_head.data() : nullptr;
    p.alibi = attributes.alibi ? per_head.data() : nullptr;
    // What the cache held before: anything but codes that are no number, so small ones.
    std::vector<uint8_t> keys(blocks * p.key_block_bytes), values(blocks * p.value_block_bytes);
    for (auto* cache : {&keys, &values})
        for (uint8_t& byte : *cache)
            byte = generator() & 0x33;
    const auto attend = [&](Isa isa, size_t threads, std::vector<uint8_t>& key_pages, std::vector<uint8_t>& value_pages) {
        // new[] of just so many bytes: the sanitizer sees any access beyond.
        const std::unique_ptr<uint8_t[]> key_cache(new uint8_t[keys.size()]), value_cache(new uint8_t[values.size()]);
        std::memcpy(key_cache.get(), keys.data(), keys.size());
        std::memcpy(value_cache.get(), values.data(), values.size());
        std::vector<float> out(tokens * p.out_stride);
        Problem problem = p;
        problem.key_cache = key_cache.get();
        problem.value_cache = value_cache.get();
        problem.out = out.data();
        Workspace workspace;
        run(problem, *kernels(isa), threads, workspace);
        key_pages.assign(key_cache.get(), key_cache.get() + keys.size());
        value_pages.assign(value_cache.get(), value_cache.get() + values.size());
        return out;
    };
    std::vector<uint8_t> wanted_keys, wanted_values, key_pages, value_pages;
    const std::vector<float> expected = attend(Isa::portable, 1, wanted_keys, wanted_values);
    int failures = 0;
    for (const Isa isa : kIsas) {
        if (!kernels(isa))
            continue;
        for (const size_t threads : {1, 2}) {
            const std::vector<float> out = attend(isa, threads, key_pages, value_pages);
            const bool near = isa == Isa::amx && (dtype == Dtype::bf16 || p.key_format.fp8());
            const bool same = near || std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)) == 0;
            if (same && key_pages == wanted_keys && value_pages == wanted_values)
                continue;
            std::printf("attention on %s cells, heads of %zu, %zu a KV head, isa %d, %zu threads: not the portable's %s\n",
                        kNames[static_cast<int>(dtype)], shape.head_size, shape.group, static_cast<int>(isa), threads,
                        same ? "pages" : "bits");
            ++failures;
        }
    }
    return failures;
}

}  // namespace

int check_attention() {
    int failures = 0;
    for (int dtype = 0; dtype < 7; ++dtype)
        for (const Shape& shape : kShapes)
            for (const Attributes& attributes : kAttributes)
                failures += check(static_cast<Dtype>(dtype), shape, attributes);
    return failures;
}
