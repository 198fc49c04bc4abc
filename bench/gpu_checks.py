"""Every Triton kernel, format and attribute against NumPy's references, or f32: the largest errors on random inputs.

Attention is held against the reference that writes the same codes, so what is left is the kernels' own rounding, and
not the format's. An error is a share of the exact result's standard deviation, unless its name says otherwise.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from plugins.paged_attention.kv_formats import KvFormat
from plugins.torch_engine.attention import Layer, attend_by_kernels, attend_by_reference

Check = tuple[str, float, float]  # what, error, bound
_FORMATS = {
    "int8": KvFormat("int8"), "fp8_e4m3": KvFormat("fp8_e4m3"), "fp8_e5m2": KvFormat("fp8_e5m2"),
    "fp8_e4m3 static": KvFormat("fp8_e4m3", static_scale=0.01), "int4": KvFormat("int4"),
    "int4 of 64": KvFormat("int4", group_size=64), "int4 symmetric": KvFormat("int4", zero_point=False),
}  # fmt: skip
_PLAIN: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "v_head_size": 128}
_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "sliding window": {"sliding_window": 7}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": True},
    "ALiBi": {"alibi": True}, "no groups": {"num_heads": 2}, "heads of 80 and 48": {"head_size": 80, "v_head_size": 48},
    "all at once": {"sliding_window": 9, "softcap": 5.0, "sinks": True, "alibi": True},
}  # fmt: skip
# Tokens of each sequence: prompts; then decodes, a chunk, drafts, a new prompt, one launch.
_STEPS = ([0, 37, 20, 3, 0], [1, 1, 5, 4, 21])
_BLOCK = 16
_BOUND = 0.03  # what is left by rounding to 16 bits
_CODES = 0.6  # the format's own, for int4


def checks(device: torch.device, dtype: torch.dtype, dense: str, *, every: bool = True) -> Iterator[Check]:
    """All of them in `dtype`, whose KV format is `dense`. Not `every`: some of each kind, and smaller."""
    plain = _PLAIN if every else {"num_heads": 2, "num_kv_heads": 1, "head_size": 32, "v_head_size": 32}
    formats = {dense: KvFormat(dense), **_FORMATS}
    for name, form in list(formats.items())[: None if every else 2]:
        yield f"attend {name}", attention_error(device, dtype, form, plain), _BOUND
    for name, change in list(_ATTRIBUTES.items())[:: 1 if every else -6]:
        yield f"attend {dense}, {name}", attention_error(device, dtype, formats[dense], plain | change), _BOUND
    # Turned keys are rounded to 16 bits before they become codes: some become the next one.
    yield "attend int4, rotated", attention_error(device, dtype, KvFormat("int4"), plain, rotate="both"), _CODES
    yield from _small(device, dtype)
    yield from _products(device, dtype, every)
    yield from _sampling(device, *((24, 3000) if every else (6, 200)))


def attention_error(
    device: torch.device, dtype: torch.dtype, form: KvFormat, attributes: dict[str, Any], *, rotate: str = "none"
) -> float:
    """Of two steps over one cache: prompts, then everything mixed."""
    rng = np.random.default_rng(1)
    given = {**attributes, "scale": attributes["head_size"] ** -0.5, "block_size": _BLOCK}
    sinks, alibi = (given.pop(name, False) for name in ("sinks", "alibi"))
    given = {"sliding_window": 0, "softcap": 0.0, **given}
    layer = Layer(0, form, form, rotate, given)
    heads, kv_heads = given["num_heads"], given["num_kv_heads"]
    blocks = [-(-sum(counts) // _BLOCK) for counts in zip(*_STEPS, strict=True)]
    ids = torch.from_numpy(rng.permutation(sum(blocks)).astype(np.int32))
    starts = torch.from_numpy(np.cumsum([0, *blocks]).astype(np.int32))
    pages = layer.pages(*(torch.zeros(sum(blocks), size, dtype=torch.uint8) for size in layer.block_bytes()))
    on_device = tuple(page.clone().to(device) for page in pages)
    extra = [
        torch.from_numpy(values.astype(np.float32)).to(dtype) if wanted else None
        for wanted, values in ((sinks, rng.standard_normal(heads)), (alibi, 2.0 ** -np.arange(1, heads + 1)))
    ]
    past = np.zeros(len(blocks), np.int32)
    worst = 0.0
    for counts in _STEPS:
        tokens = sum(counts)
        rows = [
            torch.from_numpy(rng.standard_normal((tokens, width)).astype(np.float32)).to(dtype)
            for width in (heads * given["head_size"], kv_heads * given["head_size"], kv_heads * given["v_head_size"])
        ]
        tables = [
            torch.from_numpy(past.copy()),
            torch.from_numpy(np.cumsum([0, *counts]).astype(np.int32)),
            ids,
            starts,
        ]
        past += np.array(counts, np.int32)
        longest = int(past.max())
        exact = attend_by_reference(layer, *rows, pages, tables, longest, *extra).float()
        moved = [None if x is None else x.to(device) for x in extra]
        got = attend_by_kernels(
            layer, *(x.to(device) for x in rows), on_device, [t.to(device) for t in tables], longest, *moved
        )
        worst = max(worst, _error(got, exact))
    return worst


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    got, exact = got.float().cpu(), exact.float().cpu()
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    return float((got - exact).abs().max() / exact.std())


def _small(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    from plugins.gpu.torch_kernel import gated_mlp, rms_norm, rope
    from plugins.torch_engine.ops import HANDLERS

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    x, residual, weight = random(5, 192), random(5, 192), random(192)
    exact = HANDLERS["RMSNormalization"]({}, x, weight)
    yield "rms_norm", _error(rms_norm(x, weight, 1e-5), exact), _BOUND
    exact = HANDLERS["RMSNormalization"]({}, x + residual, weight)
    yield "rms_norm + residual", _error(rms_norm(x, weight, 1e-5, residual), exact), _BOUND
    x = random(5, 3 * 64)
    angles = torch.randn(5, 24, device=device)
    for interleaved in (False, True):
        settings = {"interleaved": int(interleaved), "rotary_embedding_dim": 48}
        exact = HANDLERS["RotaryEmbedding"](settings, x.view(5, 3, 1, 64), angles.cos()[:, None], angles.sin()[:, None])
        rows = torch.arange(5, device=device)
        got = rope(x, angles.cos(), angles.sin(), rows, num_heads=3, rotary=48, interleaved=interleaved)
        yield f"rope {'pairs' if interleaved else 'halves'}", _error(got, exact.view(5, -1)), _BOUND
    gate_up = random(5, 2 * 70)
    gate, up = gate_up.float().chunk(2, -1)
    for name, active in (
        ("silu", torch.nn.functional.silu(gate)), ("gelu_tanh", torch.nn.functional.gelu(gate, approximate="tanh")),
    ):  # fmt: skip
        yield f"gated {name}", _error(gated_mlp(gate_up, name), active * up), _BOUND


def _products(device: torch.device, dtype: torch.dtype, every: bool) -> Iterator[Check]:
    """Codes of every kind, by channel or in groups, with zeros and biases, whole and with K split."""
    from plugins.gpu.torch_kernel import weight_only
    from plugins.paged_attention.kv_formats import fp8_values

    N, K = 96, 256
    new: Any = {"device": device}
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    kinds = [
        ("int4", 32, False, 1), ("int4", 128, False, 2), ("uint4", 32, True, 1), ("int4", 0, False, 1),
        ("int8", 0, False, 1), ("int8", 64, False, 2), ("fp8_e4m3", 0, False, 1), ("fp8_e5m2", 0, False, 1),
    ]  # fmt: skip
    kinds += [("fp8_e4m3_native", 0, False, 1), ("fp8_e5m2_native", 0, False, 2)] if native else []
    for kind, group, zeros, splits in kinds if every else kinds[1::3]:
        scales = torch.rand(*((N, K // group) if group else (N,)), dtype=torch.float16, **new) * 0.01 + 0.01
        off = torch.randint(0, 15, scales.shape, dtype=torch.int8, **new) if zeros else None
        if kind.startswith("fp8"):
            codes = torch.randint(0, 0x78, (N, K), dtype=torch.uint8, **new)
            values = torch.from_numpy(
                fp8_values(codes.cpu().numpy(), kind.removesuffix("_native")).astype(np.float32)
            ).to(device)
            weight = codes
            scales = scales.float() / values.std()  # such values reach 57,344
        elif kind == "int8":
            weight = torch.randint(-127, 128, (N, K), dtype=torch.int8, **new)
            values = weight.float()
        else:
            low = 0 if kind == "uint4" else -8
            whole = torch.randint(low, low + 16, (N, K), **new)
            weight = ((whole[:, ::2] & 15) | ((whole[:, 1::2] & 15) << 4)).to(torch.uint8)
            values = whole.float()

        def spread(each: torch.Tensor, group: int = group) -> torch.Tensor:
            return each.float().repeat_interleave(group, 1) if group else each.float()[:, None]

        values = (values - (spread(off) if off is not None else 0)) * spread(scales)
        bias = torch.randn(N, dtype=dtype, **new)
        x = torch.randn(5, K, dtype=dtype, **new)
        exact = x.float() @ values.T + bias.float()
        got = weight_only(x, weight, scales, kind, zeros=off, bias=bias, splits=splits)
        form = f"groups of {group}" if group else "by channel"
        yield f"product {kind}, {form}{', zeros' if zeros else ''}, {splits} of K", _error(got, exact), _BOUND


def _sampling(device: torch.device, count: int, size: int) -> Iterator[Check]:
    """Shares of rows whose token is another than the reference's: a random number may fall on an edge."""
    from plugins.sampling import torch_kernel
    from plugins.sampling.reference import distribution, pick
    from runtime import philox

    rng = np.random.default_rng(2)
    settings = [
        (1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (0.5, 0, 0.6, 0.0), (0.9, 0, 1.0, 0.1), (0.6, 40, 0.9, 0.05),
        (0.0, 0, 1.0, 0.0),
    ] * (count // 6)  # fmt: skip
    logits = (rng.standard_normal((len(settings), size)) * 3).astype(np.float32)
    target = [distribution(row, *each) for row, each in zip(logits, settings, strict=True)]

    def draws(count: int) -> torch_kernel.Draws:
        numbers = (torch.arange(count, dtype=kind, device=device) for kind in (torch.int64, torch.int32, torch.int32))
        return torch_kernel.Draws(*numbers)

    def rows(temperatures: list[float]) -> torch_kernel.SamplingRows:
        columns = [temperatures, *([each[i] for each in settings] for i in (1, 2, 3))]
        kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
        return torch_kernel.SamplingRows(
            *(torch.tensor(column, dtype=kind, device=device) for column, kind in zip(columns, kinds, strict=True))
        )

    given = torch.from_numpy(logits).to(device)
    temperatures = [each[0] for each in settings]
    got = torch_kernel.sample(given, rows(temperatures), draws(len(settings))).cpu().tolist()
    expected = [
        pick(p, philox.uniform(i, i, i), "chunked" if each[1:] == (0, 1.0, 0.0) and each[0] else "down")
        for i, (p, each) in enumerate(zip(target, settings, strict=True))
    ]
    yield "sample: other tokens", float(np.mean(np.array(got) != expected)), 0.05

    drawn = [i for i, each in enumerate(settings) if each[0] > 0]
    drafts = [0.5 * target[i] + 0.5 * rng.dirichlet(np.full(size, 0.1)) for i in drawn]
    tokens = [int(rng.choice(size, p=q / q.sum())) for q in drafts]
    expected = []
    for i, q, token in zip(drawn, drafts, tokens, strict=True):
        stays = philox.uniform(i, i, i, philox.ACCEPT_STREAM) * q[token] < target[i][token]
        residual = np.maximum(target[i] - q, 0)
        expected.append(token if stays else pick(residual, philox.uniform(i, i, i, philox.RESIDUAL_STREAM), "up"))
    i32: Any = {"dtype": torch.int32, "device": device}
    found = torch.full((len(settings),), -7, **i32)
    ids = [np.flatnonzero(q) for q in drafts]
    probs = np.concatenate([q[i] for q, i in zip(drafts, ids, strict=True)])
    torch_kernel.verify(
        given, rows([-1.0] * len(settings)), draws(len(settings)),
        torch_kernel.Drafts(
            torch.tensor(drawn, **i32), torch.tensor(tokens, **i32),
            torch.tensor([temperatures[i] for i in drawn], dtype=torch.float32, device=device),
            torch.tensor(np.cumsum([0, *map(len, ids)]), **i32), torch.tensor(np.concatenate(ids), **i32),
            torch.tensor(probs, dtype=torch.float32, device=device),
        ), found,
    )  # fmt: skip
    yield "verify: other tokens", float(np.mean(found.cpu().numpy()[drawn] != expected)), 0.05

    chosen = torch.randint(0, size, (len(settings),), **i32)
    scores = torch_kernel.score(given, chosen, torch.full((len(settings),), 5, **i32))
    peak, total, value = (column.double().cpu().numpy() for column in scores.stats.unbind(1))
    exact = torch.log_softmax(given.double(), -1).gather(1, chosen.long()[:, None])[:, 0].cpu().numpy()
    yield "score: log probability", float(np.abs(value - peak - np.log(total) - exact).max()), 1e-4
    top = given.topk(5).indices.int()
    yield "score: other likeliest", float((scores.top_ids[:, :5] != top).float().mean()), 0.0
