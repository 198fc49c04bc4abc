#include "linear/linear.hpp"

#include <openvino/core/parallel.hpp>

#include "linear/kernel.hpp"

namespace plancast {

linear::Weight Linear::weight() const {
    linear::Weight w{};
    w.channels = static_cast<size_t>(channels_);
    w.columns = static_cast<size_t>(columns_);
    w.group = static_cast<size_t>(group_);
    w.f16_scale = f16_scale_;
    NODE_VALIDATION_CHECK(this, linear::read_format(kind_, activations_, low_, w), "no kernel for ", kind_, " weights (",
                          low_, ") with ", activations_, " activations");
    return w;
}

void Linear::validate_and_infer_types() {
    NODE_VALIDATION_CHECK(this, get_input_size() == 2 || get_input_size() == 3, "takes x, packed_weight, bias");
    NODE_VALIDATION_CHECK(this, group_ >= 0 && group_ % 32 == 0 && channels_ > 0 && columns_ > 0, "group ", group_,
                          ", channels ", channels_, ", columns ", columns_);
    NODE_VALIDATION_CHECK(this, get_input_element_type(1) == ov::element::u8, "packed_weight must be u8");
    const linear::Weight w = weight();
    const ov::PartialShape packed{static_cast<int64_t>(w.strips()), static_cast<int64_t>(w.strip_bytes())};
    NODE_VALIDATION_CHECK(this, get_input_partial_shape(1).compatible(packed), "packed_weight must be ", packed,
                          ", not ", get_input_partial_shape(1));
    auto shape = get_input_partial_shape(0);
    NODE_VALIDATION_CHECK(this, shape.rank().is_static() && shape.size() >= 1, "x must have a rank");
    NODE_VALIDATION_CHECK(this, shape[shape.size() - 1].compatible(columns_), "x has ", shape[shape.size() - 1],
                          " columns, the weight ", columns_);
    shape[shape.size() - 1] = channels_;
    set_output_type(0, ov::element::f32, shape);
}

std::shared_ptr<ov::Node> Linear::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    auto clone = std::make_shared<Linear>(inputs);
    clone->kind_ = kind_;
    clone->activations_ = activations_;
    clone->channels_ = channels_;
    clone->columns_ = columns_;
    clone->group_ = group_;
    clone->f16_scale_ = f16_scale_;
    clone->low_ = low_;
    clone->constructor_validate_and_infer_types();
    return clone;
}

bool Linear::visit_attributes(ov::AttributeVisitor& visitor) {
    visitor.on_attribute("kind", kind_);
    visitor.on_attribute("activations", activations_);
    visitor.on_attribute("channels", channels_);
    visitor.on_attribute("columns", columns_);
    visitor.on_attribute("group", group_);
    visitor.on_attribute("f16_scale", f16_scale_);
    visitor.on_attribute("low", low_);
    return true;
}

bool Linear::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    linear::Weight w = weight();
    ov::Shape shape = inputs[0].get_shape();
    shape.back() = w.channels;
    outputs[0].set_shape(shape);
    w.data = inputs[1].data<const uint8_t>();
    const float* bias = inputs.size() > 2 ? inputs[2].data<const float>() : nullptr;
    const linear::Target target{outputs[0].data<float>(), w.channels, bias, nullptr, 0};
    thread_local linear::RowsBuffer buffer;
    linear::Source source;
    source.x = inputs[0].data<const float>();
    source.stride = w.columns;
    linear::multiply(w, source, inputs[0].get_size() / w.columns, target, buffer,
                     static_cast<size_t>(parallel_get_max_threads()), linear::best_isa());
    return true;
}

}  // namespace plancast
