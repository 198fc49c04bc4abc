"""What the passes change and what they leave: operators, rows, dtypes, quantized values, and weights unread."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_steps import OnnxSteps, largest_difference, self_contained
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

from builder.passes import PassStats, make_passes, run_passes
from builder.passes.conditions import flat_attention, rows_before_head, tokens_first, well_formed
from builder.passes.graph import dims
from builder.passes.tidy import Tidy
from builder.recipe import KvConfig, Recipe, WeightsConfig
from builder.trace import trace
from builder.tracing.signature import attention_nodes
from runtime.errors import BuildError

TOLERANCE = 2e-5


def recipe(**sections: Any) -> Recipe:
    return Recipe(name="tiny", model="tiny", **sections)


class Traced:
    """A family's model and the file of its traced graph, from which each test reads a fresh one."""

    def __init__(self, family: str, folder: Path):
        self.model = write_tiny_checkpoint(family, folder)
        graph = trace(open_tiny_checkpoint(folder), max_context_len=32)
        self.path = folder / "traced.onnx"
        ir.save(graph, self.path)

    def graph(self) -> ir.Model:
        return ir.load(self.path)

    def lowered(self, **sections: Any) -> ir.Model:
        return run_passes(self.graph(), recipe(**sections))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced("llama-tied-bias", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced("gpt2", tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return Traced("mixtral", tmp_path_factory.mktemp("mixtral"))


def operators(graph: ir.Model) -> dict[str, int]:
    counts: dict[str, int] = {}
    for node in graph.graph:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def test_a_llama_layer_is_what_it_should_be(llama: Traced) -> None:
    counts = operators(llama.lowered())
    layers = 2
    assert counts["PagedAttention"] == layers
    assert counts["RotaryEmbedding"] == 2 * layers
    assert counts["RMSNormalization"] == 2 * layers + 1
    assert counts["MatMul"] == 4 * layers + 1  # qkv, o, gate_up, down; head
    assert counts["Split"] == 2 * layers
    assert counts["Cos"] == counts["Sin"] == 1
    assert not {"Pow", "ReduceMean", "Sqrt", "Slice", "Neg", "Concat", "Gemm", "GatherND"} & counts.keys()


def test_each_pass_is_named_and_counted(llama: Traced) -> None:
    names: list[str] = []
    stats: list[PassStats] = []
    graph = run_passes(llama.graph(), recipe(), on_pass=names.append, stats=stats)
    assert names == [entry.name for entry in stats] == [graph_pass.name for graph_pass in make_passes()]
    assert sum(stats[-1].after.values()) == len(graph.graph)
    for earlier, later in itertools.pairwise(stats):
        assert earlier.after == later.before


def test_each_pass_keeps_the_logits(llama: Traced) -> None:
    graph = llama.graph()
    for graph_pass in make_passes():
        graph_pass.run(graph, recipe())
        assert largest_difference(graph, llama.model, VOCAB_SIZE) < TOLERANCE, graph_pass.name


def test_a_second_round_finds_nothing_to_do(llama: Traced) -> None:
    graph = llama.lowered()
    Tidy().run(graph, recipe())
    before = operators(graph)
    assert Tidy().run(graph, recipe()) == 0
    assert operators(graph) == before


def test_no_matrix_is_read_before_the_graph_is_saved(llama: Traced, monkeypatch) -> None:
    """Peak memory is what the backend's writer holds: one weight at a time."""
    read: list[str] = []
    plain = ir.ExternalTensor.numpy

    def numpy(self: ir.ExternalTensor) -> np.ndarray:
        if len(self.shape) == 2:
            read.append(self.name or "")
        return plain(self)

    monkeypatch.setattr("builder.passes.graph._SMALL", 16)
    monkeypatch.setattr(ir.ExternalTensor, "numpy", numpy)
    graph = llama.lowered(weights=WeightsConfig(dtype="int8"))
    # Tiny matrices fall under the size that onnx_ir compares for duplicates; beyond that nothing reads them.
    big = [name for name in read if int(np.prod(dims(llama.graph().graph.initializers[name]) or ())) > 1024]
    assert big == []
    self_contained(graph)
    assert "model.embed_tokens.weight" in read


def test_only_the_wanted_rows_reach_the_head(llama: Traced) -> None:
    graph = llama.lowered()
    assert rows_before_head(graph) is None
    tokens = {"a": list(range(3, 12)), "b": [5, 4, 3]}
    everything = OnnxSteps(graph).step(tokens)
    some = OnnxSteps(graph).step(tokens, rows=[11, 8, 8])
    np.testing.assert_allclose(some, everything[[11, 8, 8]], rtol=1e-5, atol=1e-5)
    last = attention_nodes(graph)[-1]
    (after,) = {use.node.op_type for use in last.outputs[0].uses()}
    assert after == "Gather"  # the last layer's MLP runs on the rows alone


def test_products_merge_with_biases_that_only_some_have(tmp_path: Path) -> None:
    """starcoder2 without bias on the output, qwen2 with bias on q, k, v: zeros fill what is missing."""
    model = write_tiny_checkpoint("qwen2", tmp_path)
    graph = run_passes(trace(open_tiny_checkpoint(tmp_path), max_context_len=32), recipe())
    assert "model.layers.0.self_attn.qkv_proj.bias" in graph.graph.initializers
    assert largest_difference(graph, model, VOCAB_SIZE) < TOLERANCE


def rounded(traced: Traced, change) -> torch.nn.Module:
    """The family's model with `change` made to each matrix, as the passes should make it."""
    import copy

    model = copy.deepcopy(traced.model)
    with torch.no_grad():
        for parameter in {id(p): p for p in model.parameters()}.values():
            if parameter.dim() >= 2:
                parameter.copy_(change(parameter))
    return model


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_half_precision_weights(name: Any, dtype: torch.dtype, llama: Traced) -> None:
    graph = llama.lowered(weights=WeightsConfig(dtype=name))
    stored = [value.dtype for value in graph.graph.initializers.values() if len(dims(value) or ()) == 2]
    assert set(stored) == {ir.DataType["BFLOAT16" if name == "bf16" else "FLOAT16"]}
    expected = rounded(llama, lambda weight: weight.to(dtype).float())
    assert largest_difference(graph, expected, VOCAB_SIZE) < TOLERANCE


def as_int8(weight: torch.Tensor) -> torch.Tensor:
    """Quantized by row and back, [out, in]."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return torch.round(weight / scale) * scale


def test_int8_weights_equal_the_model_with_rounded_weights(llama: Traced) -> None:
    graph = llama.lowered(weights=WeightsConfig(dtype="int8"))
    matrices_left = [
        v.name for v in graph.graph.initializers.values() if len(dims(v) or ()) == 2 and v.dtype != ir.DataType.INT8
    ]
    assert matrices_left == []
    assert operators(graph)["DequantizeLinear"] == 4 * 2 + 1  # the embedding shares the head's
    assert largest_difference(graph, rounded(llama, as_int8), VOCAB_SIZE) < TOLERANCE
    assert 1e-4 < largest_difference(graph, llama.model, VOCAB_SIZE) < 0.2


def test_int8_of_weights_stored_the_other_way_round(gpt2: Traced) -> None:
    graph = gpt2.lowered(weights=WeightsConfig(dtype="int8"))
    names = {name for name, _ in gpt2.model.named_parameters() if ".c_" in name}
    expected = rounded(gpt2, as_int8)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if name in names and parameter.dim() == 2:  # Conv1D: [in, out]
                parameter.copy_(as_int8(dict(gpt2.model.named_parameters())[name].T).T)
    assert largest_difference(graph, expected, VOCAB_SIZE) < TOLERANCE


def test_experts_are_quantized_too(mixtral: Traced) -> None:
    graph = mixtral.lowered(weights=WeightsConfig(dtype="int8"))
    left = [
        v.name for v in graph.graph.initializers.values() if len(dims(v) or ()) >= 2 and v.dtype != ir.DataType.INT8
    ]
    assert left == []


def test_skip_keeps_weights_in_f32_by_their_own_names_even_when_merged(llama: Traced) -> None:
    graph = llama.lowered(weights=WeightsConfig(dtype="int8", skip=("*.layers.0.self_attn.k_proj.weight", "*embed*")))
    kept = {
        v.name for v in graph.graph.initializers.values() if len(dims(v) or ()) == 2 and v.dtype == ir.DataType.FLOAT
    }
    assert kept == {"model.layers.0.self_attn.qkv_proj.weight", "model.embed_tokens.weight"}


def test_the_recipes_cache_is_stated_on_each_node(llama: Traced) -> None:
    graph = llama.lowered(kv=KvConfig(key="bf16", value="int8", block_size=16))
    for node in attention_nodes(graph):
        assert node.attributes["kv_dtype"].as_string() == "bf16:int8"
        assert node.attributes["block_size"].as_int() == 16
    caches = [dims(value) for value in graph.graph.inputs if "_cache." in (value.name or "")]
    assert caches == [("num_blocks", 2, 16, 8)] * 4
    same = llama.lowered(kv=KvConfig(key="f16", value="f16"))
    assert {node.attributes["kv_dtype"].as_string() for node in attention_nodes(same)} == {"f16"}


def test_another_block_size_gives_the_same_logits(llama: Traced) -> None:
    graph = llama.lowered(kv=KvConfig(block_size=4))
    assert largest_difference(graph, llama.model, VOCAB_SIZE) < TOLERANCE


def test_conditions_say_what_is_wrong(llama: Traced) -> None:
    graph = llama.lowered()
    assert [condition(graph) for condition in (well_formed, flat_attention, tokens_first)] == [None] * 3
    graph.opset_imports[""] = 22
    assert "22" in (well_formed(graph) or "")
    graph.opset_imports[""] = 23
    node = attention_nodes(graph)[1]
    node.replace_input_with(2, node.inputs[0])
    assert "layer 1: value" in (flat_attention(graph) or "")
    node.outputs[0].shape = ir.Shape([1, "T", 32])
    assert "[1, 'T', 32]" in (tokens_first(graph) or "")


def test_a_graph_that_breaks_a_condition_is_refused_by_the_pass_that_needs_it(llama: Traced) -> None:
    graph = llama.graph()
    del graph.graph.inputs[[value.name for value in graph.graph.inputs].index("logits_rows")]
    with pytest.raises(BuildError, match="tidy requires well_formed"):
        run_passes(graph, recipe())
