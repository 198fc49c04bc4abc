"""Each family, random and tiny, against transformers' eager logits: the graph as traced, and as fused.

Three steps over a paged cache: two prompts of different lengths together, then a chunk beside a decode, then a decode
alone (case 26: dynamic lengths; case 11: a batch gives each sequence what it gets alone).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx_steps import largest_difference
from tiny_families import FAMILIES, VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

from builder.passes import run_passes
from builder.recipe import Recipe
from builder.trace import trace
from builder.tracing.signature import attention_nodes

TOLERANCE = 2e-5  # of the largest logit; f32 sums in another order
NO_ROPE = {"gpt2", "gpt_bigcode", "opt", "biogpt"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_traced_and_fused_logits_equal_eager_ones(family: str, tmp_path: Path) -> None:
    model = write_tiny_checkpoint(family, tmp_path)
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=32)
    assert largest_difference(graph, model, VOCAB_SIZE) < TOLERANCE
    layers = len(attention_nodes(graph))
    assert layers == model.config.num_hidden_layers

    run_passes(graph, Recipe(name="tiny", model=str(tmp_path)))
    assert largest_difference(graph, model, VOCAB_SIZE) < TOLERANCE
    operators = [node.op_type for node in graph.graph]
    rotated = 0 if family in NO_ROPE else 2 * _layers_with_rope(model.config)
    assert operators.count("RotaryEmbedding") == rotated
    assert "ReduceMean" not in operators, "a norm was not fused"
    for node in graph.graph:  # weights alone are turned, never activations
        if node.op_type == "Transpose":
            assert node.inputs[0] is not None
            assert node.inputs[0].is_initializer()


def _layers_with_rope(config) -> int:
    if hasattr(config, "no_rope_layers"):
        return sum(config.no_rope_layers)
    if config.model_type in ("cohere2", "exaone4"):  # rope goes with the window
        return config.layer_types.count("sliding_attention")
    return config.num_hidden_layers
