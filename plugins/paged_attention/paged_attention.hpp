// PagedAttention on OpenVINO, the C++ side.
#pragma once

#include <openvino/core/op_extension.hpp>

namespace plancast {

// Creates OpenVINO's own paged-attention node when IR or a compiled blob is read, and puts back its run-time info: heads
// and head sizes, which no serialized form keeps and without which the CPU plugin refuses the node. It does in C++, and
// so for blobs too, what `restore_nodes` in openvino.py does for IR.
class RestoreHeadSizes : public ov::BaseOpExtension {
public:
    const ov::DiscreteTypeInfo& get_type_info() const override;
    ov::OutputVector create(const ov::OutputVector& inputs, ov::AttributeVisitor& visitor) const override;
    std::vector<ov::Extension::Ptr> get_attached_extensions() const override { return {}; }
};

}  // namespace plancast
