#include "block/graph.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "block/each_row.hpp"

namespace plancast::block {

namespace {

float number(const float* data, size_t at) {
    return data[at];
}

float number(const int8_t* data, size_t at) {
    return static_cast<float>(data[at]);
}

float number(const uint16_t* data, size_t at) {  // bf16
    const uint32_t bits = static_cast<uint32_t>(data[at]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

template <typename T>
void copy_row(const Table& table, size_t id, float* y) {
    const T* x = static_cast<const T*>(table.data) + id * table.width;
    if (!table.scales) {
        for (size_t k = 0; k < table.width; ++k)
            y[k] = number(x, k);
        return;
    }
    const float* scale = table.scales + id * (table.width / table.group);
    for (size_t first = 0; first < table.width; first += table.group, ++scale)
        for (size_t k = first; k < first + table.group; ++k)
            y[k] = number(x, k) * *scale;
}

}  // namespace

Graph::Graph(const std::vector<size_t>& widths) : inputs_(widths.size()) {
    for (const size_t width : widths)
        add(width);
}

size_t Graph::add(size_t width) {
    values_.emplace_back().width = width;
    return values_.size() - 1;
}

// Room for a value of so many rows.
float* Graph::make(size_t value, size_t rows) {
    Value& made = values_[value];
    made.rows = rows;
    float* room = made.target;
    if (!room) {
        if (made.own.size() < rows * made.width)
            made.own.resize(rows * made.width);
        room = made.own.data();
    }
    made.data = room;
    return room;
}

size_t Graph::look_up(const Table& table, size_t ids) {
    const size_t made = add(table.width);
    const auto copy = table.type == Table::f32    ? copy_row<float>
                      : table.type == Table::bf16 ? copy_row<uint16_t>
                                                  : copy_row<int8_t>;
    steps_.emplace_back([this, table, copy, ids, made] {
        const size_t rows = values_[ids].rows;
        float* y = make(made, rows);
        each_row(rows, threads_, [&](size_t row) {
            copy(table, static_cast<size_t>(ids_of(ids)[row]), y + row * table.width);
        });
    });
    return made;
}

size_t Graph::angles(bool sine, size_t positions, const float* frequencies, size_t count) {
    const size_t made = add(count);
    steps_.emplace_back([this, sine, positions, frequencies, count, made] {
        const size_t rows = values_[positions].rows;
        float* y = make(made, rows);
        each_row(rows, threads_, [&](size_t row) {
            const auto position = static_cast<float>(ids_of(positions)[row]);
            for (size_t k = 0; k < count; ++k) {
                const float angle = position * frequencies[k];
                y[row * count + k] = sine ? std::sin(angle) : std::cos(angle);
            }
        });
    });
    return made;
}

size_t Graph::take(size_t value, size_t ids) {
    const size_t made = add(width(value));
    steps_.emplace_back([this, value, ids, made] {
        const size_t rows = values_[ids].rows, columns = width(value);
        float* y = make(made, rows);
        for (size_t row = 0; row < rows; ++row)
            std::copy_n(rows_of(value) + static_cast<size_t>(ids_of(ids)[row]) * columns, columns, y + row * columns);
    });
    return made;
}

size_t Graph::norm(size_t value, const float* gain, float epsilon) {
    const size_t made = add(width(value));
    steps_.emplace_back([this, value, gain, epsilon, made] {
        const linear::Kernels& kernel = linear::kernels(linear::best_isa());
        const size_t rows = values_[value].rows, columns = width(value);
        float* y = make(made, rows);
        each_row(rows, threads_, [&](size_t row) {
            kernel.rms_norm(rows_of(value) + row * columns, gain, epsilon, columns, y + row * columns);
        });
    });
    return made;
}

size_t Graph::scale(size_t value, float factor) {
    const size_t made = add(width(value));
    steps_.emplace_back([this, value, factor, made] {
        const size_t rows = values_[value].rows, columns = width(value);
        float* y = make(made, rows);
        each_row(rows, threads_, [&](size_t row) {
            const float* x = rows_of(value) + row * columns;
            for (size_t k = 0; k < columns; ++k)
                y[row * columns + k] = x[k] * factor;
        });
    });
    return made;
}

size_t Graph::join(const std::vector<size_t>& parts) {
    size_t columns = 0;
    for (const size_t part : parts)
        columns += width(part);
    const size_t made = add(columns);
    steps_.emplace_back([this, parts, made] {
        const size_t rows = values_[parts[0]].rows;
        float* y = make(made, rows);
        for (size_t row = 0; row < rows; ++row)
            for (const size_t part : parts)
                y = std::copy_n(rows_of(part) + row * width(part), width(part), y);
    });
    return made;
}

size_t Graph::block(Program program, const std::vector<size_t>& inputs, const void* constants) {
    const size_t first = values_.size();
    std::vector<size_t> widths(program.outputs);
    for (const block::Value& value : program.values)
        if (value.output >= 0)
            widths[static_cast<size_t>(value.output)] = value.width;
    for (const size_t width : widths)
        add(width);
    steps_.emplace_back([this, program = std::make_shared<const Program>(std::move(program)), inputs, constants, first] {
        const size_t rows = values_[inputs[0]].rows;
        const size_t sequences = program->attends ? values_[inputs[program->inputs]].rows : 0;
        std::vector<const void*> data;
        data.reserve(inputs.size() + 1);
        for (const size_t input : inputs)
            data.push_back(values_[input].data);
        if (constants)
            data.push_back(constants);
        std::vector<float*> results(program->outputs);
        for (size_t i = 0; i < results.size(); ++i)
            results[i] = make(first + i, rows);
        program->run(program->spread(data.data(), data.size()), results, rows, sequences, threads_);
    });
    return first;
}

void Graph::run(const void* const* data, const uint64_t* lengths, float* const* outputs, size_t threads) {
    threads_ = threads;
    for (size_t i = 0; i < inputs_; ++i) {
        values_[i].data = data[i];
        values_[i].rows = lengths[i];
    }
    for (size_t i = 0; i < outputs_.size(); ++i)
        values_[outputs_[i]].target = outputs[i];
    for (const auto& step : steps_)
        step();
}

}  // namespace plancast::block
