"""Checkpoints that are quantized already: GPTQ, AWQ and compressed-tensors safetensors, each weight read exactly.

    GPTQ (AutoGPTQ, GPTQModel)   X.qweight i32 [K b/32, N], X.qzeros i32 [G, N b/32], X.scales [G, N], X.g_idx i32 [K]
    AWQ (AutoAWQ, "gemm")        X.qweight i32 [K, N/8], X.qzeros i32 [G, N/8], X.scales [G, N]
    compressed-tensors           X.weight i8 or fp8 [N, K], or X.weight_packed i32 [N, K b/32] with X.weight_shape;
                                 X.weight_scale [N, G] (or a block's, or one), X.weight_zero_point, X.weight_g_idx

b: bits. Scales are f16 or bf16; a weight is what `scale * (q - zero)` gives in f32, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.errors import ZooError
from zoo.formats.side_file import read_tensor
from zoo.quantized import QuantizedWeight
from zoo.safetensors_header import TensorRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which column of eight each half byte holds, lowest first
_COMPRESSED = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized")
# Scales for activations and caches, which this engine does not quantize so.
_UNUSED = (".input_scale", ".output_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale", ".weight_shape")


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's weights are packed, as its config says: the format, and bits and scheme where they matter."""

    method: str
    bits: int
    offset: int = 0  # GPTQ: what is added to stored zero points


def read_quantization(config: dict[str, Any], where: str) -> Quantization | None:
    """What `quantization_config` says; None where there is none. Raises `ZooError` where it cannot be imported."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else "unknown"
    hint = "use the repository that these weights were made from"
    if method == "gptq":
        bits = stated.get("bits")
        if bits in (4, 8):
            return Quantization("gptq", bits, 0 if stated.get("checkpoint_format") == "gptq_v2" else 1)
        raise ZooError(f"{where} holds weights quantized (gptq) in {bits} bits; 4 and 8 can be imported: {hint}")
    if method == "awq":
        bits, version = stated.get("bits", stated.get("w_bit")), str(stated.get("version", "gemm")).lower()
        if bits == 4 and version == "gemm":
            return Quantization("awq", 4)
        raise ZooError(f"{where} holds weights quantized (awq, {bits} bits, {version}); only 4 bits in gemm: {hint}")
    if method == "compressed-tensors":
        form, groups = stated.get("format"), stated.get("config_groups") or {}
        schemes = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
        known = all(
            (scheme.get("num_bits"), scheme.get("type")) in ((4, "int"), (8, "int"), (8, "float")) for scheme in schemes
        )
        bits = {scheme.get("num_bits", 0) for scheme in schemes}
        if form in _COMPRESSED and known and len(bits) == 1:
            return Quantization("compressed-tensors", bits.pop())
        raise ZooError(
            f"{where} holds weights quantized (compressed-tensors, {form}) in a way that is not known: {hint}"
        )
    known_methods = "gptq, awq and compressed-tensors can be imported"
    raise ZooError(f"{where} holds weights already quantized ({method}); {known_methods}: {hint}")


def read_packed(
    tensors: dict[str, TensorRef], quantization: Quantization, where: str
) -> Iterator[tuple[str, QuantizedWeight | TensorRef]]:
    """Every weight of the checkpoint by its dense name: read where it is quantized, else where it lies.

    Raises `ZooError` where a tensor is missing or has a shape that does not fit the others.
    """
    read, marker = _READERS[quantization.method]
    modules = {name.removesuffix(suffix) for name in tensors for suffix in marker if name.endswith(suffix)}
    if quantization.method == "compressed-tensors":
        modules = {name for name in modules if f"{name}.weight_scale" in tensors}
    own = {f"{module}{suffix}" for module in modules for suffix in _PARTS}
    for module in sorted(modules):
        parts = {s: tensors[f"{module}{s}"] for s in _PARTS if f"{module}{s}" in tensors}
        try:
            weight = read({suffix: read_tensor(ref) for suffix, ref in parts.items()}, quantization)
        except (KeyError, ValueError, AssertionError) as error:
            raise ZooError(
                f"{where}: the quantized weight {module} is damaged or of an unknown layout ({error})"
            ) from None
        yield f"{module}.weight", weight
    for name, ref in tensors.items():
        if name not in own and not name.endswith(_UNUSED):
            yield name, ref


_PARTS = (
    ".qweight", ".qzeros", ".scales", ".g_idx",
    ".weight", ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape",
)  # fmt: skip


def _gptq(parts: dict[str, NDArray], quantization: Quantization) -> QuantizedWeight:
    bits, mask = quantization.bits, (1 << quantization.bits) - 1
    values = _unpack(parts[".qweight"], bits, axis=0).T  # [N, K]
    zero = (_unpack(parts[".qzeros"], bits, axis=1).T + quantization.offset) & mask  # wraps, as its own kernels do
    scale = parts[".scales"].astype(np.float32).T
    values, order = _sorted_by_group(values, parts.get(".g_idx"), scale.shape[1])
    return _unsigned(values, scale, zero, bits, order)


def _awq(parts: dict[str, NDArray], quantization: Quantization) -> QuantizedWeight:
    # The half bytes of each eight columns, put back in order.
    place = np.argsort(_AWQ_ORDER)

    def unpack(packed: NDArray) -> NDArray:
        spread = _unpack(packed, 4, axis=1)
        return spread.reshape(len(packed), -1, 8)[:, :, place].reshape(len(packed), -1).T

    scale = parts[".scales"].astype(np.float32).T
    return _unsigned(unpack(parts[".qweight"]), scale, unpack(parts[".qzeros"]), 4, None)


def _compressed(parts: dict[str, NDArray], quantization: Quantization) -> QuantizedWeight:
    bits, packed = quantization.bits, parts.get(".weight_packed")
    half = 1 << (bits - 1)
    zero = parts.get(".weight_zero_point")
    if packed is not None:
        rows, columns = (int(size) for size in parts[".weight_shape"])
        values = (_unpack(packed, bits, axis=1)[:, :columns] - half).astype(np.int8)
        if zero is not None:
            zero = (_unpack(zero, bits, axis=0)[:rows] - half).astype(np.int8)
    else:
        values = parts[".weight"]
        rows, columns = values.shape
    scale = _spread(parts[".weight_scale"].astype(np.float32), rows, columns)
    kind = "int4" if bits == 4 else "int8"
    if values.dtype == np.uint8:  # the bits of fp8
        return QuantizedWeight("fp8", values, scale)
    if zero is not None:
        zero = _spread(zero, rows, columns).astype(np.int8)
        zero = zero if zero.any() else None
    values, order = _sorted_by_group(values, parts.get(".weight_g_idx"), scale.shape[1])
    return QuantizedWeight(kind, np.ascontiguousarray(values), scale, zero, order=order)


_READERS: dict[str, tuple[Callable[[dict[str, NDArray], Quantization], QuantizedWeight], tuple[str, ...]]] = {
    "gptq": (_gptq, (".qweight",)),
    "awq": (_awq, (".qweight",)),
    "compressed-tensors": (_compressed, (".weight_packed", ".weight_scale")),
}


def _unpack(packed: NDArray[np.int32], bits: int, *, axis: int) -> NDArray[np.int32]:
    """Words of 32 bits along `axis` -> their 32 / bits numbers, the lowest bits first."""
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * np.uint32(bits)
    words = np.ascontiguousarray(packed).view(np.uint32)
    if axis == 0:
        spread = (words[:, None, :] >> shifts[None, :, None]).reshape(-1, words.shape[1])
    else:
        spread = (words[:, :, None] >> shifts).reshape(len(words), -1)
    return (spread & np.uint32((1 << bits) - 1)).astype(np.int32)


def _unsigned(
    values: NDArray, scale: NDArray[np.float32], zero: NDArray, bits: int, order: NDArray[np.int64] | None
) -> QuantizedWeight:
    kind = "uint4" if bits == 4 else "uint8"
    return QuantizedWeight(
        kind,
        np.ascontiguousarray(values.astype(np.uint8)),
        np.ascontiguousarray(scale),
        np.ascontiguousarray(zero.astype(np.uint8)),
        order=order,
    )


def _sorted_by_group(
    values: NDArray, group_of: NDArray | None, groups: int
) -> tuple[NDArray, NDArray[np.int64] | None]:
    """Columns brought together by group, and the order that they then have; as they are where they lie so already."""
    if group_of is None or (np.diff(group_of) >= 0).all():
        if group_of is not None and len(np.unique(np.bincount(group_of, minlength=groups))) != 1:
            raise ValueError("its groups are not of one size")
        return values, None
    if len(np.unique(np.bincount(group_of, minlength=groups))) != 1:
        raise ValueError("its groups are not of one size")
    order = np.argsort(group_of, kind="stable").astype(np.int64)
    return values[:, order], order


def _spread(scale: NDArray, rows: int, columns: int) -> NDArray:
    """One scale, one a channel, one a group, or one a block of rows and columns -> `[N, G]`."""
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    if rows % scale.shape[0] or columns % scale.shape[1]:
        raise ValueError(f"{list(scale.shape)} scales do not divide {rows} x {columns}")
    return np.ascontiguousarray(np.repeat(scale, rows // scale.shape[0], 0))
