// plancast::PagedAttention as an OpenVINO operation on our own kernels.
#pragma once

#include <openvino/op/op.hpp>

namespace plancast {

// Inputs, in op.py's order: query, key, value f32; key_cache, value_cache u8 [num_blocks, heads, page bytes], written in
// place; past_lens, query_starts, block_ids, block_starts, max_context_len i32; sinks, alibi_slopes f32 (empty: none);
// then the attributes, as constants so that every form of a model keeps them exactly and Python can read them too:
// settings i32 and scalars f32, in the order of native.py.
class PagedAttention : public ov::op::Op {
public:
    OPENVINO_OP("PagedAttention", "extension");  // the opset of operations that Python may read too
    PagedAttention() = default;
    explicit PagedAttention(const ov::OutputVector& inputs) : Op(inputs) { constructor_validate_and_infer_types(); }
    void validate_and_infer_types() override;
    std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override;
    bool visit_attributes(ov::AttributeVisitor&) override { return true; }
    bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override;
    bool has_evaluate() const override { return true; }
};

}  // namespace plancast
