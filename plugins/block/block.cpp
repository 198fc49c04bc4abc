#include "block/block.hpp"

#include <openvino/core/parallel.hpp>

namespace plancast {

void Block::validate_and_infer_types() {
    if (!program_) {  // a clone, of which there is one a step, has what the first has checked
        program_ = std::make_shared<const block::Program>(block::Program::parse(text_));
        check_inputs();
    }
    const ov::PartialShape& shape = get_input_partial_shape(0);
    NODE_VALIDATION_CHECK(this, shape.rank().is_static() && shape.size() >= 2, "input 0 must be [rows, width]");
    set_output_size(program_->outputs);
    for (const block::Value& value : program_->values)
        if (value.output >= 0)
            set_output_type(static_cast<size_t>(value.output), ov::element::f32,
                            ov::PartialShape{shape[0], static_cast<int64_t>(value.width)});
}

void Block::check_inputs() const {
    const block::Program& program = *program_;
    const bool pool = !program.places.empty();
    const size_t leading = program.leading() - (pool ? program.caches - 1 : 0), tables = program.inputs, caches = tables + block::Program::kTables;
    NODE_VALIDATION_CHECK(this, get_input_size() >= leading && program.inputs > 0, "too few inputs");
    for (size_t i = 0; i < program.inputs; ++i)
        NODE_VALIDATION_CHECK(this, get_input_element_type(i) == ov::element::f32, "input ", i, " must be f32");
    if (!program.constants.empty())
        NODE_VALIDATION_CHECK(this, get_input_size() == leading + 1, "all constants must be one input");
    else
        NODE_VALIDATION_CHECK(this, get_input_size() + program.leading() - leading >= program.ports, "too few constants");
    if (!program.attends)
        return;
    for (size_t i = tables; i < caches; ++i)
        NODE_VALIDATION_CHECK(this, get_input_element_type(i) == ov::element::i32, "input ", i, ", a table, must be i32");
    const auto check_cache = [&](size_t input, size_t heads, size_t page) {
        const ov::PartialShape expected{-1, static_cast<int64_t>(heads), static_cast<int64_t>(page)};
        NODE_VALIDATION_CHECK(this, get_input_element_type(input) == ov::element::u8, "caches must be u8");
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(input).compatible(expected), "cache ", input, " is ",
                              get_input_partial_shape(input), ", and its format takes ", expected);
    };
    if (pool) {
        const ov::PartialShape expected{-1, static_cast<int64_t>(program.block_bytes)};
        NODE_VALIDATION_CHECK(this, get_input_element_type(caches) == ov::element::u8, "caches must be u8");
        NODE_VALIDATION_CHECK(this, get_input_partial_shape(caches).compatible(expected), "the caches are ",
                              get_input_partial_shape(caches), ", and their formats take ", expected);
        return;
    }
    for (const block::Step& step : program.steps) {
        const attention::Problem& p = step.problem;
        if (step.kind != block::Step::attend)
            continue;
        check_cache(caches + step.key_cache, p.num_kv_heads, p.key_format.page_bytes(p.head_size));
        check_cache(caches + step.value_cache, p.num_kv_heads, p.value_format.page_bytes(p.v_head_size));
    }
}

std::shared_ptr<ov::Node> Block::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    auto clone = std::make_shared<Block>(inputs);
    clone->text_ = text_;
    clone->program_ = program_;
    clone->constructor_validate_and_infer_types();
    return clone;
}

bool Block::visit_attributes(ov::AttributeVisitor& visitor) {
    visitor.on_attribute("program", text_);
    return true;
}

bool Block::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    const size_t rows = inputs[0].get_shape()[0];
    std::vector<float*> results(outputs.size());
    for (const block::Value& value : program_->values)
        if (value.output >= 0)
            outputs[static_cast<size_t>(value.output)].set_shape({rows, value.width});
    for (size_t i = 0; i < outputs.size(); ++i)
        results[i] = outputs[i].data<float>();
    std::vector<const void*> data(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
        data[i] = inputs[i].data();
    const std::vector<const void*> ports = program_->spread(data.data(), data.size());
    const size_t sequences = program_->attends ? inputs[program_->inputs].get_size() : 0;
    program_->run(ports, results, rows, sequences, static_cast<size_t>(parallel_get_max_threads()));
    return true;
}

}  // namespace plancast
