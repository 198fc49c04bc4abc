// A model as its blocks and the little that stands between them, with no graph compiler around it, which would take longer
// for its few operations than they do. Free of OpenVINO.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "block/program.hpp"

namespace plancast::block {

// Constant rows [., width]; where `scales` f32 [., width / group] are given, a number is multiplied by its group's.
struct Table {
    enum Type { f32, bf16, i8 } type;
    size_t width;
    const void* data;
    const float* scales;
    size_t group;
};

// Values are numbered: the inputs first, then what steps make, [rows, width] f32 each. Not thread-safe.
class Graph {
public:
    // `widths`: of the inputs, in floats a row; 0 for one that is no rows.
    explicit Graph(const std::vector<size_t>& widths);
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    // Each adds a step and returns the (first) value that it makes. Constants are the caller's, and stay.
    size_t look_up(const Table& table, size_t ids);  // `ids`: an input i64
    // Cosines, or sines, of each position times `count` frequencies, as the C library rounds them.
    size_t angles(bool sine, size_t positions, const float* frequencies, size_t count);
    size_t take(size_t value, size_t ids);  // rows of a value
    size_t norm(size_t value, const float* gain, float epsilon);
    size_t scale(size_t value, float factor);
    size_t join(const std::vector<size_t>& parts);  // side by side
    // `inputs`: the operation's (see op.py), but for `constants`, its last one, or null.
    size_t block(Program program, const std::vector<size_t>& inputs, const void* constants);

    // `value` is written to the next of the outputs.
    void give(size_t value) { outputs_.push_back(value); }

    // `data`: of the inputs, `lengths` their first dimensions; `outputs`: room for [rows, width] each.
    void run(const void* const* data, const uint64_t* lengths, float* const* outputs, size_t threads);

    size_t width(size_t value) const { return values_[value].width; }
    size_t values() const { return values_.size(); }

private:
    struct Value {
        size_t width, rows = 0;
        const void* data = nullptr;
        float* target = nullptr;  // of an output
        std::vector<float> own;
    };

    size_t add(size_t width);
    float* make(size_t value, size_t rows);
    const float* rows_of(size_t value) const { return static_cast<const float*>(values_[value].data); }
    const int64_t* ids_of(size_t value) const { return static_cast<const int64_t*>(values_[value].data); }

    size_t inputs_, threads_ = 1;
    std::vector<Value> values_;
    std::vector<size_t> outputs_;
    std::vector<std::function<void()>> steps_;
};

}  // namespace plancast::block
