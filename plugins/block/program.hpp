// The program of a block: values and the steps that make them (see op.py). Free of OpenVINO.
#pragma once

#include <string>
#include <vector>

#include "linear/kernel.hpp"
#include "paged_attention/kernel.hpp"

namespace plancast::block {

struct Columns {
    size_t value, first, width;
};

struct Value {
    size_t width;
    int output;  // of the operation; -1: none
    // Where it lies, as `Program::lay_out` decides: among what is kept for all rows or, if it is only used between two
    // attend steps, among what is kept for the rows that go through those steps together. In floats a row.
    bool kept = true;
    size_t at = 0;
};

struct Step {
    enum Kind { linear, norm, head_norm, gate, add, rope, copy, attend } kind;
    size_t target;
    Columns a{}, b{}, c{};
    // linear
    plancast::linear::Source::Step source = plancast::linear::Source::plain;
    plancast::linear::Weight weight{};
    int weight_port = -1, gain_port = -1, bias_port = -1;
    bool residual = false;
    float epsilon = 0;
    size_t head = 0;  // head_norm: the columns of each norm
    // attend: queries, keys and values are a, b and c
    attention::Problem problem{};
    int sinks_port = -1, alibi_port = -1;
    size_t key_cache = 0, value_cache = 0;  // among the caches
};

// Steps [first, last) that rows go through a part at a time; an attend step is alone and takes all rows.
struct Stretch {
    size_t first, last;
};

struct Program {
    size_t inputs = 0;  // values that come from outside
    // After them the tables (past_lens, query_starts, block_ids, block_starts) and the caches, where any step attends.
    // Constants are the ports after all those.
    bool attends = false;
    size_t caches = 0;
    // Where each cache begins in the one input that holds them all, block by block, in bytes of a block, and the bytes of
    // a block in it; none: each is an input.
    std::vector<size_t> places;
    size_t block_bytes = 0;
    // Where the constants begin in the one input after the others that holds them all; none: each is an input.
    std::vector<size_t> constants;
    size_t ports = 0;  // that the steps take
    std::vector<Value> values;  // inputs first
    std::vector<Step> steps;
    size_t outputs = 0;
    std::vector<Stretch> stretches;
    size_t kept_floats = 0, passing_floats = 0;  // a row, of values that leave no trace

    static constexpr size_t kTables = 4;
    // Ports before the constants.
    size_t leading() const { return inputs + (attends ? kTables + caches : 0); }

    // Raises std::runtime_error where `text` is no program.
    static Program parse(const std::string& text);

    // Every port's data, where `inputs` are those of the operation, of which one may hold all caches, or all constants.
    std::vector<const void*> spread(const void* const* inputs, size_t count) const;

    // Runs all steps over `rows` rows, of `sequences` sequences where a step attends. `ports`: every input's data;
    // `outputs`: [rows, width] each.
    void run(const std::vector<const void*>& ports, const std::vector<float*>& outputs, size_t rows, size_t sequences,
             size_t threads) const;

private:
    void share_pool();
    void lay_out();
};

}  // namespace plancast::block
