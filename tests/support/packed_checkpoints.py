"""Tiny checkpoints in the formats of others, packed bit by bit as their specifications say. No code of ours is used.

GPTQ: https://github.com/AutoGPTQ/AutoGPTQ (qlinear_cuda_old.py, `pack`). AWQ: https://github.com/casper-hansen/AutoAWQ
(gemm.py, `from_linear`). compressed-tensors: https://github.com/neuralmagic/compressed-tensors (`pack_to_int32`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tiny_hf import tiny_weights, write_tiny_hf

GROUP = 32
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def words(rows: list[list[int]], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each row's numbers packed into 32-bit words, the first into the lowest bits (or as `order` says)."""
    count = 32 // bits
    packed = []
    for row in rows:
        line = []
        for start in range(0, len(row), count):
            word = 0
            for place in range(count):
                number = row[start + (order[place] if order else place)]
                word |= (number & ((1 << bits) - 1)) << (place * bits)
            line.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(line)
    return torch.tensor(packed, dtype=torch.int32)


def write_packed(folder: Path, form: str) -> dict[str, NDArray[np.float32]]:
    """Write a quantized tiny model as `form` (gptq, gptq-v2, gptq-act-order, gptq-8, awq, ct-int8, ct-int8-group,
    ct-int4, ct-int4-asym, ct-fp8, ct-fp8-block) and return what its linear weights dequantize to."""
    write_tiny_hf(folder)
    rng = np.random.default_rng(5)
    tensors: dict[str, torch.Tensor] = {}
    dense: dict[str, NDArray[np.float32]] = {}
    for name, weight in tiny_weights().items():
        if "proj" not in name:
            tensors[name] = torch.from_numpy(weight)
            continue
        stem = name.removesuffix(".weight")
        parts, dense[name] = _PACKERS[form.partition("-")[0]](form, *weight.shape, rng)
        tensors |= {f"{stem}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated(form)}))
    return dense


def stated(form: str) -> dict[str, Any]:
    """The quantization_config of a form."""
    if form.startswith("gptq"):
        version = "gptq_v2" if form == "gptq-v2" else "gptq"
        bits = 8 if form == "gptq-8" else 4
        return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": version}
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    formats = {"int8": "int-quantized", "int4": "pack-quantized", "fp8": "float-quantized"}
    kind = form.split("-")[1]
    scheme = {"num_bits": 4 if kind == "int4" else 8, "type": "float" if kind == "fp8" else "int"}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme}}
    return {
        "quant_method": "compressed-tensors",
        "format": formats[kind],
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def _numbers(rng: np.random.Generator, rows: int, columns: int, bits: int) -> tuple[NDArray, NDArray, NDArray]:
    """q [N, K], z [N, G] unsigned, s [N, G] f16; every value of q and z occurs."""
    q = rng.integers(0, 1 << bits, (rows, columns))
    z = rng.integers(0, 1 << bits, (rows, columns // GROUP))
    s = (rng.random((rows, columns // GROUP)) / 50 + 1e-3).astype(np.float16)
    return q, z, s


def _gptq(form: str, rows: int, columns: int, rng: np.random.Generator):
    bits = 8 if form == "gptq-8" else 4
    q, z, s = _numbers(rng, rows, columns, bits)
    group_of = np.arange(columns) // GROUP
    if form == "gptq-act-order":
        group_of = rng.permutation(group_of)
    dense = np.empty((rows, columns), np.float32)
    for k in range(columns):
        dense[:, k] = s[:, group_of[k]].astype(np.float32) * (q[:, k] - z[:, group_of[k]]).astype(np.float32)
    stored = z if form == "gptq-v2" else (z - 1) & ((1 << bits) - 1)
    parts = {
        "qweight": words(q.tolist(), bits).T,  # packed along the inputs, [K b/32, N]
        "qzeros": words(stored.T.tolist(), bits),
        "scales": torch.from_numpy(s.T.copy()),
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }
    return parts, dense


def _awq(form: str, rows: int, columns: int, rng: np.random.Generator):
    q, z, s = _numbers(rng, rows, columns, 4)
    dense = (q - np.repeat(z, GROUP, 1)).astype(np.float32) * np.repeat(s.astype(np.float32), GROUP, 1)
    parts = {
        "qweight": words(q.T.tolist(), 4, AWQ_COLUMNS),
        "qzeros": words(z.T.tolist(), 4, AWQ_COLUMNS),
        "scales": torch.from_numpy(s.T.copy()),
    }
    return parts, dense


def _ct(form: str, rows: int, columns: int, rng: np.random.Generator):
    if form.startswith("ct-fp8"):
        values = torch.from_numpy(rng.standard_normal((rows, columns)).astype(np.float32) * 20).to(torch.float8_e4m3fn)
        shape = (rows // 16, columns // GROUP) if form == "ct-fp8-block" else (rows, 1)
        scale = torch.from_numpy(rng.random(shape).astype(np.float32) / 50 + 1e-3).to(torch.bfloat16)
        spread = scale.float().repeat_interleave(rows // shape[0], 0).repeat_interleave(columns // shape[1], 1)
        return {"weight": values, "weight_scale": scale}, (values.float() * spread).numpy()
    if form.startswith("ct-int8"):
        q = rng.integers(-128, 128, (rows, columns)).astype(np.int8)
        groups = columns // GROUP if form == "ct-int8-group" else 1
        scale = torch.from_numpy(rng.random((rows, groups)).astype(np.float32) / 50).to(torch.bfloat16)
        spread = scale.float().repeat_interleave(columns // groups, 1).numpy()
        return {"weight": torch.from_numpy(q), "weight_scale": scale}, q.astype(np.float32) * spread
    q, z, s = _numbers(rng, rows, columns, 4)
    z = z if form == "ct-int4-asym" else np.full_like(z, 8)
    dense = (q - np.repeat(z, GROUP, 1)).astype(np.float32) * np.repeat(s.astype(np.float32), GROUP, 1)
    parts = {
        "weight_packed": words(q.tolist(), 4),  # q is the signed value plus 8
        "weight_scale": torch.from_numpy(s),
        "weight_shape": torch.tensor([rows, columns]),
    }
    if form == "ct-int4-asym":
        parts["weight_zero_point"] = words(z.T.tolist(), 4).T  # packed along the outputs, [N/8, G]
    return parts, dense


_PACKERS = {"gptq": _gptq, "awq": _awq, "ct": _ct}
