// The kernels without OpenVINO, for tests and measurements (native_library.py).
#include "paged_attention/kernel.hpp"

extern "C" {

// Memory as `attention::Problem` says; formats are {dtype, group_size, rotate}.
struct PlancastAttention {
    const float *query, *key, *value;
    float* out;
    uint8_t *key_cache, *value_cache;
    const int32_t *past_lens, *query_starts, *block_ids, *block_starts;
    const float *sinks, *alibi;
    int32_t sequences, num_heads, num_kv_heads, head_size, v_head_size, sliding_window;
    int32_t key_format[3], value_format[3];
    float scale, softcap, key_scale, value_scale;
};

// 0, or 1 where this machine does not have the instruction set (0 portable, 1 avx2, 2 avx512, 3
// avx512_bf16, 4 amx; -1 the best).
__attribute__((visibility("default"))) int plancast_attention(const PlancastAttention* a, int isa, int threads) {
    using namespace plancast::attention;
    const Kernels* used = kernels(isa < 0 ? best_isa() : static_cast<Isa>(isa));
    if (!used)
        return 1;
    const auto format = [](const int32_t* f, float scale) {
        return Format{static_cast<Dtype>(f[0]), static_cast<size_t>(f[1]), true, scale, f[2] != 0};
    };
    Problem p{};
    p.query = a->query;
    p.key = a->key;
    p.value = a->value;
    p.out = a->out;
    p.key_cache = a->key_cache;
    p.value_cache = a->value_cache;
    p.past_lens = a->past_lens;
    p.query_starts = a->query_starts;
    p.block_ids = a->block_ids;
    p.block_starts = a->block_starts;
    p.sinks = a->sinks;
    p.alibi = a->alibi;
    p.sequences = a->sequences;
    p.num_heads = a->num_heads;
    p.num_kv_heads = a->num_kv_heads;
    p.head_size = a->head_size;
    p.v_head_size = a->v_head_size;
    p.sliding_window = a->sliding_window;
    p.scale = a->scale;
    p.softcap = a->softcap;
    p.key_format = format(a->key_format, a->key_scale);
    p.value_format = format(a->value_format, a->value_scale);
    p.dense();
    thread_local Workspace workspace;
    run(p, *used, threads, workspace);
    return 0;
}
}
