"""KV cache formats: what a cell keeps of a vector, what it refuses, and what attention makes of it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import dense_attention, make_case

from plugins.paged_attention.kv_formats import (
    DTYPES,
    SMALLEST_SCALE,
    KvFormat,
    bf16_bits,
    bf16_bits_down,
    bf16_values,
    fp8_bits,
    fp8_values,
    rotate,
    scale_bits,
)
from plugins.paged_attention.reference import reference

FORMATS = [
    *(KvFormat(dtype) for dtype in DTYPES if dtype != "int4"),
    *(KvFormat("int4", group, zero) for group in (32, 64) for zero in (True, False)),
    KvFormat("fp8_e4m3", static_scale=0.02),
    KvFormat("fp8_e5m2", static_scale=0.02),
]
PACKED = [form for form in FORMATS if form.packed]


def name(form: KvFormat) -> str:
    extra = f"-{form.group_size}{'z' if form.zero_point else ''}" if form.dtype == "int4" else ""
    return form.dtype + extra + ("-static" if form.static_scale else "")


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    """f32 [n, D] of any magnitude, with outliers, zeros and denormals among the elements."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((draw(st.integers(1, 5)), draw(st.sampled_from([2, 8, 32, 40, 64, 100, 128]))))
    x *= 10.0 ** draw(st.integers(-44, 30))
    x[rng.random(x.shape) < draw(st.sampled_from([0, 0.1]))] *= 100
    x[rng.random(x.shape) < draw(st.sampled_from([0, 0.5, 1]))] = 0
    return x.astype(np.float32)


def error_bound(form: KvFormat, x: np.ndarray) -> np.ndarray:
    """What rounding may lose of each element."""
    magnitude = np.abs(x).astype(np.float64)
    if form.dtype == "f32":
        return np.zeros_like(magnitude)
    if form.dtype in ("f16", "bf16"):
        bits, tiny, largest = (11, 2.0**-25, 65504.0) if form.dtype == "f16" else (8, 2.0**-134, 3.39e38)
        return np.maximum(magnitude * 2.0**-bits, tiny) + np.maximum(magnitude - largest, 0)
    flushed = (58000 if form.dtype == "fp8_e5m2" else 600) * float(SMALLEST_SCALE) + 1e-44
    up = 1 + 1 / 128  # scales are rounded up
    if form.dtype == "int8":
        return magnitude.max(-1, keepdims=True) / 127 * 0.5001 * up + flushed
    if form.dtype == "int4":
        bound = np.empty_like(magnitude)
        for start in range(0, x.shape[-1], form.group_size):
            group = np.s_[..., start : start + form.group_size]
            part = x[group].astype(np.float64)
            extreme = np.abs(part).max(-1, keepdims=True)
            # The minimum is rounded down; without a zero point 7 steps reach the other side, of 8.
            span = part.max(-1, keepdims=True) - part.min(-1, keepdims=True) + extreme / 128
            bound[group] = (span / 15 * 0.5001 if form.zero_point else extreme / 8 * 1.0001) * up
        return bound + flushed + magnitude.max() * 1e-6
    mantissa, largest, smallest = (3, 448.0, 2.0**-9) if form.dtype == "fp8_e4m3" else (2, 57344.0, 2.0**-16)
    scale = form.static_scale or magnitude.max(-1, keepdims=True) / largest * up
    clipped = np.maximum(magnitude - largest * scale, 0) if form.static_scale else 0
    return np.maximum(magnitude * 2.0 ** -(mantissa + 1), smallest * scale / 2) * 1.001 + flushed + clipped


@pytest.mark.parametrize("form", FORMATS, ids=name)
@settings(max_examples=60, deadline=None)
@given(x=vectors())
def test_round_trip_stays_within_what_rounding_loses(form: KvFormat, x: np.ndarray) -> None:
    codes, scales = form.encode(x)
    assert codes.shape == x.shape
    assert scales.shape == (*x.shape[:-1], form.scale_count(x.shape[-1]))
    y = form.decode(codes, scales)
    assert y.dtype == np.float32
    assert (np.abs(y.astype(np.float64) - x) <= error_bound(form, x)).all()


@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_zeros_and_denormals(form: KvFormat) -> None:
    zeros = np.zeros((2, 64), np.float32)
    np.testing.assert_array_equal(form.decode(*form.encode(zeros)), zeros)
    denormals = np.full((1, 64), 1e-42, np.float32)
    denormals[0, ::2] *= -1
    y = form.decode(*form.encode(denormals))
    assert np.isfinite(y).all()
    assert np.abs(y).max() <= 2.0**-125


@pytest.mark.parametrize("form", PACKED, ids=name)
def test_extremes_of_a_vector_are_kept_and_nothing_overflows(form: KvFormat) -> None:
    x = np.array([[8e37, -8e37, 1.0, 0.0] * 16, [1e-30, 5e-31, 0, 0] * 16, [7.0, -7.0, 6.9, 0] * 16], np.float32)
    y = form.decode(*form.encode(x))
    assert np.isfinite(y).all()
    if not form.static_scale:
        np.testing.assert_allclose(y.max(-1), x.max(-1), rtol=0.14)  # the coarsest: a step of eight
        np.testing.assert_allclose(y.min(-1), x.min(-1), rtol=0.14)


@pytest.mark.parametrize(("dtype", "largest"), [("fp8_e4m3", 448), ("fp8_e5m2", 57344)])
def test_static_scales_saturate(dtype: str, largest: float) -> None:
    form = KvFormat(dtype, static_scale=0.5)
    x = np.array([[1e6, -1e6, 0.25, 1.0]], np.float32)
    np.testing.assert_array_equal(form.decode(*form.encode(x)), [[largest / 2, -largest / 2, 0.25, 1.0]])


def test_f16_saturates() -> None:
    np.testing.assert_array_equal(KvFormat("f16").encode(np.float32([[1e6, -1e6]]))[0], [[65504, -65504]])


@pytest.mark.parametrize("form", FORMATS, ids=name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_or_poisons_its_own_cell(form: KvFormat, bad: float) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 5] = bad
    with pytest.raises(ValueError, match="cannot hold NaN or infinity"):
        form.encode(x)
    y = form.decode(*form.encode(x, poison=True))
    assert not np.isfinite(y[1, 5]) or form.dtype == "f16"  # f16 saturates infinity
    if form.packed:
        assert np.isnan(y[1]).all()
    np.testing.assert_allclose(y[[0, 2]], 1, rtol=0.1)


@pytest.mark.parametrize("form", FORMATS, ids=name)
@pytest.mark.parametrize("head_size", [8, 40, 64, 128])
def test_pages_keep_each_cell_and_its_scales(form: KvFormat, head_size: int) -> None:
    """Cells are independent, and a copied block is the block."""
    rng = np.random.default_rng(head_size)
    cache = form.empty_cache(5, 2, 32, head_size)
    assert cache.shape == (5, 2, 32 * form.cell_bytes(head_size))
    x = rng.standard_normal((40, 2, head_size)).astype(np.float32)
    places = rng.permutation(3 * 32)[:40]
    form.write(cache, places // 32, places % 32, x, 32)
    cache[4] = cache[1]
    read = form.read(cache, np.arange(5), 32, head_size)
    for place, vector in zip(places, x, strict=True):
        expected = form.decode(*form.encode(vector))
        np.testing.assert_array_equal(read[place // 32, :, place % 32], expected)
    np.testing.assert_array_equal(read[4], read[1])
    np.testing.assert_array_equal(read[3], 0)


@pytest.mark.parametrize(
    ("form", "share"),
    [(KvFormat("int8"), 0.54), (KvFormat("fp8_e4m3"), 0.54), (KvFormat("fp8_e5m2"), 0.54)]
    + [(KvFormat("int4", group, zero), 0.32) for group in (32, 64) for zero in (True, False)],
    ids=lambda value: name(value) if isinstance(value, KvFormat) else "",
)
@pytest.mark.parametrize("head_size", [64, 128, 256])
def test_bytes_a_token_against_bf16(form: KvFormat, share: float, head_size: int) -> None:
    assert form.cell_bytes(head_size) <= share * KvFormat("bf16").cell_bytes(head_size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3",), "KV dtype 'int3' is unknown"),
        (("int4", 16), "group size 16"),
        (("int8", 32, True, 0.5), "static scale 0.5 of int8"),
        (("fp8_e4m3", 32, True, -1.0), "static scale -1.0"),
    ],
)
def test_formats_that_do_not_exist_are_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KvFormat(*arguments)


def test_an_odd_head_has_no_int4_cell() -> None:
    with pytest.raises(ValueError, match="even head size, not 7"):
        KvFormat("int4").cell_bytes(7)


@pytest.mark.parametrize(
    ("dtype", "other", "largest"),
    [("fp8_e4m3", ml_dtypes.float8_e4m3fn, 448), ("fp8_e5m2", ml_dtypes.float8_e5m2, 57344)],
)
def test_fp8_numbers_are_the_standards(dtype: str, other: type, largest: float) -> None:
    every = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(fp8_values(every, dtype), every.view(other).astype(np.float32))
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(20000) * np.exp(rng.uniform(-14, 9, 20000))).astype(np.float32).clip(-largest, largest)
    np.testing.assert_array_equal(fp8_bits(x, dtype), x.astype(other).view(np.uint8))
    middles = (fp8_values(every[:119], dtype) + fp8_values(every[1:120], dtype)) / 2  # ties
    np.testing.assert_array_equal(fp8_bits(middles, dtype), middles.astype(other).view(np.uint8))


def test_bf16_numbers() -> None:
    x = np.concatenate([np.random.default_rng(0).standard_normal(5000), [0, 1e-40, np.inf, -np.inf]]).astype(np.float32)
    np.testing.assert_array_equal(bf16_bits(x), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.isnan(bf16_values(bf16_bits(np.float32([np.nan])))).all()
    np.testing.assert_array_equal(bf16_values(bf16_bits(np.float32([3.4e38]))), bf16_values(np.uint16([0x7F7F])))
    finite = x[np.isfinite(x)]
    down = bf16_values(bf16_bits_down(finite))
    assert (down <= finite).all()
    assert (finite - down <= np.abs(finite) / 128 + 2e-38).all()
    up = bf16_values(scale_bits(np.abs(finite)))
    assert ((up >= np.abs(finite)) | (np.abs(finite) < SMALLEST_SCALE)).all()


@pytest.mark.parametrize("size", [1, 8, 40, 64, 96, 128])
def test_rotation_is_orthonormal_and_its_own_inverse(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((5, size)).astype(np.float32)
    np.testing.assert_allclose(rotate(rotate(x)), x, atol=1e-5)
    np.testing.assert_allclose(rotate(x) @ rotate(x).T, x @ x.T, atol=1e-4)


def test_rotation_spreads_an_outlier() -> None:
    x = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
    x[:, 7] = 30
    form = KvFormat("int4")
    plain = form.decode(*form.encode(x)) - x
    rotated = rotate(form.decode(*form.encode(rotate(x)))) - x
    assert np.square(rotated).mean() < 0.6 * np.square(plain).mean()


# Bounds: about twice the largest error seen over these cases (standard normal keys and values).
ATTENTION_ERROR = {
    "f32": 5e-6,
    "f16": 2e-3,
    "bf16": 0.015,
    "int8": 0.03,
    "fp8_e4m3": 0.15,
    "fp8_e5m2": 0.3,
    "int4": 0.5,
}


@pytest.mark.parametrize("form", [form for form in FORMATS if not form.static_scale], ids=name)
@pytest.mark.parametrize("rotation", ["none", "key", "both"])
def test_attention_error_against_f32(form: KvFormat, rotation: str) -> None:
    case = make_case([(0, 40), (33, 5), (90, 1)], head_size=64, block_size=16)
    for part, size in (("key", "head_size"), ("value", "v_head_size")):
        cache = case.inputs[f"{part}_cache"]
        pages = form.empty_cache(len(cache), cache.shape[1], 16, case.attributes[size])
        cells = np.arange(16)
        for block, content in enumerate(cache):
            vectors = content.swapaxes(0, 1)
            turned = rotate(vectors) if rotation in (part, "both") else vectors
            form.write(pages, np.full(16, block), cells, turned, 16)
        case.inputs[f"{part}_cache"] = pages
    out = reference(**case.inputs, **case.attributes, key_format=form, value_format=form, rotate=rotation)
    assert np.abs(out - dense_attention(case)).max() < ATTENTION_ERROR[form.dtype]


@pytest.mark.parametrize("form", FORMATS, ids=name)
def test_a_rollback_leaves_nothing_behind(form: KvFormat) -> None:
    """Rejected tokens, then the accepted ones in their cells: to the bit as if nothing had been tried."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((50, 2, 64)).astype(np.float32)
    clean, tried = (form.empty_cache(3, 2, 32, 64) for _ in range(2))
    places = np.arange(50)
    form.write(tried, places[30:50] // 32, places[30:50] % 32, 40 * x[::-1][:20], 32)
    for cache in (clean, tried):
        form.write(cache, places // 32, places % 32, x, 32)
    np.testing.assert_array_equal(tried, clean)
