"""A checkpoint becomes an ONNX graph with `plancast::PagedAttention` nodes, without a weight being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

    from builder.drafts.head import EagleHead
    from builder.recipe import Task
    from zoo.checkpoint import Checkpoint


def trace(
    checkpoint: Checkpoint,
    *,
    max_context_len: int,
    trust_remote_code: bool = False,
    task: Task = "generate",
) -> ir.Model:
    """Trace a causal language model over flat tokens, in f32, at opset 23.

    Inputs: input_ids, position_ids `i64[T]`; past_lens `i32[B]`; query_starts, block_starts `i32[B + 1]`; block_ids
    `i32[N]`; max_context_len `i32[]`; logits_rows `i64[R]`; for each layer key_cache.{i}
    `f32[num_blocks, Hkv, block_size, D]` and value_cache.{i} `f32[num_blocks, Hkv, block_size, Dv]`. Output: logits
    `f32[R, V]`; with the task "embed": hidden `f32[R, H]`, the last hidden states. The initializers bear the names of
    the model's weights and stay in the checkpoint's files until read.

    Args:
        checkpoint: a Hugging Face style folder.
        max_context_len: tokens; longrope takes the table that this length asks for.
        trust_remote_code: let the checkpoint bring its own modelling code.
        task: "embed" leaves the head out, and so takes checkpoints that have none.

    Raises:
        BuildError: the model is of a kind that cannot be traced right, or its weights do not fit its config.
    """
    from builder.signals import load_torch

    load_torch()
    from builder.tracing.capture import capture, instantiate
    from builder.tracing.checks import check_attention_layers, check_token_axis
    from builder.tracing.cleanup import cleanup
    from builder.tracing.config import check_config, load_config, num_attention_layers
    from builder.tracing.rope import pin_longrope
    from builder.tracing.signature import OUTPUTS, name_dimensions, wire_caches
    from builder.tracing.weights import attach_weights

    config = load_config(checkpoint, trust_remote_code=trust_remote_code)
    check_config(config, max_context_len=max_context_len, task=task)
    model = instantiate(config, trust_remote_code=trust_remote_code, task=task)
    pin_longrope(model, max_context_len)
    traced = capture(model, task)
    check_attention_layers(traced, num_attention_layers(config), type(model).__name__)
    cleanup(traced)
    name_dimensions(traced, OUTPUTS[task])
    check_token_axis(traced)
    wire_caches(traced)
    attach_weights(traced, model, checkpoint)
    return traced


def trace_head(head: EagleHead) -> ir.Model:
    """Trace a head, in f32, at opset 23; its weights and those that it took from its target become initializers.

    Inputs and caches as of `trace`, for the head's layers, and hidden_states `f32[T, H]`. Outputs: logits `f32[R, D]`,
    hidden `f32[R, H]`.

    Raises:
        BuildError: it cannot be traced.
    """
    from builder.signals import load_torch

    load_torch()
    import onnx_ir as ir

    from builder.tracing.capture import capture_head
    from builder.tracing.checks import check_attention_layers, check_token_axis
    from builder.tracing.cleanup import cleanup
    from builder.tracing.signature import HIDDEN, name_dimensions, wire_caches

    weights = {name: value.detach().numpy() for name, value in head.state_dict().items()}
    weights["inv_freq"] = head.inv_freq.numpy()
    traced = capture_head(head)
    check_attention_layers(traced, head.config.num_layers, type(head).__name__)
    cleanup(traced)
    name_dimensions(traced)
    traced.graph.outputs[1].name = HIDDEN
    check_token_axis(traced)
    wire_caches(traced)
    for value in [value for value in traced.graph.inputs if value.name in weights]:
        assert value.name is not None
        value.const_value = ir.Tensor(weights[value.name], name=value.name)
        traced.graph.inputs.remove(value)
        traced.graph.initializers[value.name] = value
    return traced
