// plancast::Block as an OpenVINO operation.
#pragma once

#include <memory>
#include <openvino/op/op.hpp>
#include <string>

#include "block/program.hpp"

namespace plancast {

// Inputs: rows f32 [rows, ...] as the program says, then, where a step attends, block
// tables i32 and caches u8 [num_blocks, heads, page bytes], written in place; then constants. Outputs: f32 [rows, width]. See op.py.
class Block : public ov::op::Op {
public:
    OPENVINO_OP("Block", "plancast");
    Block() = default;
    explicit Block(const ov::OutputVector& inputs) : Op(inputs) {}
    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor& visitor) override;
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;
    bool has_evaluate() const override { return true; }

private:
    void check_inputs() const;

    std::string text_;
    std::shared_ptr<const block::Program> program_;  // shared by clones: OpenVINO makes one for each inference
};

}  // namespace plancast
