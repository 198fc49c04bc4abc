// The program of a block: values and the steps that make them (see op.py). Free of OpenVINO.
#pragma once

#include <string>
#include <vector>

#include "linear/kernel.hpp"

namespace plancast::block {

struct Columns {
    size_t value, first, width;
};

struct Value {
    size_t width;
    int output;  // of the operation; -1: none
};

struct Step {
    enum Kind { linear, norm, gate, add, rope, copy } kind;
    size_t target;
    Columns a{}, b{}, c{};
    // linear
    plancast::linear::Source::Step source = plancast::linear::Source::plain;
    plancast::linear::Weight weight{};
    int weight_port = -1, gain_port = -1, bias_port = -1;
    bool residual = false;
    float epsilon = 0;
};

struct Program {
    size_t inputs = 0;          // values that come from outside; constants are the ports after them
    // Where the constants begin in the one input after them that holds them all; none: each is an input.
    std::vector<size_t> constants;
    std::vector<Value> values;  // inputs first
    std::vector<Step> steps;
    size_t outputs = 0;

    // Raises std::runtime_error where `text` is no program.
    static Program parse(const std::string& text);

    // Runs all steps over `rows` rows. `ports`: every input's data; `outputs`: [rows, width] each.
    void run(const std::vector<const void*>& ports, const std::vector<float*>& outputs, size_t rows,
             size_t threads) const;
};

}  // namespace plancast::block
