#include "block/program.hpp"

#include <algorithm>
#include <sstream>
#include <stdexcept>

namespace plancast::block {

namespace {

using linear::Source;

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
    const std::string& line() const { return line_; }
    Columns columns() { return {next<size_t>(), next<size_t>(), next<size_t>()}; }

private:
    std::istringstream words_;
    std::string line_;
};

Source::Step read_gate(const std::string& name) {
    return name == "gate" ? Source::silu_mul : name == "gelu_gate" ? Source::gelu_mul : Source::plain;
}

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

void read_attend(Reader& in, Step& step) {
    step.a = in.columns();
    step.b = in.columns();
    step.c = in.columns();
    int32_t settings[attention::kSettings];
    float scalars[attention::kScalars];
    for (int32_t& setting : settings)
        setting = in.next<int32_t>();
    for (float& scalar : scalars)
        scalar = in.next<float>();
    step.sinks_port = in.next<int>();
    step.alibi_port = in.next<int>();
    step.key_cache = in.next<size_t>();
    step.value_cache = in.next<size_t>();
    attention::Problem& p = step.problem;
    if (!attention::read_settings(settings, scalars, p))
        throw std::runtime_error("a block's step attends in a way that no kernel knows: " + in.line());
    if (step.a.width != p.query_stride || step.b.width != p.key_stride || step.c.width != p.value_stride)
        throw std::runtime_error("a block's step attends to columns that are not its heads: " + in.line());
}

// The steps, or stretches of steps, in which a value is there.
struct Life {
    size_t first, last;
};

// Gives values places in one memory, such that those that are there at the same time lie apart.
class Places {
public:
    // In floats a row; the lives come in the order of their beginnings.
    size_t take(const Life& life, size_t width) {
        const size_t needed = (width + kAlign - 1) / kAlign * kAlign;
        taken_.erase(std::remove_if(taken_.begin(), taken_.end(), [&](const Taken& t) { return t.last < life.first; }),
                     taken_.end());
        size_t at = 0;
        auto before = taken_.begin();
        for (; before != taken_.end() && before->at < at + needed; ++before)
            at = before->at + before->width;
        taken_.insert(before, {at, needed, life.last});
        size_ = std::max(size_, at + needed);
        return at;
    }
    size_t size() const { return size_; }

private:
    static constexpr size_t kAlign = 16;  // a cache line
    struct Taken {
        size_t at, width, last;
    };
    std::vector<Taken> taken_;  // by place
    size_t size_ = 0;
};

}  // namespace

Program Program::parse(const std::string& text) {
    Program program;
    std::vector<bool> made;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line, ';');) {
        Reader in(line);
        const auto name = in.next<std::string>();
        if (name == "input" || name == "value") {
            const auto width = in.next<size_t>();
            const int output = name == "input" ? -1 : in.next<int>();
            if (name == "input" && program.inputs != program.values.size())
                throw std::runtime_error("a block's inputs must come before its values: " + line);
            program.inputs += name == "input";
            program.outputs = std::max(program.outputs, static_cast<size_t>(output + 1));
            program.values.push_back({width, output});
            made.push_back(false);
            continue;
        }
        if (name == "constants") {
            program.constants.resize(in.next<size_t>());
            for (size_t& first : program.constants)
                first = in.next<size_t>();
            continue;
        }
        if (name == "pool") {
            program.places.resize(in.next<size_t>());
            program.block_bytes = in.next<size_t>();
            for (size_t& first : program.places)
                first = in.next<size_t>();
            continue;
        }
        Step step{};
        step.target = in.next<size_t>();
        if (name == "linear") {
            step.kind = Step::linear;
            const auto source = in.next<std::string>();
            step.source = source == "norm" ? Source::rms_norm : read_gate(source);
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
        } else if (name == "head_norm") {
            step.kind = Step::head_norm;
            step.a = in.columns();
            step.gain_port = in.next<int>();
            step.epsilon = in.next<float>();
            step.head = in.next<size_t>();
            if (!step.head || step.a.width % step.head)
                throw std::runtime_error("a block's step has norms of heads that do not fit its columns: " + line);
        } else if (name == "gate" || name == "gelu_gate" || name == "add") {
            step.kind = name == "add" ? Step::add : Step::gate;
            step.source = read_gate(name);
            step.a = in.columns();
            step.b = in.columns();
        } else if (name == "rope") {
            step.kind = Step::rope;
            step.a = in.columns();
            step.b = in.columns();
            step.c = in.columns();
        } else if (name == "attend") {
            step.kind = Step::attend;
            read_attend(in, step);
            program.attends = true;
            program.caches = std::max({program.caches, step.key_cache + 1, step.value_cache + 1});
        } else if (name == "copy") {
            step.kind = Step::copy;
            step.a = in.columns();
        } else {
            throw std::runtime_error("a block has no step `" + name + "`");
        }
        for (const Columns& c : {step.a, step.b, step.c}) {
            if (c.value >= program.values.size() || c.first + c.width > program.values[c.value].width)
                throw std::runtime_error("a block's step reads columns that are not there: " + line);
            if (c.width && c.value >= program.inputs && !made[c.value])
                throw std::runtime_error("a block's step reads a value that no step before it makes: " + line);
        }
        if (step.target < program.inputs || step.target >= program.values.size())
            throw std::runtime_error("a block's step makes no value: " + line);
        if (step.kind == Step::head_norm && program.values[step.target].width != step.a.width)
            throw std::runtime_error("a block's step has norms of heads of another width than its value: " + line);
        if (made[step.target])
            throw std::runtime_error("a block's step makes a value that another makes: " + line);
        made[step.target] = true;
        if (step.kind == Step::attend && program.values[step.target].width != step.problem.out_stride)
            throw std::runtime_error("a block's step attends into a value of another width: " + line);
        program.steps.push_back(step);
    }
    for (size_t i = program.inputs; i < program.values.size(); ++i)
        if (!made[i])
            throw std::runtime_error("a block's value " + std::to_string(i) + " is made by no step");
    if (!program.places.empty())
        program.share_pool();
    for (const Step& step : program.steps)
        for (const int port : {step.weight_port, step.gain_port, step.bias_port, step.sinks_port, step.alibi_port})
            program.ports = std::max(program.ports, static_cast<size_t>(port + 1));
    if (!program.constants.empty() && program.ports > program.leading() + program.constants.size())
        throw std::runtime_error("a block's step takes a constant that is not there");
    program.lay_out();
    return program;
}

void Program::share_pool() {
    for (Step& step : steps) {
        attention::Problem& p = step.problem;
        if (step.kind != Step::attend)
            continue;
        const auto fits = [&](size_t cache, size_t bytes) {
            return cache < places.size() && places[cache] + bytes <= block_bytes;
        };
        if (!fits(step.key_cache, p.key_block_bytes) || !fits(step.value_cache, p.value_block_bytes))
            throw std::runtime_error("a block's step attends to a cache that is not in the pool's blocks");
        p.key_block_bytes = p.value_block_bytes = block_bytes;
    }
}

void Program::lay_out() {
    for (size_t i = 0; i < steps.size(); ++i)
        if (steps[i].kind == Step::attend || !i || steps[i - 1].kind == Step::attend)
            stretches.push_back({i, i + 1});
        else
            stretches.back().last = i + 1;
    // Of each value: the step that makes it and the last that reads it, and their stretches.
    std::vector<Life> by_step(values.size()), by_stretch(values.size());
    for (size_t stretch = 0; stretch < stretches.size(); ++stretch)
        for (size_t i = stretches[stretch].first; i < stretches[stretch].last; ++i) {
            const Step& step = steps[i];
            by_step[step.target] = {i, i};
            by_stretch[step.target] = {stretch, stretch};
            for (const Columns& c : {step.a, step.b, step.c}) {
                if (!c.width)
                    continue;
                by_step[c.value].last = i;
                by_stretch[c.value].last = stretch;
            }
        }
    // Rows of a stretch that come later still write what rows before them have written: a kept value is there for whole
    // stretches.
    Places kept, passing;
    for (const Step& step : steps) {
        Value& value = values[step.target];
        if (value.output >= 0)
            continue;
        const Life life = by_stretch[step.target];
        value.kept = step.kind == Step::attend || life.first != life.last;
        value.at = value.kept ? kept.take(life, value.width) : passing.take(by_step[step.target], value.width);
    }
    kept_floats = kept.size();
    passing_floats = passing.size();
}

std::vector<const void*> Program::spread(const void* const* given, size_t count) const {
    std::vector<const void*> found;
    found.reserve(leading() + count + constants.size());
    const size_t pool = places.empty() ? count : inputs + kTables;
    const size_t packed = constants.empty() ? count : count - 1;
    for (size_t i = 0; i < count; ++i) {
        const auto* all = static_cast<const uint8_t*>(given[i]);
        if (i == pool)
            for (size_t cache = 0; cache < caches; ++cache)
                found.push_back(all + places[cache]);
        else if (i == packed)
            for (const size_t first : constants)
                found.push_back(all + first);
        else
            found.push_back(all);
    }
    return found;
}

}  // namespace plancast::block
