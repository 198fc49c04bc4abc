"""A few steps through a compiled model, so that two forms of one engine can be told to compute the same.

A form that OpenVINO wrote is not to be trusted unseen: a blob has lost attributes of operations before, loads without a
complaint, and computes something else (see openvino_rope.py).
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from builder.tracing.signature import OUTPUTS

# Steps of one sequence (past, new) over the blocks 1, 0, 2 of 32 tokens: a prompt, a chunk on top, a decode.
_STEPS = ((0, 37), (37, 30), (67, 1))
_BLOCKS = np.array([1, 0, 2], np.int32)
_FEW_TOKENS = 64  # any model knows as many


def probe(compiled: ov.CompiledModel) -> NDArray[np.float32]:
    """The output [68, V] (or hidden states [68, H]) of 68 fixed tokens, run in three steps."""
    request = compiled.create_infer_request()
    output = compiled.output(0)
    vocab_size = output.partial_shape[1].get_length()
    if output.any_name == OUTPUTS["embed"]:  # its width does not say how many tokens the model knows
        vocab_size = min(vocab_size, _FEW_TOKENS)
    names = set()
    for port in compiled.inputs:
        names.add(port.any_name)
        if "_cache." in port.any_name:
            shape = [len(_BLOCKS), *(dim.get_length() for dim in list(port.partial_shape)[1:])]
            cache = ov.Tensor(port.element_type, shape)
            np.frombuffer(cache.data, np.uint8)[:] = 0
            request.set_tensor(port, cache)
    logits = []
    for past, new in _STEPS:
        blocks = _BLOCKS[: -(-(past + new) // 32)]
        positions = np.arange(past, past + new)
        inputs = {
            "input_ids": positions * 31 % vocab_size,
            "position_ids": positions,
            "past_lens": np.array([past], np.int32),
            "query_starts": np.array([0, new], np.int32),
            "block_ids": blocks,
            "block_starts": np.array([0, len(blocks)], np.int32),
            "max_context_len": np.array(past + new, np.int32),
            "logits_rows": np.arange(new),
            "hidden_states": _hidden_states(compiled, positions),
        }
        for name in names & inputs.keys():
            request.set_tensor(name, ov.Tensor(inputs[name]))
        request.infer()
        logits.append(request.get_output_tensor(0).data.copy())
    return np.concatenate(logits)


def _hidden_states(compiled: ov.CompiledModel, positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """What a head's tokens come with: [new, H], or [new, 0] of an engine that takes none."""
    (width,) = [port.partial_shape[1].get_length() for port in compiled.inputs if port.any_name == "hidden_states"] or [
        0
    ]
    return np.sin(np.outer(positions + 1, np.arange(1, width + 1)) * 0.7).astype(np.float32)


def agree(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Whether two results of `probe` differ by no more than 1 % of their spread; a NaN never agrees."""
    return bool(np.abs(one - other).max() <= 0.01 * one.std())
