"""A few steps through an engine, so that two forms of it can be told to compute the same.

A form that was written is not to be trusted unseen: OpenVINO's blobs have lost attributes of operations before, load
without a complaint, and compute something else (see openvino_rope.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from plugins.block.native import NativeGraph
from plugins.paged_attention.memory import zeroed

# Steps of one sequence (past, new) over the blocks 1, 0, 2 of 32 tokens: a prompt, a chunk on top, a decode.
_STEPS = ((0, 37), (37, 30), (67, 1))
_BLOCKS = np.array([1, 0, 2], np.int32)
_FEW_TOKENS = 64  # any model knows as many


def probe(compiled: ov.CompiledModel) -> NDArray[np.float32]:
    """The output [68, V] (or hidden states [68, H]) of 68 fixed tokens, run in three steps."""
    request = compiled.create_infer_request()
    widths = {}
    for port in compiled.inputs:
        name = port.any_name
        if "_cache." in name:
            shape = [len(_BLOCKS), *(dim.get_length() for dim in list(port.partial_shape)[1:])]
            cache = ov.Tensor(port.element_type, shape)
            np.frombuffer(cache.data, np.uint8)[:] = 0
            request.set_tensor(port, cache)
        else:
            widths[name] = port.partial_shape[1].get_length() if name == "hidden_states" else 0

    def step(inputs: dict[str, NDArray], _rows: int) -> NDArray[np.float32]:
        for name, array in inputs.items():
            request.set_tensor(name, ov.Tensor(array))
        request.infer()
        return request.get_output_tensor(0).data.copy()

    return _probed(step, widths)


def probe_plan(graph: NativeGraph) -> NDArray[np.float32]:
    """The same of a plan."""
    places, plan = graph.plan.places(), graph.plan
    caches = [zeroed(len(_BLOCKS) * each.width) for each in plan.inputs if each.is_cache]
    for place, each in enumerate(plan.inputs):
        if each.is_cache:
            graph.set_input(place, caches[0], len(_BLOCKS))

    def step(inputs: dict[str, NDArray], rows: int) -> NDArray[np.float32]:
        for name, array in inputs.items():
            graph.set_input(places[name], array, array.size if not array.ndim else len(array))
        results = [np.empty((rows, output.width), np.float32) for output in plan.outputs]
        for place, array in enumerate(results):
            graph.set_output(place, array)
        graph.run(1)
        return results[0]

    return _probed(step, {each.name: each.width for each in plan.inputs if not each.is_cache})


def _probed(
    step: Callable[[dict[str, NDArray], int], NDArray[np.float32]], widths: dict[str, int]
) -> NDArray[np.float32]:
    """What `step` returns for the inputs named in `widths` (of what comes as rows: floats a row) and so many rows."""
    results = []
    for past, new in _STEPS:
        blocks = _BLOCKS[: -(-(past + new) // 32)]
        positions = np.arange(past, past + new)
        inputs = {
            "input_ids": positions * 31 % _FEW_TOKENS,
            "position_ids": positions,
            "past_lens": np.array([past], np.int32),
            "query_starts": np.array([0, new], np.int32),
            "block_ids": blocks,
            "block_starts": np.array([0, len(blocks)], np.int32),
            "max_context_len": np.array(past + new, np.int32),
            "logits_rows": np.arange(new),
            "hidden_states": _hidden_states(widths.get("hidden_states", 0), positions),
        }
        results.append(step({name: inputs[name] for name in inputs.keys() & widths.keys()}, new))
    return np.concatenate(results)


def _hidden_states(width: int, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """What a head's tokens come with: [new, width]."""
    return np.sin(np.outer(positions + 1, np.arange(1, width + 1)) * 0.7).astype(np.float32)


def agree(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Whether two results of `probe` differ by no more than 1 % of their spread; a NaN never agrees."""
    return bool(np.abs(one - other).max() <= 0.01 * one.std())
