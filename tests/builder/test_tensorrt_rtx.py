"""The graph cut at its attention nodes, and TensorRT-RTX engines of the pieces, built without a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_families import open_tiny_checkpoint, write_tiny_checkpoint

from builder.backends.half import to_half
from builder.backends.segment_plan import cut
from builder.backends.tensorrt_rtx import build_engines, inspect_segment
from builder.passes import run_passes
from builder.passes.split_at_plugins import split_at_plugins
from builder.recipe import LimitsConfig, Recipe, WeightsConfig
from builder.trace import trace
from builder.tracing.signature import attention_nodes
from runtime.errors import BuildError


def recipe(**sections) -> Recipe:
    limits = LimitsConfig(max_context_len=32, max_num_seqs=4, max_num_batched_tokens=16)
    return Recipe(name="tiny", model="tiny", limits=limits, **sections)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_checkpoint("llama-tied-bias", folder)
    ir.save(trace(open_tiny_checkpoint(folder), max_context_len=32), folder / "traced.onnx")
    return folder / "traced.onnx"


def test_segments_and_attentions_make_a_chain(traced: Path) -> None:
    """Each segment's inputs exist when it runs; every node is in one segment; the last one makes the logits."""
    model = run_passes(ir.load(traced), recipe())
    segments = split_at_plugins(model)
    attentions = attention_nodes(model)
    assert [segment.attention for segment in segments] == [*attentions, None]
    names = [node.outputs[0].name for segment in segments for node in segment.model.graph]
    assert {*names, *(node.outputs[0].name for node in attentions)} == {n.outputs[0].name for n in model.graph}
    computed = [
        node.outputs[0].name
        for segment in segments
        for node in segment.model.graph
        if any(value is not None and not value.is_initializer() for value in node.inputs)
    ]
    assert len(computed) == len(set(computed))
    known = {value.name for value in model.graph.inputs}
    for segment in segments:
        assert set(segment.inputs) <= known
        known |= set(segment.outputs)
        if segment.attention is not None:
            assert {value.name for value in segment.attention.inputs[:3] if value is not None} <= known
            known.add(segment.attention.outputs[0].name)
    assert segments[-1].outputs == ["logits"]


def test_weights_stay_in_their_segments(traced: Path) -> None:
    """Dequantized or transposed, a weight is computed where it is used: nothing that is fixed crosses over."""
    model = run_passes(ir.load(traced), recipe(weights=WeightsConfig(dtype="int8")))
    for segment in split_at_plugins(model):
        for value in segment.model.graph.inputs:
            shape = [str(dim) for dim in value.shape or ()]
            assert not shape or "_cache." in (value.name or "") or not all(dim.isdigit() for dim in shape), value


def test_the_chain_computes_what_the_graph_computes(traced: Path, tmp_path: Path) -> None:
    """Segments one after the other on torch, with the reference between them, give the logits of the whole graph."""
    from onnx_steps import Steps, largest_difference
    from tiny_families import VOCAB_SIZE

    from plugins.paged_attention.op import INPUTS
    from plugins.paged_attention.reference import reference
    from plugins.torch_engine.attention import Layer
    from plugins.torch_engine.engine import TorchEngine

    model = run_passes(ir.load(traced), recipe())
    segments = split_at_plugins(model)
    for i, segment in enumerate(segments):
        ir.save(segment.model, tmp_path / f"{i}.onnx", external_data=f"{i}.data")
    engines = [TorchEngine(tmp_path / f"{i}.onnx") for i in range(len(segments))]
    caches = {
        value.name: np.zeros([24 if not isinstance(d, int) else d for d in value.shape or ()], np.float32)
        for value in model.graph.inputs
        if "_cache." in (value.name or "")
    }

    class Chain(Steps):
        def run(self, batch):
            values = {
                "input_ids": batch.token_ids, "position_ids": batch.positions, "past_lens": batch.past_lens,
                "query_starts": batch.query_starts, "block_ids": batch.block_ids, "block_starts": batch.block_starts,
                "max_context_len": batch.max_context_len, "logits_rows": batch.logits_rows, **caches,
            }  # fmt: skip
            for engine, segment in zip(engines, segments, strict=True):
                values |= engine.run_all(values)
                node = segment.attention
                if node is not None:
                    attributes = Layer.of({n: a.value for n, a in node.attributes.items()}).attributes
                    inputs = [None if v is None else values[v.name] for v in node.inputs]
                    inputs += [None] * (len(INPUTS) - len(inputs))
                    values[node.outputs[0].name] = reference(*inputs, **attributes)
            return values["logits"]

    hf = write_tiny_checkpoint("llama-tied-bias", tmp_path / "model")
    assert largest_difference(Chain(24, 32), hf, VOCAB_SIZE) < 2e-5


def test_rotary_tables_stay_exact_in_half_precision(traced: Path) -> None:
    (first, *_rest) = split_at_plugins(run_passes(ir.load(traced), recipe()))
    to_half(first.model)
    kinds = {node.op_type: node.outputs[0].dtype for node in first.model.graph}
    assert kinds["Cos"] == ir.DataType.FLOAT
    assert kinds["MatMul"] == ir.DataType.FLOAT16
    assert all(value.dtype != ir.DataType.FLOAT for value in first.model.graph.outputs)


@pytest.mark.parametrize("weights", ["f16", "int8", "int4", "fp8"])
def test_engines_for_two_architectures_without_a_gpu(traced: Path, tmp_path: Path, weights: str) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX (pip install 'plancast[rtx]')")
    quantized = WeightsConfig(dtype=weights, symmetric=True, group_size="channel") if weights == "int4" else None
    model = run_passes(ir.load(traced), recipe(weights=quantized or WeightsConfig(dtype=weights)))
    count = len(attention_nodes(model))
    segments, _ = cut(model)
    built = build_engines(segments, recipe(), tmp_path, ("SM89", "SM120"))
    assert len(built) == count + 1
    assert built[-1].outputs == ("logits",)
    for segment in built:
        assert (tmp_path / segment.file).stat().st_size == segment.bytes > 1000
        assert segment.layers > 0


def test_refusals(traced: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="not for SM90"):
        build_engines([], recipe(), tmp_path, ("SM90",))
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX (pip install 'plancast[rtx]')")
    (tmp_path / "bad.engine").write_bytes(b"nothing")
    with pytest.raises(BuildError, match="does not load here"):
        inspect_segment(tmp_path / "bad.engine")
