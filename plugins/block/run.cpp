// Runs the steps of a block's program.
#include <algorithm>
#include <memory>

#include "block/each_row.hpp"
#include "block/program.hpp"

namespace plancast::block {

namespace {

using linear::Kernels;
using linear::Source;

// Rows that go through the steps between two attend steps together: what passes between the steps stays in the
// second-level cache, and the weights are read from the third.
constexpr size_t kRowsTogether = 256;

// Memory that one step after another uses; what stands in it is lost when it grows.
class Memory {
public:
    float* reserve(size_t floats) {
        if (size_ < floats) {
            memory_.reset();
            memory_.reset(new float[floats + 16]);
            size_ = floats;
        }
        return memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64 / sizeof(float);
    }

private:
    std::unique_ptr<float[]> memory_;
    size_t size_ = 0;
};

// Where values lie while the steps run.
struct Frame {
    const Program& program;
    const std::vector<const void*>& ports;
    const std::vector<float*>& outputs;
    float *kept, *passing;  // memory of values that leave no trace
    size_t rows, together;  // all rows, and those of a part
    size_t first;           // row of this part

    // Where a step's value begins.
    float* made(size_t index) const {
        const Value& value = program.values[index];
        if (value.output >= 0)
            return outputs[static_cast<size_t>(value.output)] + first * value.width;
        return value.kept ? kept + value.at * rows + first * value.width : passing + value.at * together;
    }
    const float* read(const Columns& c) const {
        if (c.value >= program.inputs)
            return made(c.value) + c.first;
        return static_cast<const float*>(ports[c.value]) + first * program.values[c.value].width + c.first;
    }
    size_t stride(const Columns& c) const { return program.values[c.value].width; }
    const float* constant(int port) const { return port < 0 ? nullptr : static_cast<const float*>(ports[port]); }
};

Source source_of(const Step& step, const Frame& frame) {
    Source source;
    source.step = step.source;
    source.x = frame.read(step.a);
    source.stride = frame.stride(step.a);
    source.gain = frame.constant(step.gain_port);
    source.epsilon = step.epsilon;
    if (step.source == Source::silu_mul || step.source == Source::gelu_mul)
        source.up = frame.read(step.b);
    return source;
}

linear::Weight weight_of(const Step& step, const Frame& frame) {
    linear::Weight weight = step.weight;
    weight.data = static_cast<const uint8_t*>(frame.ports[step.weight_port]);
    return weight;
}

// What is read after step `index` and what comes before the next product: nothing where that is the last.
Upcoming after(size_t index, const Frame& frame, size_t threads) {
    const std::vector<Step>& steps = frame.program.steps;
    while (++index < steps.size())
        if (steps[index].kind == Step::linear)
            return linear::reads_first(weight_of(steps[index], frame), frame.rows, threads);
    return {};
}

void run_step(size_t index, const Frame& frame, size_t rows, size_t threads, linear::RowsBuffer& buffer) {
    const Step& step = frame.program.steps[index];
    const linear::Isa isa = linear::best_isa();
    const Kernels& kernel = linear::kernels(isa);
    float* const y = frame.made(step.target);
    const size_t width = frame.program.values[step.target].width;
    if (step.kind == Step::linear) {
        const float* residual = step.residual ? frame.read(step.c) : nullptr;
        const linear::Target target{y, width, frame.constant(step.bias_port), residual,
                                    step.residual ? frame.stride(step.c) : 0};
        return linear::multiply(weight_of(step, frame), source_of(step, frame), rows, target, buffer, threads, isa,
                                after(index, frame, threads));
    }
    if (step.kind == Step::norm || step.kind == Step::gate) {
        const Source source = source_of(step, frame);
        return each_row(rows, threads,
                        [&](size_t row) { linear::source_row(source, row, step.a.width, kernel, y + row * width); });
    }
    const float* a = frame.read(step.a);
    const size_t a_stride = frame.stride(step.a);
    if (step.kind == Step::head_norm)
        return each_row(rows, threads, [&](size_t row) {
            for (size_t first = 0; first < width; first += step.head)
                kernel.rms_norm(a + row * a_stride + first, frame.constant(step.gain_port), step.epsilon, step.head,
                                y + row * width + first);
        });
    if (step.kind == Step::copy)
        return each_row(rows, threads, [&](size_t row) {
            std::copy(a + row * a_stride, a + row * a_stride + width, y + row * width);
        });
    const float* b = frame.read(step.b);
    const size_t b_stride = frame.stride(step.b);
    if (step.kind == Step::add)
        return each_row(rows, threads, [&](size_t row) {
            for (size_t k = 0; k < width; ++k)
                y[row * width + k] = a[row * a_stride + k] + b[row * b_stride + k];
        });
    const float* c = frame.read(step.c);
    const size_t c_stride = frame.stride(step.c), head = step.b.width, half = head / 2;
    each_row(rows, threads, [&](size_t row) {
        const float *cos = b + row * b_stride, *sin = c + row * c_stride;
        for (size_t first = 0; first < width; first += head)
            kernel.rotate(a + row * a_stride + first, cos, sin, half, y + row * width + first);
    });
}

// All rows of an attend step.
void attend(size_t index, const Frame& frame, size_t sequences, size_t threads) {
    const Program& program = frame.program;
    const Step& step = program.steps[index];
    const auto table = [&](size_t n) { return static_cast<const int32_t*>(frame.ports[program.inputs + n]); };
    const auto cache = [&](size_t n) {
        return static_cast<uint8_t*>(const_cast<void*>(frame.ports[program.inputs + Program::kTables + n]));
    };
    attention::Problem p = step.problem;
    p.query = frame.read(step.a);
    p.key = frame.read(step.b);
    p.value = frame.read(step.c);
    p.out = frame.made(step.target);
    p.query_stride = frame.stride(step.a);
    p.key_stride = frame.stride(step.b);
    p.value_stride = frame.stride(step.c);
    p.key_cache = cache(step.key_cache);
    p.value_cache = cache(step.value_cache);
    p.past_lens = table(0);
    p.query_starts = table(1);
    p.block_ids = table(2);
    p.block_starts = table(3);
    p.sinks = frame.constant(step.sinks_port);
    p.alibi = frame.constant(step.alibi_port);
    p.sequences = sequences;
    thread_local attention::Workspace workspace;
    attention::run(p, *attention::kernels(attention::best_isa()), threads, workspace,
                   after(index, frame, threads));
}

}  // namespace

void Program::run(const std::vector<const void*>& ports, const std::vector<float*>& outputs, size_t rows,
                  size_t sequences, size_t threads) const {
    thread_local Memory kept_memory, passing_memory;
    thread_local linear::RowsBuffer buffer;
    const size_t together = std::min(rows, kRowsTogether);
    Frame frame{*this, ports, outputs, kept_memory.reserve(kept_floats * rows),
                passing_memory.reserve(passing_floats * together), rows, together, 0};
    for (const Stretch& stretch : stretches) {
        const bool attends = steps[stretch.first].kind == Step::attend;
        const size_t count = attends ? rows : together;
        for (size_t first = 0; first < rows; first += count) {
            frame.first = first;
            if (attends)
                attend(stretch.first, frame, sequences, threads);
            for (size_t i = stretch.first; i < stretch.last && !attends; ++i)
                run_step(i, frame, std::min(count, rows - first), threads, buffer);
        }
    }
}

}  // namespace plancast::block
