#include "block/graph.hpp"

#include <algorithm>
#include <utility>

namespace plancast::block {

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
    steps_.emplace_back([this, table, ids, made] {
        const size_t rows = values_[ids].rows;
        float* y = make(made, rows);
        for (size_t row = 0; row < rows; ++row, y += table.width) {
            const auto id = static_cast<size_t>(ids_of(ids)[row]), first = id * table.width;
            if (table.floats)
                std::copy_n(table.floats + first, table.width, y);
            else
                for (size_t k = 0; k < table.width; ++k)
                    y[k] = static_cast<float>(table.bytes[first + k]) * table.scales[id];
        }
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
        for (size_t row = 0; row < rows; ++row)
            kernel.rms_norm(rows_of(value) + row * columns, gain, epsilon, columns, y + row * columns);
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
