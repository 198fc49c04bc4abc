"""The OpenVINO binding of PagedAttention against the reference."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openvino_engine import skip_unless_computed
from paged_cases import PagedCase, make_case
from paged_onnx import single_node_model

from plugins.native import build_native
from plugins.paged_attention.openvino import (
    KV_PRECISIONS,
    conversion_extension,
    reading_core,
    refusal,
    restore_nodes,
)
from plugins.paged_attention.reference import reference

# Mixed batch: a prompt, a decode, a chunk on top of a past, a verification of two tokens, a long prompt.
MIXED = [(0, 7), (40, 1), (33, 5), (64, 2), (0, 100)]


def properties(compute: str = "f32", kv: str = "f32") -> dict[str, str]:
    return {
        "INFERENCE_PRECISION_HINT": compute,
        "KV_CACHE_PRECISION": KV_PRECISIONS[kv],
        "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        "INFERENCE_NUM_THREADS": "2",
        "ENABLE_CPU_PINNING": "NO",
    }


@pytest.fixture(scope="module")
def core() -> ov.Core:
    core = ov.Core()
    core.add_extension(conversion_extension())
    return core


def compile_case(core: ov.Core, case: PagedCase, **dtypes: str) -> ov.CompiledModel:
    model = core.read_model(single_node_model(case).SerializeToString())
    return core.compile_model(model, "CPU", properties(**dtypes))


class Runner:
    """One compiled node with its caches bound. The past is written through the node itself, in its own cell format."""

    def __init__(self, compiled: ov.CompiledModel, case: PagedCase):
        self.request, self.case = compiled.create_infer_request(), case
        num_blocks = case.inputs["key_cache"].shape[0]
        for port in compiled.inputs:
            if port.any_name.endswith("_cache"):
                shape = [num_blocks, *(dim.get_length() for dim in list(port.partial_shape)[1:])]
                tensor = ov.Tensor(port.element_type, shape)
                # Garbage in every cell that is not written (NaN for the float types): reading one shows.
                np.frombuffer(tensor.data, np.uint8)[:] = 0xFF
                self.request.set_tensor(port, tensor)
        self._write_past()

    def _write_past(self) -> None:
        case = self.case
        pasts = case.inputs["past_lens"]
        T = int(pasts.sum())
        if T:
            self._run(
                {
                    **case.inputs,
                    "query": np.zeros((T, case.inputs["query"].shape[1]), np.float32),
                    "key": self._flat(case.dense_keys),
                    "value": self._flat(case.dense_values),
                    "past_lens": np.zeros_like(pasts),
                    "query_starts": np.concatenate([[0], np.cumsum(pasts)]).astype(np.int32),
                }
            )

    def _flat(self, dense: list[np.ndarray]) -> np.ndarray:
        pasts = self.case.inputs["past_lens"]
        return np.concatenate([rows[:past] for rows, past in zip(dense, pasts, strict=True)]).reshape(pasts.sum(), -1)

    def _run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        for name, array in inputs.items():
            if not name.endswith("_cache"):
                self.request.set_tensor(name, ov.Tensor(np.array(array)))
        self.request.infer()
        return self.request.get_output_tensor(0).data.astype(np.float32)

    def __call__(self) -> np.ndarray:
        return self._run(self.case.inputs)


def check(core: ov.Core, sequences: list[tuple[int, int]], tolerance: float = 5e-6, **kwargs) -> None:
    dtypes = {name: kwargs.pop(name) for name in ("compute", "kv") if name in kwargs}
    case = make_case(sequences, block_size=32, **kwargs)
    out = Runner(compile_case(core, case, **dtypes), case)()
    np.testing.assert_allclose(out, reference(**case.inputs, **case.attributes), atol=tolerance, rtol=0)


@pytest.mark.parametrize("head_size", [8, 32, 40, 64, 80, 96, 100, 128, 192, 256])
def test_head_sizes(core, head_size):
    check(core, MIXED, head_size=head_size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (9, 3), (5, 5), (14, 2), (32, 1)])
def test_heads(core, num_heads, num_kv_heads):
    check(core, MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=64)


@pytest.mark.parametrize(("head_size", "v_head_size"), [(64, 32), (192, 128), (32, 64)])
def test_values_of_another_head_size(core, head_size, v_head_size):
    check(core, MIXED, head_size=head_size, v_head_size=v_head_size)


@pytest.mark.parametrize("sliding_window", [1, 5, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("sequences", [MIXED, [(200, 1)], [(200, 3), (64, 33)]])
def test_sliding_windows(core, sliding_window, sequences):
    check(core, sequences, sliding_window=sliding_window, head_size=64)


@pytest.mark.parametrize("extras", [{"sinks": True}, {"alibi": True}, {"sinks": True, "alibi": True}])
@pytest.mark.parametrize("sequences", [MIXED, [(200, 1)], [(200, 3)]])
def test_sinks_and_alibi(core, extras, sequences):
    check(core, sequences, num_heads=8, head_size=64, **extras)


@pytest.mark.parametrize("sequences", [MIXED, [(200, 1)], [(200, 3)]])
def test_sinks_with_a_window(core, sequences):
    check(core, sequences, num_heads=8, head_size=64, sinks=True, sliding_window=20)


@pytest.mark.parametrize(
    "edge", [[(0, 1)], [(31, 1)], [(31, 2)], [(32, 32)], [(0, 32)], [(5, 0), (3, 2)], [(5, 1)] * 9]
)
def test_block_edges(core, edge):
    check(core, edge, head_size=32)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sequences=st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=6),
    group=st.integers(1, 4),
    num_kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([16, 64, 96]),
    bias=st.sampled_from([{}, {"sliding_window": 7}, {"sliding_window": 40}, {"alibi": True}]),
    sinks=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_batch(core, sequences, group, num_kv_heads, bias, **kwargs):
    check(core, sequences, num_kv_heads=num_kv_heads, num_heads=num_kv_heads * group, **bias, **kwargs)


# Bounds: the largest absolute error seen over these cases (standard normal keys and values) times two.
@pytest.mark.parametrize(
    ("compute", "kv", "tolerance"),
    [("f32", "f16", 3e-3), ("f32", "int8", 0.05), ("bf16", "bf16", 0.05), ("bf16", "int8", 0.07)],
)
@pytest.mark.parametrize("extras", [{}, {"sliding_window": 33}, {"sinks": True}, {"alibi": True}, {"head_size": 128}])
def test_reduced_precision_stays_within_bounds(core, compute, kv, tolerance, extras):
    skip_unless_computed(compute)
    check(core, MIXED, tolerance, compute=compute, kv=kv, **{"head_size": 64, "num_heads": 8, **extras})


def test_int8_rolls_back_exactly(core):
    """Rejected tokens leave nothing behind: a cell's value depends on its own token alone (BY_TOKEN)."""
    case = make_case([(40, 6)], block_size=32, head_size=64)
    compiled = compile_case(core, case, kv="int8")
    fresh = Runner(compiled, case)()
    rolled_back = Runner(compiled, case)
    noise = {name: 9 * np.flip(case.inputs[name], 0) for name in ("key", "value")}
    rolled_back._run({**case.inputs, **noise})
    np.testing.assert_array_equal(rolled_back(), fresh)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"softcap": 50.0}, "softcap 50"),
        ({"block_size": 16}, "KV block size 16"),
        ({"alibi": True, "sliding_window": 8}, "sliding window 8 with ALiBi"),
    ],
)
def test_refuses_what_the_operation_cannot_do(core, change, reason):
    case = make_case([(0, 3)], **{"block_size": 32, **change})
    assert reason in (refusal(case.attributes, case.inputs) or "")
    with pytest.raises(RuntimeError, match=reason):
        core.read_model(single_node_model(case).SerializeToString())


@pytest.mark.parametrize("native", [False, True])
def test_ir_is_read_whole_with_and_without_the_native_library(core, tmp_path, native):
    case = make_case(MIXED, block_size=32, head_size=64, v_head_size=32, sinks=True)
    ov.save_model(core.read_model(single_node_model(case).SerializeToString()), tmp_path / "node.xml", False)
    reader = reading_core(build_native() if native else None)
    model = reader.read_model(tmp_path / "node.xml")
    assert restore_nodes(model) == 0
    assert [node.get_type_name() for node in model.get_ops()].count("PagedAttentionExtension") == 1
    compiled = reader.compile_model(model, "CPU", properties())
    np.testing.assert_array_equal(Runner(compiled, case)(), Runner(compile_case(core, case), case)())


@pytest.mark.parametrize(("compute", "kv"), [("f32", "f32"), ("f32", "int8"), ("bf16", "bf16")])
def test_blob_loads_with_the_native_library(core, compute, kv):
    skip_unless_computed(compute)
    case = make_case(MIXED, block_size=32, head_size=64, v_head_size=32, sinks=True)
    compiled = compile_case(core, case, compute=compute, kv=kv)
    imported = reading_core(build_native()).import_model(compiled.export_model(), "CPU", properties(compute, kv))
    np.testing.assert_array_equal(Runner(imported, case)(), Runner(compiled, case)())
