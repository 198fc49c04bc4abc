"""Layers with their attention in one `plancast::Block`: the same bits as with attention nodes of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from native_library import require_native
from numpy.typing import NDArray
from openvino_engine import Sequences, lowered, recipe
from tiny_families import open_tiny_checkpoint, write_tiny_checkpoint
from tiny_onnx import TinyOnnx

from builder.backends.openvino import ENGINE, compile_engine, engine_properties
from builder.backends.openvino_probe import probe
from builder.passes import run_passes
from builder.trace import trace
from plugins.block import openvino as block
from plugins.block import patterns
from plugins.native import find_native
from plugins.paged_attention.op import OP_TYPE as ATTENTION
from runtime.executors.kv_cache import KvCache
from runtime.executors.openvino_model import OpenVINOEngine

require_native()

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2", "cohere2", "llama-tied-bias", "qwen2_moe", "gpt_oss")
# All layers are one operation, and the last one's rows that say something, with the head, another.
STACKS = ("llama", "llama-tied-bias", "qwen2", "qwen3", "gemma2", "gemma3")
FORMATS = ("f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "int8:int4")


def built(family: str, folder: Path) -> dict:
    """The engine of a tiny checkpoint, written into `folder`; returns its properties."""
    write_tiny_checkpoint(family, folder / "model", max_position_embeddings=128)
    asked = recipe(kv="int8", weights="int8", attention="native", blob=False)
    graph = run_passes(trace(open_tiny_checkpoint(folder / "model"), max_context_len=128), asked)
    compile_engine(graph, asked, folder)
    return engine_properties(asked, own_attention=True)


def compiled(folder: Path, own: dict, monkeypatch: pytest.MonkeyPatch, *, together: bool, threads: int = 2):
    """The engine in `folder`, with attention in its blocks or, as before, in nodes of its own."""
    with monkeypatch.context() as patch:
        patch.setattr(block, "_SMALLEST", 1)  # OpenVINO's own operators round in other places
        if not together:
            patch.delitem(patterns._MATCHERS, ATTENTION)
        properties = {**own, "INFERENCE_NUM_THREADS": str(threads)}
        return OpenVINOEngine(find_native(), properties, own_linear=True).compile_ir(folder / ENGINE)


def ours(model: ov.CompiledModel) -> int:
    """Operations of ours, which the CPU plugin runs by reference."""
    kinds = [str(node.get_rt_info()["layerType"].astype(str)) for node in model.get_runtime_model().get_ops()]
    return kinds.count("Reference")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_bits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = built(family, tmp_path)
    apart = compiled(tmp_path, properties, monkeypatch, together=False)
    together = compiled(tmp_path, properties, monkeypatch, together=True)
    assert ours(together) < ours(apart)
    np.testing.assert_array_equal(probe(together), probe(apart))
    if family in STACKS:
        assert ours(together) == 2
        caches = [port.any_name for port in together.inputs if "_cache." in port.any_name]
        assert caches == [block.POOL], "each input costs time at each step"


@pytest.mark.parametrize("family", ["qwen2", "llama-tied-bias"])
def test_a_product_with_its_bias_gives_the_bits_of_product_and_sum(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = built(family, tmp_path)
    together = compiled(tmp_path, properties, monkeypatch, together=True)
    with monkeypatch.context() as patch:
        patch.setattr(patterns, "_biased", lambda _node: None)
        apart = compiled(tmp_path, properties, monkeypatch, together=True)
    assert ours(together) < ours(apart)
    np.testing.assert_array_equal(probe(together), probe(apart))


def run(model: ov.CompiledModel, tiny: TinyOnnx, steps: list[dict[int, int]]) -> list[NDArray[np.float32]]:
    """Every row's logits of each step."""
    sequences = Sequences(2, 400, vocab_size=tiny.vocab_size)
    request = model.create_infer_request()
    caches = [port for port in model.inputs if "_cache." in port.any_name]
    shapes = [[dim.get_length() for dim in list(port.partial_shape)[1:]] for port in caches]
    cache = KvCache(sequences.num_blocks, [int(np.prod(shape)) for shape in shapes])
    for port, shape, array in zip(caches, shapes, cache.arrays, strict=True):
        request.set_tensor(port, ov.Tensor(array, ov.Shape([sequences.num_blocks, *shape]), ov.Type.u8))
    results = []
    for advance in steps:
        batch = sequences.batch(advance, every_row=True)
        fields = {"input_ids": batch.token_ids, "position_ids": batch.positions}
        fields |= {name: getattr(batch, name) for name in ("past_lens", "query_starts", "block_ids", "block_starts")}
        fields |= {"max_context_len": np.array(batch.max_context_len, np.int32), "logits_rows": batch.logits_rows}
        for name, array in fields.items():
            request.set_tensor(name, ov.Tensor(np.ascontiguousarray(array).reshape(array.shape)))
        request.infer()
        results.append(request.get_output_tensor(0).data.copy())
    return results


@pytest.mark.parametrize("kv", FORMATS)
def test_every_kv_format_in_chunks_and_whole(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the rows that go through a layer's steps together, at once and cut up."""
    tiny = TinyOnnx(layers=3, context=400, weights="int8", rope="halves", attributes={"sliding_window": 150})
    asked = recipe(kv=kv, weights="int8", attention="native", blob=False)
    compile_engine(lowered(tiny, asked), asked, tmp_path)
    properties = engine_properties(asked, own_attention=True)
    together = compiled(tmp_path, properties, monkeypatch, together=True)
    assert ours(together) == 2, "the layers, and the head"
    whole = run(together, tiny, [{0: 300, 1: 40}, {0: 1, 1: 3}])
    expected = run(compiled(tmp_path, properties, monkeypatch, together=False), tiny, [{0: 300, 1: 40}, {0: 1, 1: 3}])
    for got, wanted in zip(whole, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    alone = compiled(tmp_path, properties, monkeypatch, together=True, threads=1)
    first, second, third, last = run(alone, tiny, [{0: 17}, {1: 40}, {0: 283}, {0: 1, 1: 3}])
    np.testing.assert_array_equal(np.concatenate([first, third, second]), whole[0])
    np.testing.assert_array_equal(last, whole[1])
