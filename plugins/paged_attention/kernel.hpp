// Paged attention over KV pages: formats, one step's problem, and the work that it splits into. No OpenVINO here.
//
// A row is one query token of one head. Its keys are taken in tiles of 128 and splits of 256 tokens that begin at
// multiples of their size in the sequence, and every sum runs in one order: so a row's result is the same to the bit
// whatever the batch, the chunk, the number of threads and the instruction set (AMX apart, on bf16 and FP8 cells).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "native/pool.hpp"

namespace plancast::attention {

constexpr size_t kPage = 32;    // tokens of a block
constexpr size_t kTile = 128;   // tokens between two rescalings of a row
constexpr size_t kSplit = 256;  // tokens of a partial result
constexpr size_t kMaxHead = 512;  // elements of a head: integer sums of longer ones could overflow

enum class Dtype : int { f32, f16, bf16, int8, int4, fp8_e4m3, fp8_e5m2 };

// How keys or values are stored; kv_formats.py defines codes and scales, cpu_layout.py the order of the bytes.
struct Format {
    Dtype dtype;
    size_t group_size;   // int4
    bool zero_point;     // int4
    float static_scale;  // fp8; 0: a scale a cell
    bool rotate;

    bool packed() const { return dtype != Dtype::f32 && dtype != Dtype::f16 && dtype != Dtype::bf16; }
    bool fp8() const { return dtype == Dtype::fp8_e4m3 || dtype == Dtype::fp8_e5m2; }
    bool integer() const { return dtype == Dtype::int8 || dtype == Dtype::int4; }
    size_t bits() const {
        return dtype == Dtype::f32 ? 32 : dtype == Dtype::f16 || dtype == Dtype::bf16 ? 16 : dtype == Dtype::int4 ? 4 : 8;
    }
    size_t groups(size_t size) const { return dtype == Dtype::int4 ? (size + group_size - 1) / group_size : 1; }
    size_t data_bytes(size_t size) const { return size * bits() / 8; }
    size_t scale_count(size_t size) const {
        return !packed() || static_scale > 0 ? 0 : groups(size) * (dtype == Dtype::int4 && zero_point ? 2 : 1);
    }
    size_t page_bytes(size_t size) const { return kPage * (data_bytes(size) + 2 * scale_count(size)); }
};

struct Problem {
    const float* query;  // [T, num_heads * head_size]
    const float* key;    // [T, num_kv_heads * head_size]
    const float* value;  // [T, num_kv_heads * v_head_size]
    float* out;          // [T, num_heads * v_head_size]
    uint8_t* key_cache;  // [num_blocks, num_kv_heads, page_bytes]
    uint8_t* value_cache;
    const int32_t* past_lens;     // [sequences]
    const int32_t* query_starts;  // [sequences + 1]
    const int32_t* block_ids;
    const int32_t* block_starts;  // [sequences + 1]
    const float* sinks;           // [num_heads] or null
    const float* alibi;           // [num_heads] or null
    size_t sequences;
    size_t num_heads, num_kv_heads, head_size, v_head_size;
    size_t query_stride, key_stride, value_stride, out_stride;  // floats from a token to the next; see `dense`
    size_t key_block_bytes, value_block_bytes;                  // bytes from a block to the next
    float scale, softcap;
    size_t sliding_window;  // 0: none
    Format key_format, value_format;

    size_t group() const { return num_heads / num_kv_heads; }
    // Tokens and blocks lie end to end.
    void dense() {
        query_stride = num_heads * head_size;
        key_stride = num_kv_heads * head_size;
        value_stride = num_kv_heads * v_head_size;
        out_stride = num_heads * v_head_size;
        key_block_bytes = num_kv_heads * key_format.page_bytes(head_size);
        value_block_bytes = num_kv_heads * value_format.page_bytes(v_head_size);
    }
};

// The attributes of a node, in the order of native.py.
constexpr size_t kSettings = 9, kScalars = 4;
// Everything of `p` but its pointers and `sequences`; rows lie end to end. False where the kernels cannot compute it.
bool read_settings(const int32_t* settings, const float* scalars, Problem& p);

// One piece of work. Query tokens [first_token, first_token + tokens) of a sequence on one KV head, over the splits
// [first_split, last_split). Either it has all splits and writes the output, or it has one of `parts` and keeps a
// partial result; the last of the parts to end folds them all.
struct Item {
    uint32_t sequence, head;
    uint32_t first_token, tokens;
    uint32_t first_split, last_split;
    bool writes;  // the new keys and values of its splits
    uint32_t parts = 0, part = 0;
    uint32_t partial = 0;  // of part 0, in floats / kLanes
    uint32_t counter = 0;  // of the parts that have ended
};

// A run of new tokens of one head that must be in the cache before any item begins.
struct Write {
    uint32_t sequence, head, first_token, tokens;
};

struct Plan {
    std::vector<Write> writes;  // of long prompts; short ones are written by the items that read them
    std::vector<Item> items;
    size_t partial_floats = 0, counters = 0;
};

// Fill `plan` (its memory is reused) for a step on about `threads` threads. The results do not depend on it.
void make_plan(const Problem& problem, size_t threads, Plan& plan);

// Memory of this thread, `bytes` long and on a cache line; what stood there is lost.
uint8_t* scratch(size_t bytes);

struct Kernels {
    void (*write)(const Problem&, const Write&);
    // `next`: what this thread will likely do after `item`, or null; `partials`: plan.partial_floats; `counters`:
    // plan.counters zeros.
    void (*attend)(const Problem&, const Item& item, const Item* next, float* partials, uint32_t* counters);
};

enum class Isa : int { portable, avx2, avx512, avx512_bf16, amx };

// The kernels of an instruction set; null where this machine does not have it.
const Kernels* kernels(Isa isa);
// The best instruction set of this machine, or the best up to the one that PLANCAST_ISA names.
Isa best_isa();

// Memory that one step after another uses.
struct Workspace {
    Plan plan;
    std::vector<float> partials;
    std::vector<uint32_t> counters;
};

// Write the new keys and values into the cache and compute `problem.out`, on at most `threads` threads. `upcoming`: what is
// read after it (see native/pool.hpp).
void run(const Problem& problem, const Kernels& kernels, size_t threads, Workspace& workspace,
         const Upcoming& upcoming = {});

}  // namespace plancast::attention
