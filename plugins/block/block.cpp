#include "block/block.hpp"

#include <openvino/core/parallel.hpp>

namespace plancast {

void Block::validate_and_infer_types() {
    if (!program_)
        program_ = std::make_shared<const block::Program>(block::Program::parse(text_));
    NODE_VALIDATION_CHECK(this, get_input_size() >= program_->inputs && program_->inputs > 0, "too few inputs");
    for (size_t i = 0; i < program_->inputs; ++i)
        NODE_VALIDATION_CHECK(this, get_input_element_type(i) == ov::element::f32, "input ", i, " must be f32");
    if (!program_->constants.empty())
        NODE_VALIDATION_CHECK(this, get_input_size() == program_->inputs + 1, "all constants must be one input");
    const ov::PartialShape& shape = get_input_partial_shape(0);
    NODE_VALIDATION_CHECK(this, shape.rank().is_static() && shape.size() >= 2, "input 0 must be [rows, width]");
    set_output_size(program_->outputs);
    for (const block::Value& value : program_->values)
        if (value.output >= 0)
            set_output_type(static_cast<size_t>(value.output), ov::element::f32,
                            ov::PartialShape{shape[0], static_cast<int64_t>(value.width)});
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
    std::vector<const void*> ports(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i)
        ports[i] = inputs[i].data();
    if (!program_->constants.empty()) {
        const auto* all = static_cast<const uint8_t*>(ports.back());
        ports.pop_back();
        for (const size_t first : program_->constants)
            ports.push_back(all + first);
    }
    program_->run(ports, results, rows, static_cast<size_t>(parallel_get_max_threads()));
    return true;
}

}  // namespace plancast
