#include "paged_attention/attention.hpp"

#include <openvino/core/except.hpp>
#include <openvino/core/parallel.hpp>

#include "paged_attention/kernel.hpp"

namespace plancast {

namespace {

enum Input {
    kQuery, kKey, kValue, kKeyCache, kValueCache, kPastLens, kQueryStarts, kBlockIds, kBlockStarts, kMaxContextLen,
    kSinks, kAlibi, kSettings, kScalars, kInputs
};

// All but the output.
attention::Problem make_problem(const ov::TensorVector& inputs) {
    const auto table = [&](Input input) { return inputs[input].data<const int32_t>(); };
    const auto optional = [&](Input input) {
        return inputs[input].get_size() ? inputs[input].data<const float>() : nullptr;
    };
    attention::Problem p{};
    OPENVINO_ASSERT(attention::read_settings(inputs[kSettings].data<const int32_t>(), inputs[kScalars].data<const float>(), p),
                    "PagedAttention: settings that the kernels do not know");
    p.query = inputs[kQuery].data<const float>();
    p.key = inputs[kKey].data<const float>();
    p.value = inputs[kValue].data<const float>();
    p.key_cache = const_cast<uint8_t*>(inputs[kKeyCache].data<const uint8_t>());
    p.value_cache = const_cast<uint8_t*>(inputs[kValueCache].data<const uint8_t>());
    p.past_lens = table(kPastLens);
    p.query_starts = table(kQueryStarts);
    p.block_ids = table(kBlockIds);
    p.block_starts = table(kBlockStarts);
    p.sinks = optional(kSinks);
    p.alibi = optional(kAlibi);
    p.sequences = inputs[kPastLens].get_size();
    return p;
}

}  // namespace

void PagedAttention::validate_and_infer_types() {
    NODE_VALIDATION_CHECK(this, get_input_size() == kInputs, "takes ", static_cast<int>(kInputs), " inputs, not ",
                          get_input_size());
    for (const Input input : {kQuery, kKey, kValue, kSinks, kAlibi, kScalars})
        NODE_VALIDATION_CHECK(this, get_input_element_type(input) == ov::element::f32, "input ", static_cast<int>(input),
                              " must be f32, not ", get_input_element_type(input));
    for (const Input input : {kKeyCache, kValueCache})
        NODE_VALIDATION_CHECK(this, get_input_element_type(input) == ov::element::u8, "caches must be u8");
    NODE_VALIDATION_CHECK(this, get_input_partial_shape(kSettings).compatible({attention::kSettings}), "settings: wrong size");
    NODE_VALIDATION_CHECK(this, get_input_partial_shape(kScalars).compatible({attention::kScalars}), "scalars: wrong size");
    const auto &query = get_input_partial_shape(kQuery), &key = get_input_partial_shape(kKey),
               &value = get_input_partial_shape(kValue);
    NODE_VALIDATION_CHECK(this, query.size() == 2 && key.size() == 2 && value.size() == 2 && query[1].is_static() &&
                                    key[1].is_static() && value[1].is_static(),
                          "query, key and value must be [tokens, heads * size]");
    const int64_t width = query[1].get_length() * value[1].get_length() / key[1].get_length();
    set_output_type(0, ov::element::f32, ov::PartialShape{query[0], width});
}

std::shared_ptr<ov::Node> PagedAttention::clone_with_new_inputs(const ov::OutputVector& inputs) const {
    return std::make_shared<PagedAttention>(inputs);
}

bool PagedAttention::evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const {
    attention::Problem problem = make_problem(inputs);
    outputs[0].set_shape({inputs[kQuery].get_shape()[0], problem.out_stride});
    problem.out = outputs[0].data<float>();
    OPENVINO_ASSERT(inputs[kKeyCache].get_shape().back() == problem.key_format.page_bytes(problem.head_size) &&
                        inputs[kValueCache].get_shape().back() == problem.value_format.page_bytes(problem.v_head_size),
                    "PagedAttention: pages of ", inputs[kKeyCache].get_shape().back(), " and ",
                    inputs[kValueCache].get_shape().back(), " bytes are not what the formats say");

    thread_local attention::Workspace workspace;
    attention::run(problem, *attention::kernels(attention::best_isa()), parallel_get_max_threads(), workspace);
    return true;
}

}  // namespace plancast
