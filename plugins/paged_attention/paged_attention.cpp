#include "paged_attention/paged_attention.hpp"

#include <openvino/op/op.hpp>

// libopenvino exports this class, and the wheel ships no header for it: what follows declares its interface and its
// members as OpenVINO 2026.4 has them. The build refuses any other version.
namespace ov::op {
class OPENVINO_API PagedAttentionExtension : public Op {
public:
    OPENVINO_OP("PagedAttentionExtension");
    explicit PagedAttentionExtension(const OutputVector& inputs, bool write_kv_cache = true);
    void validate_and_infer_types() override;
    std::shared_ptr<Node> clone_with_new_inputs(const OutputVector& inputs) const override;
    bool visit_attributes(AttributeVisitor& visitor) override;

protected:
    std::vector<element::Type> m_output_type = {element::dynamic, element::dynamic, element::dynamic};
    bool m_write_kv_cache = true;
};
}  // namespace ov::op

namespace plancast {

const ov::DiscreteTypeInfo& RestoreHeadSizes::get_type_info() const {
    return ov::op::PagedAttentionExtension::get_type_info_static();
}

ov::OutputVector RestoreHeadSizes::create(const ov::OutputVector& inputs, ov::AttributeVisitor& visitor) const {
    auto node = std::make_shared<ov::op::PagedAttentionExtension>(inputs);
    node->visit_attributes(visitor);
    auto& info = node->get_rt_info();
    const auto restore = [&](const std::string& kind, size_t row, size_t cache) {
        // The cache is [num_blocks, heads, block_size, cell], a row [tokens, heads * head size].
        const auto heads = inputs[cache].get_partial_shape()[1].get_length();
        info["num_" + kind + "_heads"] = heads;
        info[kind + "_head_size"] = inputs[row].get_partial_shape()[1].get_length() / heads;
    };
    restore("k", 1, 3);
    restore("v", 2, 4);
    return node->outputs();
}

}  // namespace plancast
