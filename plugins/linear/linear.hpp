// plancast::Linear as an OpenVINO operation.
#pragma once

#include <openvino/op/op.hpp>
#include <string>

#include "linear/weight.hpp"

namespace plancast {

// Inputs: x f32 [..., K]; packed weight u8 [strips, bytes of a strip]; optional bias f32 [N].
// Output: f32 [..., N]. See op.py for the layout and the arithmetic.
class Linear : public ov::op::Op {
public:
    OPENVINO_OP("Linear", "plancast");
    Linear() = default;
    explicit Linear(const ov::OutputVector& inputs) : Op(inputs) {}
    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor& visitor) override;
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;
    bool has_evaluate() const override { return true; }

private:
    linear::Weight weight() const;  // without its data

    std::string kind_, activations_, low_;
    int64_t channels_ = 0, columns_ = 0, group_ = 0;
    bool f16_scale_ = false;
};

}  // namespace plancast
