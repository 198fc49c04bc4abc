"""`plancast::Linear`: layout, reference and kernels, in every format, on every instruction set of this machine."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_cases import FORMATS, SHAPES, make_weight, make_x

from plugins.linear.native import ISAS, Product, available_isas
from plugins.linear.op import Weight, activation_levels, pack
from plugins.linear.reference import dense, reference

ROWS = (1, 2, 5, 8, 17, 130)


@pytest.fixture(scope="module")
def native() -> Path:
    from plugins.native import NativeBuildError, build_native

    try:
        return build_native()
    except NativeBuildError as error:
        pytest.skip(f"the native library cannot be built here: {error}")


@pytest.mark.parametrize("columns", [1, 2, 576, 1536, 4096, 28672])
def test_no_sum_can_overflow(columns: int) -> None:
    assert 1 <= activation_levels(columns) <= 127 * 256 + 127
    assert activation_levels(columns) * 128 * columns < 2**31


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 70), st.integers(1, 200))
def test_a_packed_weight_has_the_size_of_its_parts(form: tuple, channels: int, columns: int) -> None:
    kind, group, low, _ = form
    weight = make_weight(kind, channels, columns, group, low=low)
    strips, blocks = -(-channels // 32), -(-columns // 32)
    bits = {"int8": 8, "int4": 4, "bf16": 16}[kind]
    header = {"none": 64, "minimum": 128, "zero": 96}[low]
    headers = 0 if weight.scale is None else weight.scale.shape[1] * header
    assert pack(weight).shape == (strips, headers + blocks * 32 * 32 * bits // 8)


def test_scales_keep_f32_where_f16_would_round_them() -> None:
    exact, other = (make_weight("int4", 32, 64, 32, exact_f16=exact) for exact in (True, False))
    assert exact.f16_scale
    assert not other.f16_scale
    assert pack(other).shape[1] - pack(exact).shape[1] == 2 * 64
    large = exact._replace(scale=np.full_like(exact.scale, 1e6))
    assert not large.f16_scale


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (Weight("int8", np.zeros((4, 4), np.int16), np.ones((4, 1), np.float32)), "int8 values must be int8"),
        (Weight("int4", np.full((4, 4), 16, np.uint8), np.ones((4, 1), np.float32)), "within 0..15, and one is 16"),
        (Weight("int8", np.zeros((4, 64), np.int8), np.ones((4, 1), np.float32), group=32), r"scale must be \(4, 2\)"),
        (Weight("int8", np.zeros((4, 64), np.int8), np.ones((4, 4), np.float32), group=16), "a multiple of 32"),
        (Weight("int8", np.zeros((4, 4), np.int8)), "int8 weights have scales"),
    ],
)
def test_what_is_no_weight_is_refused(weight: Weight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(weight)


@pytest.mark.parametrize(("kind", "group", "low", "activations"), FORMATS)
def test_reference_is_near_the_product(kind, group, low, activations) -> None:
    for channels, columns in SHAPES:
        weight = make_weight(kind, channels, columns, group, low=low)
        x = np.random.default_rng(columns).standard_normal((6, columns)).astype(np.float32)
        exact = x.astype(np.float64) @ dense(weight).T
        # Half a level of each activation, times the weight, summed: the bound of rounding.
        relative = {"int8": 1 / 127, "int16": 1 / activation_levels(columns), "bf16": 2**-8, "bf16x2": 2**-16}
        step = np.abs(x).max(axis=1, keepdims=True) * relative[activations]
        bound = 0.51 * step * np.abs(dense(weight)).sum(axis=1) + 1e-5 * np.abs(exact).max() + 1e-6
        assert (np.abs(reference(x, weight, activations) - exact) <= bound).all()


@pytest.mark.parametrize("activations", ["int16", "int8"])
def test_reference_rows_of_zeros_and_not_finite(activations) -> None:
    x = np.ones((5, 8), np.float32)
    x[0] = 0
    x[1, 3] = np.nan
    x[2, 5] = -np.inf
    x[3] = 1e-40
    weight = Weight("int8", np.ones((3, 8), np.int8), np.ones((3, 1), np.float32))
    y = reference(x, weight, activations, np.full(3, 2, np.float32))
    np.testing.assert_array_equal(y[[0, 3]], 2)
    assert np.isnan(y[1:3]).all()
    np.testing.assert_allclose(y[4], 10, rtol=1e-3)


@cache
def expectation(kind, group, low, activations, index: int) -> tuple:
    """A weight of shape `SHAPES[index]`, x, a bias and the reference's y: of the same for every instruction set."""
    channels, columns = SHAPES[index]
    weight = make_weight(kind, channels, columns, group, low=low, exact_f16=index % 2 == 0)
    x = make_x(max(ROWS), columns)
    bias = np.random.default_rng(index).standard_normal(channels).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return weight, x, bias, reference(x, weight, activations, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "group", "low", "activations"), FORMATS)
def test_kernels_equal_the_reference(kind, group, low, activations, isa: str, native: Path) -> None:
    """int8 and int4: to the bit, whatever the instruction set, the threads and the rows beside a row."""
    if isa not in available_isas(native):
        pytest.skip(f"this machine does not have {isa}")
    for index, (channels, columns) in enumerate(SHAPES):
        weight, x, bias, expected = expectation(kind, group, low, activations, index)
        product = Product(native, weight, pack(weight), activations)
        for rows in ROWS if isa != "portable" else (1, 7):
            y = product(x[:rows], bias=bias, threads=1 + rows % 2, isa=isa)
            where = f"{channels} x {columns}, {rows} rows"
            if kind == "bf16":
                usual = np.abs(x[:rows]).max(axis=1) < 1e20  # the hardware has its own rules for what is not finite
                scale = np.abs(x[:rows][usual]) @ np.abs(dense(weight)).T + np.abs(bias)
                assert (np.abs(y[usual] - expected[:rows][usual]) <= 3e-6 * scale + 1e-30).all(), where
            else:
                np.testing.assert_array_equal(y, expected[:rows], err_msg=where)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("kind", "group", "low", "activations"), [form for form in FORMATS if form[0] != "bf16"])
def test_the_largest_sums_fit(kind, group, low, activations, isa: str, native: Path) -> None:
    """Every product at its largest, of either sign: sums of 16 and 32 bits on their way must hold them."""
    if isa not in available_isas(native):
        pytest.skip(f"this machine does not have {isa}")
    weight = make_weight(kind, 32, 160, group, low=low)
    limits = {"int8": (0, 255) if low == "minimum" else (-128, 127), "int4": (0, 15)}[kind]
    values = np.where(np.arange(32)[:, None] % 2, *limits).astype(weight.values.dtype)
    weight = weight._replace(values=np.repeat(values, 160, axis=1))
    x = np.where(np.arange(4)[:, None] % 2, -3.0, 3.0).astype(np.float32).repeat(160, axis=1)
    y = Product(native, weight, pack(weight), activations)(x, isa=isa)
    np.testing.assert_array_equal(y, reference(x, weight, activations))


@pytest.mark.parametrize(("kind", "group", "low", "activations"), FORMATS)
def test_a_row_has_the_same_bits_in_any_batch(kind, group, low, activations, native: Path) -> None:
    weight = make_weight(kind, 96, 192, group, low=low)
    product = Product(native, weight, pack(weight), activations)
    x = np.random.default_rng(3).standard_normal((70, 192)).astype(np.float32)
    whole = product(x, threads=2)
    for rows in (1, 3, 13):
        np.testing.assert_array_equal(product(x[:rows], threads=1), whole[:rows])


def test_a_residual_is_added(native: Path) -> None:
    weight = make_weight("int8", 45, 64, 0)
    product = Product(native, weight, pack(weight), "int16")
    x, residual = (np.random.default_rng(i).standard_normal((9, n)).astype(np.float32) for i, n in ((1, 64), (2, 45)))
    expected = reference(x, weight, "int16") + residual
    np.testing.assert_array_equal(product(x, residual=residual), expected)
    in_place = residual.copy()
    np.testing.assert_array_equal(product(x, residual=in_place, out=in_place), expected)
