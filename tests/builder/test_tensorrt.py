"""TensorRT as far as it goes without its libraries: plugin nodes, what they compute, profiles and the configuration."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import onnx_ir as ir
import pytest
from onnx_steps import Steps, largest_difference
from tiny_families import VOCAB_SIZE, write_traced_llama

pytest.importorskip("triton", reason="the plugins' kernels need triton (pip install 'plancast[triton]')")

import torch
from plugin_graph import PluginGraph

from builder.backends.half import to_half
from builder.backends.tensorrt import (
    EngineOptions,
    configure,
    define_network,
    load_library,
    plugin_graph,
    profiles,
    require_gpu,
)
from builder.passes import run_passes
from builder.passes.attention_plugins import replace_attention
from builder.recipe import KvConfig, LimitsConfig, Recipe, WeightsConfig
from builder.tracing.signature import attention_nodes
from plugins.paged_attention.tensorrt_launch import PLUGINS
from runtime.errors import BuildError

LIMITS = LimitsConfig(max_context_len=64, max_num_seqs=4, max_num_batched_tokens=32)


def recipe(kv: Any = "f16") -> Recipe:
    return Recipe(name="tiny", model="tiny", limits=LIMITS, kv=KvConfig(key=kv, value=kv, block_size=16))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return write_traced_llama(tmp_path_factory.mktemp("llama"))


def with_plugins(path: Path, kv: str, splits: int) -> ir.Model:
    graph = run_passes(ir.load(path), recipe(kv))
    to_half(graph)
    layers = len(attention_nodes(graph))
    assert replace_attention(graph, 80, splits=splits) == layers == 2
    assert not attention_nodes(graph)
    return graph


class PluginSteps(Steps):
    """The graph, with caches that lie in it."""

    def __init__(self, graph: ir.Model, num_blocks: int = 24):
        super().__init__(num_blocks, 16)
        self.graph = PluginGraph(graph)
        self.caches = {}
        for value in graph.graph.inputs:
            if "_cache." in (value.name or ""):
                dims = [num_blocks, *(int(str(dim)) for dim in list(value.shape or ())[1:])]
                kind = torch.int8 if value.dtype == ir.DataType.INT8 else torch.float16
                self.caches[value.name or ""] = torch.zeros(dims, dtype=kind)

    def run(self, batch):
        feeds = {
            "input_ids": batch.token_ids, "position_ids": batch.positions, "past_lens": batch.past_lens,
            "query_starts": batch.query_starts, "block_ids": batch.block_ids, "block_starts": batch.block_starts,
            "logits_rows": batch.logits_rows,
        }  # fmt: skip
        given = {name: torch.from_numpy(array.copy()) for name, array in feeds.items()}
        return self.graph.run({**self.caches, **given})["logits"].float().numpy()


@pytest.mark.parametrize(("kv", "splits", "bound"), [("f16", 1, 0.01), ("int8", 4, 0.03), ("fp8_e4m3", 1, 0.15)])
def test_the_chain_computes_what_attention_computes(model, kv: str, splits: int, bound: float) -> None:
    steps = PluginSteps(with_plugins(model[1], kv, splits))
    kinds = [node.op_type for node in steps.graph.nodes if node.op_type in PLUGINS]
    assert kinds == (["WriteKV", "Attend"] if splits == 1 else ["WriteKV", "AttendSplits", "MergeSplits"]) * 2
    assert 0 < largest_difference(steps, model[0], VOCAB_SIZE) < bound


def test_rotated_caches_are_refused(model) -> None:
    turned = Recipe(name="t", model="t", limits=LIMITS, kv=KvConfig(key="int4", value="int4", rotate="both"))
    with pytest.raises(BuildError, match=r"kv\.rotate both is not computed by TensorRT"):
        replace_attention(run_passes(ir.load(model[1]), turned), 90)


def test_profiles_cover_decode_and_prefill(model) -> None:
    decode, prefill = profiles(with_plugins(model[1], "f16", 1), recipe())
    assert decode["input_ids"] == ([1], [4], [4])
    assert prefill["input_ids"] == ([1], [32], [32])
    assert decode["query_starts"] == ([2], [5], [5])
    assert prefill["block_ids"] == ([1], [16], [16])
    assert prefill["logits_rows"] == ([1], [4], [32])
    cache = decode["key_cache.0"]
    assert cache[0][0] == 1
    assert cache[0][1:] == cache[2][1:]


def test_the_configuration_of_a_real_builder(model, tmp_path: Path) -> None:
    """TensorRT-RTX has the same builder: flags, both profiles and the timing cache are taken."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX (pip install 'plancast[rtx]')")
    from builder.backends.tensorrt_rtx import load_library as load_rtx
    from runtime.executors.segments.engines import Log

    trt = load_rtx()
    builder = trt.Builder(Log(trt).logger)
    graph = with_plugins(model[1], "f16", 1)
    options = EngineOptions(strip_weights=True, workspace=1 << 28)
    config = configure(trt, builder, graph, recipe(), options)
    assert config.num_optimization_profiles == 2
    assert config.get_flag(trt.BuilderFlag.STRIP_PLAN)
    assert config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
    assert config.get_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    assert not config.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    assert config.get_memory_pool_limit(trt.MemoryPoolType.WORKSPACE) == 1 << 28
    wanted = recipe()
    wanted = msgspec.structs.replace(wanted, backend=msgspec.structs.replace(wanted.backend, weight_streaming=True))
    streaming = configure(trt, builder, graph, wanted, EngineOptions.of(wanted, refit=True))
    assert streaming.get_flag(trt.BuilderFlag.WEIGHT_STREAMING)
    assert streaming.get_flag(trt.BuilderFlag.REFIT)


def test_the_whole_network_is_read_and_built(model) -> None:
    """By TensorRT-RTX, which takes no plugins from Python: in their place stand nodes that hand their inputs on."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs TensorRT-RTX (pip install 'plancast[rtx]')")
    from builder.backends.tensorrt_rtx import load_library as load_rtx
    from runtime.executors.segments.engines import Log

    wanted = Recipe(
        name="tiny", model="tiny", limits=LIMITS, kv=KvConfig(key="int8", value="int8", block_size=16),
        weights=WeightsConfig(dtype="int4", group_size="channel", symmetric=True),
    )  # fmt: skip
    graph = plugin_graph(run_passes(ir.load(model[1]), wanted), 89)
    trt = load_rtx()
    log = Log(trt)
    builder = trt.Builder(log.logger)
    with pytest.raises(BuildError, match=r"does not read the graph \(after \d+ layers\): .*(WriteKV|[Pp]lugin)"):
        define_network(trt, builder, graph, log)
    for node in [node for node in graph.graph if node.op_type in PLUGINS]:
        pairs = zip(node.outputs, node.inputs[2:4] if node.op_type == "WriteKV" else node.inputs[:1], strict=True)
        for out, source in pairs:
            assert source is not None
            assert out.dtype == source.dtype
            new = ir.node("Identity", [source])
            new.outputs[0].name, new.outputs[0].dtype = f"{out.name}.handed_on", out.dtype
            graph.graph.insert_before(node, new)
            out.replace_all_uses_with(new.outputs[0])
        graph.graph.remove(node, safe=True)
    network = define_network(trt, builder, graph, log)
    names = {network.get_input(i).name for i in range(network.num_inputs)}
    assert names == {value.name for value in graph.graph.inputs}
    assert "max_context_len" not in names
    assert tuple(network.get_output(0).shape) == (-1, VOCAB_SIZE)
    config = configure(trt, builder, graph, wanted, EngineOptions())
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    engine = builder.build_serialized_network(network, config)
    assert engine is not None, log.last
    assert len(bytes(engine)) > 100_000


def test_without_tensorrt_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BuildError, match=r"^TensorRT does not load .*plancast\[tensorrt\]"):
        load_library()

    class Old:
        __version__ = "10.13.3"

    monkeypatch.setitem(sys.modules, "tensorrt", Old)
    with pytest.raises(BuildError, match=r"^TensorRT 10\.13\.3 is installed, and plancast works with 11"):
        load_library()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_so() -> None:
    with pytest.raises(BuildError, match=r"^TensorRT builds an engine on the GPU that it is for \(SM90\), and .*\w$"):
        require_gpu("SM90")
