// The entry point that OpenVINO looks up in the library: every operator that it brings.
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>

#include "block/block.hpp"
#include "linear/linear.hpp"
#include "paged_attention/attention.hpp"
#include "paged_attention/paged_attention.hpp"

OPENVINO_CREATE_EXTENSIONS(std::vector<ov::Extension::Ptr>({
    std::make_shared<plancast::RestoreHeadSizes>(),
    std::make_shared<ov::OpExtension<plancast::Linear>>(),
    std::make_shared<ov::OpExtension<plancast::Block>>(),
    std::make_shared<ov::OpExtension<plancast::PagedAttention>>(),
}))
