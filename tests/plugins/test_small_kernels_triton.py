"""Norm, rotary embedding, gated MLP and weight-only products in Triton, interpreted on the CPU, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the Triton kernels need triton (pip install 'plancast[triton]')")

from plugins.gpu import torch_kernel  # noqa: E402
from plugins.paged_attention.kv_formats import fp8_bits, fp8_values  # noqa: E402

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def tensor(array, dtype=None):
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype or torch.from_numpy(np.zeros(0, array.dtype)).dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(dtype, with_residual):
    x, residual = tensor(normal(3, 48), dtype), tensor(normal(3, 48), dtype)
    weight = tensor(normal(48), dtype)
    h = (x.float() + residual.float()).to(dtype) if with_residual else x
    expected = h.float() / torch.sqrt((h.float() ** 2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    mine = residual.clone()
    y = torch_kernel.rms_norm(x, weight, 1e-5, mine if with_residual else None)
    # The interpreter cuts a bf16 off where a GPU rounds it.
    bounds = {"rtol": 2**-7, "atol": 2**-12} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(mine, h if with_residual else residual, **bounds)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected, rtol=2 * bounds["rtol"], atol=2 * bounds["atol"])
    if with_residual:  # the sum elsewhere, and the residual as it was
        before, summed = residual.clone(), torch.empty_like(x)
        again = torch_kernel.rms_norm(x, weight, 1e-5, before, summed=summed)
        assert torch.equal(again, y)
        assert torch.equal(summed, mine)
        assert torch.equal(before, residual)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(interleaved):
    x, positions = normal(3, 2 * 12), np.array([0, 7, 3])
    angles = np.arange(9)[:, None] * 0.5 ** np.arange(4)
    first = np.arange(0, 8, 2) if interleaved else np.arange(4)  # eight of the twelve elements turn
    second = first + (1 if interleaved else 4)
    heads = x.reshape(3, 2, 12)
    expected = heads.copy()
    c, s = np.cos(angles)[positions][:, None], np.sin(angles)[positions][:, None]
    expected[..., first] = heads[..., first] * c - heads[..., second] * s
    expected[..., second] = heads[..., second] * c + heads[..., first] * s
    y = torch_kernel.rope(
        tensor(x), tensor(np.cos(angles).astype(np.float32)), tensor(np.sin(angles).astype(np.float32)),
        tensor(positions), num_heads=2, rotary=8, interleaved=interleaved,
    )  # fmt: skip
    np.testing.assert_allclose(y.numpy(), expected.reshape(3, 24), atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(activation):
    gate_up = tensor(normal(2, 2 * 70) * 4)
    gate, up = gate_up[:, :70], gate_up[:, 70:]
    active = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    torch.testing.assert_close(torch_kernel.gated_mlp(gate_up, activation), active * up, rtol=2e-6, atol=2e-6)


def test_gated_mlp_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="silu or gelu_tanh"):
        torch_kernel.gated_mlp(tensor(normal(1, 4)), "relu")


def packed(codes):
    """int codes [N, K] -> u8 [N, K / 2], the even ones in the low nibbles."""
    nibbles = (codes & 0xF).astype(np.uint8)
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


@pytest.mark.parametrize(
    ("kind", "group", "rows", "splits"),
    [("int4", 32, 1, 1), ("int4", 0, 3, 2), ("uint4", 64, 17, 1), ("int8", 0, 5, 1), ("int8", 32, 2, 2),
     ("fp8_e4m3", 0, 3, 1), ("fp8_e4m3_native", 0, 3, 1), ("fp8_e5m2", 32, 2, 1)],
)  # fmt: skip
def test_weight_only_products(kind, group, rows, splits):
    N, K = 40, 128
    x, scales = normal(rows, K), np.abs(normal(N, K // group if group else 1)) + 0.1
    zeros = None
    if kind.startswith("fp8"):
        dtype = kind.removesuffix("_native")
        stored = fp8_bits(normal(N, K) * 3, dtype)
        values = fp8_values(stored, dtype)
    elif kind == "int8":
        stored = RNG.integers(-127, 128, (N, K)).astype(np.int8)
        values = stored.astype(np.float32)
    else:
        codes = RNG.integers(-8, 8, (N, K)) if kind == "int4" else RNG.integers(0, 16, (N, K))
        stored, values = packed(codes), codes.astype(np.float32)
        if kind == "uint4":
            zeros = RNG.integers(0, 16, scales.shape).astype(np.int8)
            values = values - np.repeat(zeros, group, axis=1)
    weight = values * np.repeat(scales, group or K, axis=1)
    bias = normal(N)
    y = torch_kernel.weight_only(
        tensor(x), tensor(stored), tensor(scales if group else scales[:, 0]), kind,
        zeros=None if zeros is None else tensor(zeros), bias=tensor(bias), splits=splits, block_n=32,
    )  # fmt: skip
    np.testing.assert_allclose(y.numpy(), x @ weight.T + bias, rtol=1e-4, atol=1e-4 * np.abs(weight).max())


@pytest.mark.parametrize(
    ("kind", "weight", "scales", "message"),
    [
        ("int8", np.zeros((4, 32), np.int8), np.ones(4, np.float32), "x has 64 columns"),
        ("int8", np.zeros((4, 64), np.int8), np.ones((4, 8), np.float32), "groups of 8"),
        ("int4", np.zeros((4, 32), np.uint8), np.ones((4, 4), np.float32), "32 columns or more"),
    ],
)
def test_weight_only_refuses_shapes_that_do_not_fit(kind, weight, scales, message):
    with pytest.raises(ValueError, match=message):
        torch_kernel.weight_only(tensor(normal(1, 64)), tensor(weight), tensor(scales), kind)
