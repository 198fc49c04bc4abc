"""The microbenchmark of attention: what it runs is what it says."""

from __future__ import annotations

import numpy as np
import pytest
from native_library import require_native

from bench.attention_kernels import FORMATS, Case, make_steps

require_native()


@pytest.mark.parametrize("kv", FORMATS)
def test_steps_compute_finite_numbers_over_caches_of_their_own(kv: str) -> None:
    case = Case("tiny", 2, 40, 3, 4, 2, 64)
    steps, read = make_steps(case, kv, total=1)
    assert len(steps) == 2
    first, second = (step.run(threads=2) for step in steps)
    assert first.shape == (6, 4 * 64)
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    assert np.abs(first).max() > 0
    assert not np.array_equal(first, second)
    bf16_bytes = 2 * 43 * 2 * 2 * 64 * 2
    assert read / bf16_bytes == pytest.approx(
        {"f32": 2, "f16": 1, "bf16": 1, "int8": 0.516, "int8:int4": 0.414, "int4": 0.3125}.get(kv, 0.516), abs=1e-3
    )
