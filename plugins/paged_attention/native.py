"""Our own C++ operation `plancast::PagedAttention` in an OpenVINO model: its inputs, and the nodes that become it.

The operation lives in the native library (`plugins.native`). Its attributes are two constant inputs, which every form
of a model keeps exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from plugins.paged_attention.kv_formats import DTYPES, KvFormat

BLOCK_SIZE = 32  # of the kernels
MAX_HEAD_SIZE = 512
ROTATIONS = ("none", "key", "value", "both")
_SETTINGS = (
    "num_heads",
    "num_kv_heads",
    "head_size",
    "v_head_size",
    "sliding_window",
    "key_dtype",
    "value_dtype",
    "group_size",
    "rotate",
)
_SCALARS = ("scale", "softcap", "key_scale", "value_scale")


def settings(attributes: Mapping[str, Any]) -> np.ndarray:
    """The node's integers, i32: dtypes and rotation as their numbers in `DTYPES` and `ROTATIONS`."""
    key, value = formats(attributes)
    values = {
        **attributes,
        "key_dtype": DTYPES.index(key.dtype),
        "value_dtype": DTYPES.index(value.dtype),
        "group_size": attributes.get("group_size", 32),
        "rotate": ROTATIONS.index(attributes.get("rotate", "none")),
        "sliding_window": attributes.get("sliding_window", 0),
    }
    return np.array([values[name] for name in _SETTINGS], np.int32)


def scalars(attributes: Mapping[str, Any]) -> np.ndarray:
    """The node's numbers, f32."""
    defaults = {"softcap": 0.0, "key_scale": 0.0, "value_scale": 0.0}
    return np.array([{**defaults, **attributes}[name] for name in _SCALARS], np.float32)


def formats(attributes: Mapping[str, Any]) -> tuple[KvFormat, KvFormat]:
    """How a node with these ONNX attributes stores keys and values. Raises `ValueError` where it cannot."""
    key, _, value = attributes.get("kv_dtype", "f32").partition(":")
    group = attributes.get("group_size", 32)
    return (
        KvFormat(key, group, static_scale=attributes.get("key_scale", 0.0)),
        KvFormat(value or key, group, static_scale=attributes.get("value_scale", 0.0)),
    )


def read_settings(settings: np.ndarray, scalars: np.ndarray) -> dict[str, Any]:
    """The inverse of `settings` and `scalars`: ONNX attributes."""
    values: dict[str, Any] = {name: int(value) for name, value in zip(_SETTINGS, settings, strict=True)}
    values |= {name: float(value) for name, value in zip(_SCALARS, scalars, strict=True)}
    key, value = (DTYPES[values.pop(f"{part}_dtype")] for part in ("key", "value"))
    kv_dtype = key if key == value else f"{key}:{value}"
    return {**values, "kv_dtype": kv_dtype, "rotate": ROTATIONS[int(values["rotate"])], "block_size": BLOCK_SIZE}


def refusal(attributes: Mapping[str, Any]) -> str | None:
    """Why the kernels cannot compute a node with these attributes; None where they can."""
    if attributes["block_size"] != BLOCK_SIZE:
        return f"KV block size {attributes['block_size']}: the C++ kernels work with {BLOCK_SIZE} alone"
    key, value = formats(attributes)
    for name, size, form in (
        ("head_size", attributes["head_size"], key),
        ("v_head_size", attributes["v_head_size"], value),
    ):
        if size > MAX_HEAD_SIZE:
            return f"{name} {size}: the C++ kernels work up to {MAX_HEAD_SIZE}"
        multiple = {"int8": 4, "int4": 4, "bf16": 2}.get(form.dtype, 1)
        if size % multiple:
            return f"{name} {size} with {form.dtype}: the C++ kernels want a multiple of {multiple}"
    return None
