"""Rounding to nearest: every scheme's error bound, saturation, zeros and extremes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from builder.quantization.rounding import quantize
from builder.quantization.scheme import Scheme, scheme_of
from builder.recipe import WeightOverride, WeightsConfig
from runtime.errors import BuildError
from zoo.quantized import RANGES, concatenate, pack4, unpack4

SCHEMES = [
    Scheme(dtype, group, symmetric)
    for dtype, symmetric in (("int8", True), ("int8", False), ("int4", True), ("int4", False), ("fp8", True))
    for group in (None, 4)
]
WEIGHTS = arrays(np.float32, (3, 8), elements=st.floats(-1e4, 1e4, width=32))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=60, deadline=None)
@given(weight=WEIGHTS)
def test_values_lie_within_half_a_step(scheme: Scheme, weight: np.ndarray) -> None:
    found = quantize(weight, scheme)
    assert found.format == scheme.format(8)
    assert (found.scale > 0).all()
    if scheme.kind in RANGES:
        low, high = RANGES[scheme.kind]
        assert low <= found.values.min()
        assert found.values.max() <= high
        if found.zero is not None:
            assert low <= found.zero.min()
            assert found.zero.max() <= high
    error = np.abs(found.dequantize() - weight)
    step = np.repeat(found.scale, found.group, 1)
    if scheme.dtype == "fp8":  # 3 bits of mantissa; below the smallest normal number half of the smallest step
        assert (error <= np.maximum(np.abs(weight) / 16, step * 2.0**-10) * 1.001 + step * 1e-3).all()
        return
    # Rounding, and what the ends lose: a scale rounded to f16 is off by 2^-11, and the zero point is rounded too.
    reach = 15 if scheme.dtype == "int4" else 255
    assert (error <= step * (0.5 + reach * 2.0**-10 + (0.5 if found.zero is not None else 0))).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_stay_zero_and_weights_on_the_grid_stay_as_they_are(scheme: Scheme) -> None:
    zeros = np.zeros((2, 8), np.float32)
    np.testing.assert_array_equal(quantize(zeros, scheme).dequantize(), zeros)
    rng = np.random.default_rng(0)
    once = quantize(rng.standard_normal((4, 8)).astype(np.float32), scheme)
    if scheme.symmetric and scheme.dtype == "int8":
        np.testing.assert_allclose(quantize(once.dequantize(), scheme).dequantize(), once.dequantize(), rtol=1e-6)


def test_int8_uses_127_levels_each_way() -> None:
    weight = np.array([[0, 0, 0, 0], [1, -2, 0.5, 0]], np.float32)
    found = quantize(weight, Scheme("int8"))
    assert found.scale[0, 0] == 1
    np.testing.assert_array_equal(found.values, [[0, 0, 0, 0], [64, -127, 32, 0]])


def test_no_scale_is_denormal() -> None:
    for scheme in SCHEMES:
        found = quantize(np.full((1, 8), 1e-41, np.float32), scheme)
        assert (found.scale >= np.finfo(np.float32).tiny).all()


def test_packing_is_exact() -> None:
    rng = np.random.default_rng(0)
    signed, unsigned = rng.integers(-8, 8, (3, 10), np.int8), rng.integers(0, 16, (3, 10), np.uint8)
    np.testing.assert_array_equal(unpack4(pack4(signed), signed=True), signed)
    np.testing.assert_array_equal(unpack4(pack4(unsigned), signed=False), unsigned)


def test_weights_side_by_side_are_what_they_were() -> None:
    rng = np.random.default_rng(0)
    parts = [quantize(rng.standard_normal((n, 8)).astype(np.float32), Scheme("int4", 4, False)) for n in (2, 3)]
    whole = concatenate(parts).dequantize()
    np.testing.assert_array_equal(whole, np.concatenate([part.dequantize() for part in parts]))


def test_overrides_apply_first_match_first_and_keep_what_they_do_not_say() -> None:
    weights = WeightsConfig(
        dtype="int4",
        group_size=64,
        overrides=(
            WeightOverride(match="*.down_proj.weight", dtype="int8"),
            WeightOverride(match="*.0.*", symmetric=True),
            WeightOverride(match="*proj*", group_size="channel"),
        ),
        skip=("*.k_proj.*",),
    )
    assert scheme_of(weights, ["a.0.down_proj.weight"]) == Scheme("int8", None, True)
    assert scheme_of(weights, ["a.0.up_proj.weight"]) == Scheme("int4", 64, True)
    assert scheme_of(weights, ["a.1.up_proj.weight"]) == Scheme("int4", None, False)
    assert scheme_of(weights, ["other"]) == Scheme("int4", 64, False)
    assert scheme_of(weights, ["qkv", "a.q_proj.weight", "a.k_proj.weight"]) == Scheme("f32")
    assert scheme_of(weights, ["lm_head.weight"], wide=True) == Scheme("int8")
    assert scheme_of(weights, ["lm_head.0.weight"], wide=True) == Scheme("int4", 64, True)


def test_groups_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(BuildError, match=r"576 columns.*groups of 128.*32, 64, channel"):
        Scheme("int4", 128).check("w", 576)
