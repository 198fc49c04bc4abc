// plancast::Linear as an OpenVINO operation.
#pragma once

#include <openvino/op/op.hpp>

namespace plancast {

// Inputs: x f32 [..., K]; packed weight i8 [strips, pairs, 32, 2]; scale f32 [N]; optional bias f32 [N].
// Output: f32 [..., N]. See op.py for the layout and the arithmetic.
class Linear : public ov::op::Op {
public:
    OPENVINO_OP("Linear", "plancast");
    Linear() = default;
    explicit Linear(const ov::OutputVector& inputs) : Op(inputs) { constructor_validate_and_infer_types(); }
    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor&) override { return true; }
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;
    bool has_evaluate() const override { return true; }
};

}  // namespace plancast
