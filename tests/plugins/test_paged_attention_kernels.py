"""The C++ PagedAttention kernels, called directly, on every instruction set of this machine, against the reference."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import require_native
from paged_cases import make_case

from plugins.paged_attention.cpu_layout import to_cpu
from plugins.paged_attention.kv_formats import KvFormat, rotate
from plugins.paged_attention.native import formats, refusal, scalars
from plugins.paged_attention.native import settings as node_settings
from plugins.paged_attention.native_library import ISAS, MissingIsaError, attention
from plugins.paged_attention.reference import reference

require_native()

KV_DTYPES = ("f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
FP8 = ("fp8_e4m3", "fp8_e5m2")
AMX_FLOATS = ("bf16", *FP8)
# A prompt, a decode, a chunk on top of a past, a verification of two tokens, a long prompt, no new token, splits.
MIXED = [(0, 7), (40, 1), (33, 5), (64, 2), (0, 100), (9, 0), (600, 1), (511, 3), (230, 60)]


class Packed:
    """A case whose caches are pages, in the reference's order and in the kernels'."""

    def __init__(self, sequences: list[tuple[int, int]], *, kv: str = "f32", rotation: str = "none", **kwargs: Any):
        extras = {name: kwargs.pop(name) for name in ("group_size", "key_scale", "value_scale") if name in kwargs}
        self.case = make_case(sequences, block_size=32, **kwargs)
        self.attributes = {**self.case.attributes, "kv_dtype": kv, "rotate": rotation, **extras}
        self.formats = dict(zip(("key", "value"), formats(self.attributes), strict=True))
        self.sizes = {"key": self.attributes["head_size"], "value": self.attributes["v_head_size"]}
        self.pages = {part: self._pages(part, rotation) for part in ("key", "value")}

    def _pages(self, part: str, rotation: str) -> np.ndarray:
        """The past's cells; every byte that belongs to nobody is 0xFF: NaN for floats and for scales."""
        form, size = self.formats[part], self.sizes[part]
        inputs = self.case.inputs
        dense = self.case.dense_keys if part == "key" else self.case.dense_values
        blocks, heads = inputs["key_cache"].shape[:2]
        pages = np.full((blocks, heads, 32 * form.cell_bytes(size)), 0xFF, np.uint8)
        for b, past in enumerate(inputs["past_lens"].tolist()):
            table = inputs["block_ids"][inputs["block_starts"][b] :]
            positions = np.arange(past)
            vectors = dense[b][:past]
            if rotation in (part, "both"):
                vectors = rotate(vectors)
            form.write(pages, table[positions // 32], positions % 32, vectors, 32)
        return pages

    def expected(self) -> np.ndarray:
        """The reference's result; its pages are written, as the kernels' will be."""
        inputs = {**self.case.inputs, "key_cache": self.pages["key"], "value_cache": self.pages["value"]}
        attributes = {**self.case.attributes, "rotate": self.attributes["rotate"]}
        return reference(**inputs, **attributes, key_format=self.formats["key"], value_format=self.formats["value"])

    def cpu_pages(self, part: str) -> np.ndarray:
        return to_cpu(self.formats[part], self.pages[part], self.sizes[part], key=part == "key")

    def run(self, **options: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The kernels' result and the pages that they leave."""
        pages = {part: self.cpu_pages(part) for part in ("key", "value")}
        inputs = {**self.case.inputs, "key_cache": pages["key"], "value_cache": pages["value"]}
        return attention(inputs, self.attributes, **options), pages

    def check(self, tolerance: float | None = None, isas: tuple[str, ...] = ISAS) -> np.ndarray:
        """The result of each instruction set is the reference's within `tolerance`, and the same bits as the others'.

        AMX adds the products of floats in an order of its own.

        Integer formats round queries and weights to 15 bits, FP8 to bf16's 8, which is far below what their cells lost
        (of e4m3 a sixteenth).
        """
        results = {}
        if tolerance is None:
            dtypes = {form.dtype for form in self.formats.values()}
            tolerance = 6e-3 if dtypes & set(FP8) else 3e-4 if dtypes & {"int8", "int4"} else 2e-5
        for isa in isas:
            with contextlib.suppress(MissingIsaError):
                results[isa] = self.run(isa=isa, threads=2)
        expected = self.expected()
        scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
        for isa, (out, pages) in results.items():
            for part, cells in pages.items():
                np.testing.assert_array_equal(cells, self.cpu_pages(part), err_msg=f"{isa}: {part} cells")
            np.testing.assert_allclose(out, expected, atol=tolerance * scale, rtol=0, err_msg=isa)
            if isa != "amx" or not any(form.dtype in AMX_FLOATS for form in self.formats.values()):
                np.testing.assert_array_equal(out, results["portable"][0], err_msg=isa)
        return expected


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("head_size", [64, 128, 8, 40, 100])
def test_formats_and_head_sizes(kv: str, head_size: int) -> None:
    Packed(MIXED, kv=kv, head_size=head_size).check()


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8", "int4", "fp8_e4m3"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (9, 3), (14, 2), (32, 1), (71, 1)])
def test_heads(kv: str, num_heads: int, num_kv_heads: int) -> None:
    Packed([(40, 1), (0, 70), (300, 4)], kv=kv, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=64).check()


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(
    "extras",
    [
        {"sliding_window": 33},
        {"sliding_window": 300},
        {"softcap": 3.0},
        {"sinks": True},
        {"alibi": True},
        {"alibi": True, "sliding_window": 40, "softcap": 5.0, "sinks": True},
        {"head_size": 96, "v_head_size": 64},
        {"rotation": "key"},
        {"rotation": "both", "head_size": 80},
    ],
    ids=lambda extras: "-".join(extras),
)
def test_variants(kv: str, extras: dict[str, Any]) -> None:
    Packed(MIXED, kv=kv, num_heads=8, **{"head_size": 64, **extras}).check()


@pytest.mark.parametrize("kv", ["int8:int4", "f16:int8", "bf16:fp8_e4m3", "int4:f32"])
@pytest.mark.parametrize("group_size", [32, 64])
def test_keys_and_values_apart(kv: str, group_size: int) -> None:
    Packed(MIXED, kv=kv, head_size=128, group_size=group_size).check()


@pytest.mark.parametrize("kv", ["fp8_e4m3", "fp8_e5m2"])
def test_static_scales(kv: str) -> None:
    Packed(MIXED, kv=kv, head_size=64, key_scale=0.01, value_scale=0.02).check()


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), min_size=1, max_size=5),
    group=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([16, 32, 64, 96]),
    kv=st.sampled_from(KV_DTYPES),
    window=st.sampled_from([0, 1, 31, 32, 64, 200]),
    softcap=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 999),
    rotation=st.sampled_from(["none", "value"]),
    **{name: st.booleans() for name in ("sinks", "alibi")},
)
def test_any_batch(sequences: list, group: int, num_kv_heads: int, window: int, **kwargs: Any) -> None:
    heads = {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads}
    # int4: where one token has most of the weight, the others' codes, up to 15 of them a level, add their rounding.
    tolerance = 1e-3 if kwargs["kv"] == "int4" else None
    isas = ("portable", "avx512", "avx512_bf16", "amx")
    Packed(sequences, sliding_window=window, **heads, **kwargs).check(tolerance, isas=isas)


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("extras", [{}, {"sliding_window": 100, "sinks": True, "rotation": "both"}])
def test_same_bits_whatever_the_batch_the_chunk_and_the_threads(kv: str, extras: dict[str, Any]) -> None:
    """A prompt of 700 tokens in one go equals itself in chunks, by single tokens, beside others, on any threads."""
    whole = Packed([(0, 700)], kv=kv, num_heads=6, num_kv_heads=2, head_size=64, **extras)
    expected, _ = whole.run(threads=1)
    np.testing.assert_array_equal(whole.run(threads=2)[0], expected)
    inputs = whole.case.inputs
    for chunks in ([1, 699], [256, 256, 188], [333, 1, 1, 30, 335], [690] + [1] * 10):
        pages = {f"{part}_cache": np.full_like(whole.pages[part], 0xFF) for part in ("key", "value")}
        done = 0
        for count in chunks:
            rows = slice(done, done + count)
            step = {
                **inputs,
                **pages,
                **{name: inputs[name][rows] for name in ("query", "key", "value")},
                "past_lens": np.array([done, 7], np.int32),
                "query_starts": np.array([0, count, count], np.int32),  # beside it one that does nothing
                "block_starts": np.array([0, len(inputs["block_ids"]), len(inputs["block_ids"])], np.int32),
            }
            threads = 1 + count % 2
            np.testing.assert_array_equal(attention(step, whole.attributes, threads=threads), expected[rows])
            done += count


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_rollback_leaves_nothing_behind(kv: str) -> None:
    """Verification of six tokens of which none is accepted, then others in their place: as if never tried."""
    packed = Packed([(40, 6)], kv=kv, head_size=64)
    fresh, fresh_pages = packed.run()
    pages = {part: packed.cpu_pages(part) for part in ("key", "value")}
    inputs = {**packed.case.inputs, "key_cache": pages["key"], "value_cache": pages["value"]}
    noise = {name: 9 * np.flip(inputs[name], 0) for name in ("key", "value")}
    attention({**inputs, **noise}, packed.attributes)
    np.testing.assert_array_equal(attention(inputs, packed.attributes), fresh)
    for part, cells in pages.items():
        np.testing.assert_array_equal(cells, fresh_pages[part])


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_finite_stays_in_its_own_sequence(kv: str, bad: float, where: str) -> None:
    packed = Packed([(50, 4), (20, 3), (0, 70)], kv=kv, head_size=64)
    isas = (None, "portable")
    cleans = [packed.run(isa=isa)[0] for isa in isas]
    packed.case.inputs[where][1, 5] = bad  # the first sequence's second new token
    for isa, clean in zip(isas, cleans, strict=True):
        out, _ = packed.run(isa=isa)
        np.testing.assert_array_equal(out[4:], clean[4:])
        if kv == "f16" and bad == np.inf and where != "query":
            continue  # saturated to the largest number
        assert not np.isfinite(out[1 if where == "query" else 3]).all()
        if where == "query":
            np.testing.assert_array_equal(out[[0, 2, 3]], clean[[0, 2, 3]])


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("factor", [1e-20, 1e-3, 30.0])
def test_extreme_scores(kv: str, factor: float) -> None:
    """Softmax from all alike to one of all, and values near the smallest numbers."""
    packed = Packed([(90, 2), (0, 40)], kv=kv, head_size=64)
    packed.case.inputs["query"] *= np.float32(factor)
    # Scores of hundreds are no closer than bf16 queries are.
    packed.check(tolerance=None if factor < 1 else 0.1 if kv in FP8 else 3e-3)


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_denormals_are_kept_in_cells_and_count_as_zero_whatever_the_thread_does_with_them(kv: str) -> None:
    torch = pytest.importorskip("torch")
    packed = Packed([(40, 1), (0, 70), (600, 2)], kv=kv, head_size=64)
    packed.case.inputs["key"] *= np.float32(1e-38)
    packed.case.inputs["value"][1:] = np.float32(-1e-40)
    out, pages = packed.run()
    packed.expected()
    for part in pages:
        np.testing.assert_array_equal(pages[part], packed.cpu_pages(part))
    lowest = 2.0**-126 if kv == "int4" else 0  # a group's minimum is rounded down to a normal number
    np.testing.assert_array_less(np.abs(out[1:71]), np.nextafter(np.float32(lowest), np.float32(1), dtype=np.float32))
    assert torch.set_flush_denormal(True)
    try:
        flushed, flushed_pages = packed.run()
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(flushed, out)
    for part, cells in flushed_pages.items():
        np.testing.assert_array_equal(cells, pages[part])


def test_refusals() -> None:
    base = make_case([(0, 1)], block_size=32, head_size=64).attributes
    assert refusal(base) is None
    assert "block size 16" in (refusal({**base, "block_size": 16}) or "")
    assert "head_size 1024" in (refusal({**base, "head_size": 1024}) or "")
    assert "multiple of 4" in (refusal({**base, "v_head_size": 6, "kv_dtype": "f32:int8"}) or "")
    attributes = {**base, "kv_dtype": "int8:int4", "rotate": "both", "softcap": 2.5}
    np.testing.assert_array_equal(node_settings(attributes), [4, 2, 64, 64, 0, 3, 4, 32, 3])
    np.testing.assert_array_equal(scalars(attributes), np.float32([0.125, 2.5, 0, 0]))


def test_pages_in_the_kernels_order_are_the_same_bytes() -> None:
    rng = np.random.default_rng(0)
    for dtype in KV_DTYPES:
        form = KvFormat(dtype)
        pages = rng.integers(0, 256, (3, 2, 32 * form.cell_bytes(64)), np.uint8)
        for key in (True, False):
            moved = to_cpu(form, pages, 64, key=key)
            assert moved.shape == pages.shape
            if dtype != "int4":
                np.testing.assert_array_equal(np.sort(moved, axis=None), np.sort(pages, axis=None))
