"""The Triton kernels of PagedAttention, interpreted on the CPU, against the NumPy reference and the codecs."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the Triton kernels need triton (pip install 'plancast[triton]')")

from paged_cases import make_case  # noqa: E402

from plugins.paged_attention import torch_kernel  # noqa: E402
from plugins.paged_attention.kv_formats import KvFormat  # noqa: E402
from plugins.paged_attention.reference import reference  # noqa: E402
from plugins.paged_attention.torch_kernel import AttentionShape  # noqa: E402

# A prompt, a decode, a sequence without new rows, a verification of four tokens, a decode.
MIXED = [(0, 5), (9, 1), (3, 0), (17, 4), (30, 1)]
FORMATS = {
    "bf16": KvFormat("bf16"),
    "f16": KvFormat("f16"),
    "int8": KvFormat("int8"),
    "fp8_e4m3": KvFormat("fp8_e4m3"),
    "fp8_e5m2": KvFormat("fp8_e5m2"),
    "fp8_static": KvFormat("fp8_e4m3", static_scale=0.0137),
    "int4": KvFormat("int4", zero_point=False),
    "int4z": KvFormat("int4"),
    "int4z_64": KvFormat("int4", group_size=64),
}
TABLES = ("past_lens", "query_starts", "block_ids", "block_starts")


def run_both(sequences, form, value_form=None, *, splits=1, native=False, block_m=None, **shape_of):
    """What the kernels give and what the reference gives, and both sets of caches."""
    case = make_case(sequences, **shape_of)
    a = dict(case.attributes)
    value_form = value_form or form
    shape = AttentionShape(**a, key_format=form, value_format=value_form, native_fp8=native)
    caches = []
    for name, f, size in (("key_cache", form, a["head_size"]), ("value_cache", value_form, a["v_head_size"])):
        blocks = case.inputs[name].shape[0]
        cache = f.empty_cache(blocks, a["num_kv_heads"], a["block_size"], size)
        cells = np.arange(a["block_size"])
        for block in range(blocks):  # also those that nobody owns
            rows = case.inputs[name][block].transpose(1, 0, 2)
            f.write(cache, np.full(len(cells), block), cells, rows, a["block_size"])
        caches.append(cache)
    inputs = {**case.inputs, "key_cache": caches[0].copy(), "value_cache": caches[1].copy()}
    expected = reference(**inputs, **a, key_format=form, value_format=value_form)
    given = {name: torch.from_numpy(np.asarray(value).copy()) for name, value in case.inputs.items()}
    key_cache, value_cache = (torch.from_numpy(cache) for cache in caches)
    tables = [given[name] for name in TABLES]
    torch_kernel.write(shape, given["key"], given["value"], key_cache, value_cache, *tables)
    result = torch_kernel.attention(
        shape, given["query"], key_cache, value_cache, *tables, int(given["max_context_len"]),
        given.get("sinks"), given.get("alibi_slopes"), splits=splits, block_m=block_m, block_n=16,
    )  # fmt: skip
    written = zip((key_cache, value_cache), ("key_cache", "value_cache"), strict=True)
    return result.numpy(), expected, [np.array_equal(mine.numpy(), inputs[name]) for mine, name in written]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"sliding_window": 5, "sinks": True, "softcap": 2.0},
        {"alibi": True, "num_heads": 6, "head_size": 24, "v_head_size": 40},
    ],
    ids=["plain", "window-sinks-softcap", "alibi-odd-sizes"],
)
def test_attends_as_the_reference(attributes, splits):
    result, expected, same = run_both(MIXED, KvFormat("f32"), splits=splits, **attributes)
    assert same == [True, True]
    np.testing.assert_allclose(result, expected, atol=3e-6)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_writes_the_codecs_bits_and_attends_over_them(name):
    result, expected, same = run_both([(9, 1), (6, 3)], FORMATS[name], head_size=64, num_heads=2, num_kv_heads=1)
    assert same == [True, True], "the cells differ from what the codec writes"
    np.testing.assert_allclose(result, expected, atol=2e-5)


def test_key_and_value_formats_may_differ_and_the_hardware_may_convert():
    result, expected, same = run_both(
        [(9, 1), (6, 3)], FORMATS["fp8_e4m3"], FORMATS["int4z"], native=True, head_size=48, v_head_size=96, splits=2
    )
    assert same == [True, True]
    np.testing.assert_allclose(result, expected, atol=2e-5)


def test_a_poisoned_key_stays_in_its_sequence():
    """NaN in one sequence's key makes that sequence NaN and leaves its neighbour alone."""
    case = make_case([(2, 1), (5, 1)])
    a = case.attributes
    form = FORMATS["int8"]
    shape = AttentionShape(**a, key_format=form, value_format=form)
    caches = [
        torch.from_numpy(form.empty_cache(case.inputs["key_cache"].shape[0], 2, a["block_size"], 16)) for _ in range(2)
    ]
    key = torch.from_numpy(case.inputs["key"])
    key[0, 3] = float("nan")
    tables = [torch.from_numpy(case.inputs[name]) for name in TABLES]
    torch_kernel.write(shape, key, torch.from_numpy(case.inputs["value"]), *caches, *tables)
    result = torch_kernel.attention(shape, torch.from_numpy(case.inputs["query"]), *caches, *tables, 6, block_n=16)
    assert result[0, :32].isnan().all()  # the query heads of the first key head
    assert result[0, 32:].isfinite().all()
    assert result[1].isfinite().all()


def test_large_tiles_of_queries_skip_keys_before_the_window():
    """64 rows a tile (a prefill's), and a context that begins several key tiles before the window."""
    result, expected, _ = run_both([(70, 20), (3, 40)], KvFormat("f32"), block_m=64, sliding_window=9)
    np.testing.assert_allclose(result, expected, atol=3e-6)


@pytest.mark.parametrize(("rotary", "interleaved"), [(16, False), (8, False), (12, True)])
def test_rotary_embedding_fused_with_the_write(rotary, interleaved):
    case = make_case([(2, 3), (7, 1)])
    a = case.attributes
    form = FORMATS["bf16"]
    shape = AttentionShape(**a, key_format=form, value_format=form)
    positions = np.concatenate([past + np.arange(new) for past, new in ((2, 3), (7, 1))])
    angles = np.arange(16)[:, None] * 0.3 ** np.arange(rotary // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turned(x, heads):
        x = x.reshape(len(x), heads, -1)
        first = np.arange(0, rotary, 2) if interleaved else np.arange(rotary // 2)
        second = first + 1 if interleaved else first + rotary // 2
        y = x.copy()
        c, s = cos[positions][:, None], sin[positions][:, None]
        y[..., first] = x[..., first] * c - x[..., second] * s
        y[..., second] = x[..., second] * c + x[..., first] * s
        return y.reshape(len(x), -1)

    size = case.inputs["key_cache"].shape[0]
    caches = [torch.from_numpy(form.empty_cache(size, 2, a["block_size"], 16)) for _ in range(2)]
    query, key, value = (torch.from_numpy(case.inputs[name]) for name in ("query", "key", "value"))
    tables = [torch.from_numpy(case.inputs[name]) for name in TABLES]
    result = torch_kernel.write(
        shape, key, value, *caches, *tables, query=query, cos=torch.from_numpy(cos), sin=torch.from_numpy(sin),
        positions=torch.from_numpy(positions), rotary=rotary, interleaved=interleaved,
    )  # fmt: skip
    np.testing.assert_allclose(result.numpy(), turned(case.inputs["query"], 4), atol=1e-6)
    block, cell = case.inputs["block_ids"][case.inputs["block_starts"][1] + 7 // 4], 7 % 4
    rows = form.read(caches[0].numpy(), np.array([block]), a["block_size"], 16)[0, :, cell]
    expected = turned(case.inputs["key"], 2)[3].reshape(2, 16)
    np.testing.assert_allclose(rows, expected, rtol=2**-8)
    # The same out of a merged product, whose rows hold all three.
    parts = torch.cat((query, key, value, torch.full_like(key, 9.0)), 1).split([64, 32, 32, 32], 1)
    others = [torch.from_numpy(form.empty_cache(size, 2, a["block_size"], 16)) for _ in range(2)]
    again = torch_kernel.write(
        shape, *parts[1:3], *others, *tables, query=parts[0], cos=torch.from_numpy(cos), sin=torch.from_numpy(sin),
        positions=torch.from_numpy(positions), rotary=rotary, interleaved=interleaved,
    )  # fmt: skip
    assert torch.equal(again, result)
    assert all(torch.equal(mine, other) for mine, other in zip(others, caches, strict=True))


def test_blocks_are_copied_in_order_and_swapped_out_and_in():
    rng = np.random.default_rng(3)
    caches = [torch.from_numpy(rng.integers(0, 256, (6, 2, size), np.uint8)) for size in (8, 8, 6)]
    before = [cache.clone() for cache in caches]
    copies = [(0, 1), (1, 2), (3, 1), (4, 3)]
    torch_kernel.copy(caches, copies)
    for cache, old in zip(caches, before, strict=True):
        for source, target in copies:
            old[target] = old[source]
        assert torch.equal(cache, old)
    staged = torch_kernel.swap_out(caches, [5, 2])
    assert [tuple(part.shape) for part in staged] == [(2, 2, 16), (2, 1, 12)]
    for cache in caches:
        cache[[0, 4]] = 0
    torch_kernel.swap_in(caches, [4, 0], staged)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[4], old[5])
        assert torch.equal(cache[0], old[2])
