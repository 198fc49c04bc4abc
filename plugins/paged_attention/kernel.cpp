#include "paged_attention/kernel.hpp"

#include <algorithm>
#include <memory>

#include "linear/kernel.hpp"
#include "native/pool.hpp"
#include "paged_attention/isa.hpp"

namespace plancast::attention {

namespace {

constexpr size_t kShortRows = 64;  // rows of a sequence and KV head that are read as one
constexpr size_t kTileRows = 48;   // rows of a tile of a longer prompt
constexpr size_t kWriteTokens = 4 * kPage;

size_t first_split(const Problem& p, size_t position) {
    return p.sliding_window && position + 1 > p.sliding_window ? (position + 1 - p.sliding_window) / kSplit : 0;
}

}  // namespace

bool read_settings(const int32_t* settings, const float* scalars, Problem& p) {
    enum { heads, kv_heads, head_size, v_head_size, window, key_dtype, value_dtype, group_size, rotate };
    enum { scale, softcap, key_scale, value_scale };
    for (const int i : {heads, kv_heads, head_size, v_head_size, group_size})
        if (settings[i] < 1)
            return false;
    for (const int i : {key_dtype, value_dtype})
        if (settings[i] < 0 || settings[i] > static_cast<int>(Dtype::fp8_e5m2))
            return false;
    for (const int i : {head_size, v_head_size})
        if (settings[i] > static_cast<int>(kMaxHead))
            return false;
    if (settings[heads] % settings[kv_heads] || settings[window] < 0)
        return false;
    const auto format = [&](int dtype, int static_scale, int rotated) {
        return Format{static_cast<Dtype>(settings[dtype]), static_cast<size_t>(settings[group_size]), true,
                      scalars[static_scale], (settings[rotate] & rotated) != 0};
    };
    p.num_heads = static_cast<size_t>(settings[heads]);
    p.num_kv_heads = static_cast<size_t>(settings[kv_heads]);
    p.head_size = static_cast<size_t>(settings[head_size]);
    p.v_head_size = static_cast<size_t>(settings[v_head_size]);
    p.sliding_window = static_cast<size_t>(settings[window]);
    p.scale = scalars[scale];
    p.softcap = scalars[softcap];
    p.key_format = format(key_dtype, key_scale, 1);
    p.value_format = format(value_dtype, value_scale, 2);
    p.dense();
    return true;
}

void make_plan(const Problem& p, size_t threads, Plan& plan) {
    plan.writes.clear();
    plan.items.clear();
    plan.partial_floats = plan.counters = 0;
    const size_t padded = (p.v_head_size + kLanes - 1) / kLanes * kLanes;
    // With this many sequences each thread has enough to do, and nothing is gained by cutting one up.
    const bool whole = p.sequences * p.num_kv_heads >= 4 * threads;
    for (size_t b = 0; b < p.sequences; ++b) {
        const size_t past = p.past_lens[b], tokens = p.query_starts[b + 1] - p.query_starts[b];
        if (!tokens)
            continue;
        const bool is_short = tokens == 1 || tokens * p.group() <= kShortRows;
        const size_t step = is_short ? tokens : std::max<size_t>(1, kTileRows / p.group());
        for (size_t head = 0; head < p.num_kv_heads; ++head) {
            Item item{};
            item.sequence = static_cast<uint32_t>(b);
            item.head = static_cast<uint32_t>(head);
            item.writes = is_short;
            if (!is_short)
                for (size_t first = 0; first < tokens;) {
                    // Up to a multiple in the sequence: two writers never share a byte, nor mostly a cache line.
                    const size_t last = std::min(tokens, (past + first) / kWriteTokens * kWriteTokens + kWriteTokens - past);
                    plan.writes.push_back({item.sequence, item.head, static_cast<uint32_t>(first),
                                           static_cast<uint32_t>(last - first)});
                    first = last;
                }
            // The last tiles, which have the most to read, begin first.
            for (size_t tile = (tokens + step - 1) / step; tile-- > 0;) {
                const size_t first = tile * step;
                item.first_token = static_cast<uint32_t>(first);
                item.tokens = static_cast<uint32_t>(std::min(step, tokens - first));
                const size_t begin = first_split(p, past + first);
                const size_t end = (past + first + item.tokens - 1) / kSplit + 1;
                item.first_split = static_cast<uint32_t>(begin);
                item.last_split = static_cast<uint32_t>(end);
                item.parts = 0;
                if (!is_short || whole || threads == 1 || end - begin == 1) {
                    plan.items.push_back(item);
                    continue;
                }
                item.parts = static_cast<uint32_t>(end - begin);
                item.partial = static_cast<uint32_t>(plan.partial_floats / kLanes);
                item.counter = static_cast<uint32_t>(plan.counters++);
                const size_t floats = item.tokens * p.group() * (padded + 2);
                plan.partial_floats += item.parts * ((floats + kLanes - 1) / kLanes * kLanes);
                for (size_t split = begin; split < end; ++split) {
                    item.part = static_cast<uint32_t>(split - begin);
                    item.first_split = static_cast<uint32_t>(split);
                    item.last_split = static_cast<uint32_t>(split + 1);
                    plan.items.push_back(item);
                }
            }
        }
    }
    // The last parts, which may be short, come last: threads then end at nearly the same time.
    if (plan.counters)
        std::stable_sort(plan.items.begin(), plan.items.end(),
                         [](const Item& a, const Item& b) { return a.part < b.part; });
}

uint8_t* scratch(size_t bytes) {
    thread_local std::unique_ptr<uint8_t[]> memory;
    thread_local size_t size = 0;
    if (size < bytes) {
        memory.reset(new uint8_t[bytes + 64]);
        size = bytes;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory.get());
    return memory.get() + (64 - address % 64) % 64;
}

const Kernels* kernels(Isa isa) {
    if (isa > best_isa())
        return nullptr;
#ifdef PLANCAST_X86
    if (isa == Isa::amx)
        return &kAmx;
    if (isa == Isa::avx512_bf16)
        return &kAvx512Bf16;
    if (isa == Isa::avx512)
        return &kAvx512;
    if (isa == Isa::avx2)
        return &kAvx2;
#endif
    return &kPortable;
}

Isa best_isa() {
#ifdef PLANCAST_X86
    if (linear::best_isa() >= linear::Isa::avx512_bf16 && __builtin_cpu_supports("avx512vbmi"))
        return linear::best_isa() >= linear::Isa::amx ? Isa::amx : Isa::avx512_bf16;
    if (linear::best_isa() >= linear::Isa::avx512_vnni)
        return Isa::avx512;
    if (linear::best_isa() >= linear::Isa::avx2 && __builtin_cpu_supports("f16c"))
        return Isa::avx2;
#endif
    return Isa::portable;
}

void run(const Problem& problem, const Kernels& kernels, size_t threads, Workspace& workspace,
         const Upcoming& upcoming) {
    Plan& plan = workspace.plan;
    make_plan(problem, threads, plan);
    if (workspace.partials.size() < plan.partial_floats)
        workspace.partials.resize(plan.partial_floats);
    workspace.counters.assign(plan.counters, 0);
    if (!plan.writes.empty())
        parallel(plan.writes.size(), threads, [&](size_t i) { kernels.write(problem, plan.writes[i]); });
    const auto item = [&](size_t i) {
        const Item* next = i + threads < plan.items.size() ? &plan.items[i + threads] : nullptr;
        kernels.attend(problem, plan.items[i], next, workspace.partials.data(), workspace.counters.data());
    };
    parallel(plan.items.size(), threads, item, upcoming);
}

}  // namespace plancast::attention
