#include "block/program.hpp"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "native/pool.hpp"

namespace plancast::block {

namespace {

using linear::Activations;
using linear::Kind;
using linear::Kernels;
using linear::Low;
using linear::Source;

// Rows that go through all the steps together: what passes between the steps stays in the second-level cache, and the
// weights are read from the third.
constexpr size_t kRowsTogether = 256;

class Reader {
public:
    explicit Reader(const std::string& line) : words_(line), line_(line) {}
    template <typename T>
    T next() {
        T out{};
        if (!(words_ >> out))
            throw std::runtime_error("a block's step ends early: " + line_);
        return out;
    }
    Columns columns() { return {next<size_t>(), next<size_t>(), next<size_t>()}; }

private:
    std::istringstream words_;
    std::string line_;
};

linear::Weight read_weight(Reader& in) {
    linear::Weight w{};
    const auto kind = in.next<std::string>(), activations = in.next<std::string>();
    w.channels = in.next<size_t>();
    w.columns = in.next<size_t>();
    w.group = in.next<size_t>();
    w.f16_scale = in.next<int>() != 0;
    const auto low = in.next<std::string>();
    if (!linear::read_format(kind, activations, low, w))
        throw std::runtime_error("a block's weight is of no known format: " + kind + " " + activations + " " + low);
    return w;
}

// Where values lie while the steps run.
struct Frame {
    const Program& program;
    const std::vector<const void*>& ports;
    const std::vector<float*>& outputs;
    std::vector<float*> made;  // by value; null: an input
    size_t first;              // row

    const float* read(const Columns& c) const {
        const size_t width = program.values[c.value].width;
        const float* base = made[c.value] ? made[c.value] : static_cast<const float*>(ports[c.value]) + first * width;
        return base + c.first;
    }
    size_t stride(const Columns& c) const { return program.values[c.value].width; }
    const float* constant(int port) const { return port < 0 ? nullptr : static_cast<const float*>(ports[port]); }
};

template <typename Body>
void each_row(size_t rows, size_t threads, const Body& body) {
    const size_t parts = rows < linear::kRowsOfOne ? 1 : std::min(rows, 4 * threads);
    parallel(parts, threads, [&](size_t index) {
        const Part part(rows, index, parts);
        for (size_t row = part.first; row < part.last; ++row)
            body(row);
    });
}

Source source_of(const Step& step, const Frame& frame) {
    Source source;
    source.step = step.source;
    source.x = frame.read(step.a);
    source.stride = frame.stride(step.a);
    source.gain = frame.constant(step.gain_port);
    source.epsilon = step.epsilon;
    if (step.source == Source::silu_mul)
        source.up = frame.read(step.b);
    return source;
}

void run_step(const Step& step, const Frame& frame, size_t rows, size_t threads, linear::RowsBuffer& buffer) {
    const linear::Isa isa = linear::best_isa();
    const Kernels& kernel = linear::kernels(isa);
    float* const y = frame.made[step.target];
    const size_t width = frame.program.values[step.target].width;
    if (step.kind == Step::linear) {
        linear::Weight weight = step.weight;
        weight.data = static_cast<const uint8_t*>(frame.ports[step.weight_port]);
        const float* residual = step.residual ? frame.read(step.c) : nullptr;
        const linear::Target target{y, width, frame.constant(step.bias_port), residual,
                                    step.residual ? frame.stride(step.c) : 0};
        return linear::multiply(weight, source_of(step, frame), rows, target, buffer, threads, isa);
    }
    if (step.kind == Step::norm || step.kind == Step::gate) {
        const Source source = source_of(step, frame);
        return each_row(rows, threads,
                        [&](size_t row) { linear::source_row(source, row, step.a.width, kernel, y + row * width); });
    }
    const float* a = frame.read(step.a);
    const size_t a_stride = frame.stride(step.a);
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
        for (size_t first = 0; first < width; first += head) {
            const float* x = a + row * a_stride + first;
            float* out = y + row * width + first;
            for (size_t k = 0; k < half; ++k) {
                out[k] = x[k] * cos[k] - x[k + half] * sin[k];
                out[k + half] = x[k + half] * cos[k + half] + x[k] * sin[k + half];
            }
        }
    });
}

}  // namespace

Program Program::parse(const std::string& text) {
    Program program;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line, ';');) {
        Reader in(line);
        const auto name = in.next<std::string>();
        if (name == "input" || name == "value") {
            const auto width = in.next<size_t>();
            const int output = name == "input" ? -1 : in.next<int>();
            program.inputs += name == "input";
            program.outputs = std::max(program.outputs, static_cast<size_t>(output + 1));
            program.values.push_back({width, output});
            continue;
        }
        if (name == "constants") {
            program.constants.resize(in.next<size_t>());
            for (size_t& first : program.constants)
                first = in.next<size_t>();
            continue;
        }
        Step step{};
        step.target = in.next<size_t>();
        if (name == "linear") {
            step.kind = Step::linear;
            const auto source = in.next<std::string>();
            step.source = source == "norm" ? Source::rms_norm : source == "gate" ? Source::silu_mul : Source::plain;
            step.a = in.columns();
            step.b = in.columns();
            step.gain_port = in.next<int>();
            step.epsilon = in.next<float>();
            step.weight_port = in.next<int>();
            step.weight = read_weight(in);
            step.bias_port = in.next<int>();
            step.residual = in.next<int>() != 0;
            step.c = in.columns();
        } else if (name == "norm") {
            step.kind = Step::norm;
            step.source = Source::rms_norm;
            step.a = in.columns();
            step.gain_port = in.next<int>();
            step.epsilon = in.next<float>();
        } else if (name == "gate" || name == "add") {
            step.kind = name == "gate" ? Step::gate : Step::add;
            step.source = Source::silu_mul;
            step.a = in.columns();
            step.b = in.columns();
        } else if (name == "rope") {
            step.kind = Step::rope;
            step.a = in.columns();
            step.b = in.columns();
            step.c = in.columns();
        } else if (name == "copy") {
            step.kind = Step::copy;
            step.a = in.columns();
        } else {
            throw std::runtime_error("a block has no step `" + name + "`");
        }
        for (const Columns& c : {step.a, step.b, step.c})
            if (c.value >= program.values.size() || c.first + c.width > program.values[c.value].width)
                throw std::runtime_error("a block's step reads columns that are not there: " + line);
        if (step.target < program.inputs || step.target >= program.values.size())
            throw std::runtime_error("a block's step makes no value: " + line);
        program.steps.push_back(step);
    }
    return program;
}

void Program::run(const std::vector<const void*>& ports, const std::vector<float*>& outputs, size_t rows,
                  size_t threads) const {
    thread_local std::vector<float> memory;
    thread_local linear::RowsBuffer buffer;
    size_t inside = 0;  // floats a row of values that leave no trace
    for (const Value& value : values)
        inside += value.output < 0 ? value.width : 0;
    const size_t together = std::min(rows, kRowsTogether);
    if (memory.size() < inside * together + 16)
        memory.resize(inside * together + 16);
    Frame frame{*this, ports, outputs, std::vector<float*>(values.size(), nullptr), 0};
    for (size_t first = 0; first < rows; first += together) {
        frame.first = first;
        float* at = memory.data();
        for (size_t i = inputs; i < values.size(); ++i) {
            if (values[i].output >= 0) {
                frame.made[i] = outputs[static_cast<size_t>(values[i].output)] + first * values[i].width;
                continue;
            }
            frame.made[i] = at;
            at += values[i].width * together;
        }
        for (const Step& step : steps)
            run_step(step, frame, std::min(together, rows - first), threads, buffer);
    }
}

}  // namespace plancast::block
