#include "linear/linear.hpp"

#include <memory>
#include <openvino/core/parallel.hpp>
#include <vector>

#include "linear/kernel.hpp"

namespace plancast {

namespace {

// Up to this many rows every thread quantizes them all for itself: cheaper than waiting for one another.
constexpr size_t kRowsQuantizedByEach = 4;

struct Scratch {
    std::vector<int16_t> quantized;
    std::vector<float> row_scale;
    void reserve(size_t rows, size_t padded) {
        if (quantized.size() < rows * padded)
            quantized.resize(rows * padded);
        if (row_scale.size() < rows)
            row_scale.resize(rows);
    }
};

}  // namespace

void Linear::validate_and_infer_types() {
    NODE_VALIDATION_CHECK(this, get_input_size() == 3 || get_input_size() == 4, "takes x, packed_weight, scale, bias");
    NODE_VALIDATION_CHECK(this, get_input_element_type(1) == ov::element::i8, "packed_weight must be i8");
    const auto& packed = get_input_partial_shape(1);
    const auto& scale = get_input_partial_shape(2);
    NODE_VALIDATION_CHECK(this, packed.is_static() && packed.size() == 4 && packed[2] == 32 && packed[3] == 2,
                          "packed_weight must be [strips, pairs, 32, 2], not ", packed);
    NODE_VALIDATION_CHECK(this, scale.is_static() && scale.size() == 1, "scale must be [N], not ", scale);
    auto shape = get_input_partial_shape(0);
    NODE_VALIDATION_CHECK(this, shape.rank().is_static() && shape.size() >= 1, "x must have a rank");
    const auto& columns = shape[shape.size() - 1];
    NODE_VALIDATION_CHECK(this, columns.is_static() && (columns.get_length() + 1) / 2 == packed[1].get_length(),
                          "x has ", columns, " columns, the packed weight ", packed[1], " pairs");
    shape[shape.size() - 1] = scale[0];
    set_output_type(0, ov::element::f32, shape);
}

std::shared_ptr<ov::Node> Linear::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    return std::make_shared<Linear>(inputs);
}

bool Linear::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    const ov::Shape& shape = inputs[0].get_shape();
    ov::Shape out_shape = shape;
    out_shape.back() = inputs[2].get_size();
    outputs[0].set_shape(out_shape);

    linear::Problem problem{};
    problem.packed = inputs[1].data<const int8_t>();
    problem.scale = inputs[2].data<const float>();
    problem.bias = inputs.size() > 3 ? inputs[3].data<const float>() : nullptr;
    problem.y = outputs[0].data<float>();
    problem.columns = shape.back();
    problem.channels = out_shape.back();
    problem.rows = problem.columns ? inputs[0].get_size() / problem.columns : 0;
    if (problem.rows == 0)
        return true;

    const float* x = inputs[0].data<const float>();
    const linear::Isa isa = linear::best_isa();
    const int32_t levels = linear::activation_levels(problem.columns);
    const size_t padded = problem.padded(), rows = problem.rows;
    const auto quantize = [&](Scratch& scratch, size_t row) {
        scratch.row_scale[row] = linear::quantize_row(isa, x + row * problem.columns, problem.columns, levels,
                                                      scratch.quantized.data() + row * padded);
    };
    const auto multiply = [&](const Scratch& scratch, int thread, int threads) {
        linear::Problem mine = problem;
        mine.quantized = scratch.quantized.data();
        mine.row_scale = scratch.row_scale.data();
        const size_t first = mine.strips() * thread / threads, last = mine.strips() * (thread + 1) / threads;
        for (size_t strip = first; strip < last; ++strip)
            linear::multiply_strip(isa, mine, strip);
    };
    const int threads = static_cast<int>(std::min<size_t>(parallel_get_max_threads(), problem.strips()));

    thread_local Scratch shared;
    if (rows <= kRowsQuantizedByEach) {
        ov::parallel_nt(threads, [&](int thread, int count) {
            thread_local Scratch own;
            own.reserve(rows, padded);
            for (size_t row = 0; row < rows; ++row)
                quantize(own, row);
            multiply(own, thread, count);
        });
        return true;
    }
    Scratch& scratch = shared;  // a lambda would see each thread's own
    scratch.reserve(rows, padded);
    ov::parallel_nt(threads, [&](int thread, int count) {
        for (size_t row = rows * thread / count; row < rows * (thread + 1) / count; ++row)
            quantize(scratch, row);
    });
    ov::parallel_nt(threads, [&](int thread, int count) { multiply(scratch, thread, count); });
    return true;
}

}  // namespace plancast
