"""The sampler's C++ passes against NumPy: exp and its chunk sums, and the nucleus; on each instruction set."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plugins.native import NativeBuildError, build_native
from plugins.sampling.native import RowKernels, RowPasses
from runtime.sampler import Sampler
from runtime.sampling import rows as rows_module
from runtime.sampling.rows import CHUNK, ChunkedExp, Likeliest
from runtime.sampling.selection import Restriction, candidates, select
from runtime.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def kernels() -> RowKernels:
    try:
        return RowKernels(build_native())
    except NativeBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["native", "numpy"])
def passes(request, kernels, monkeypatch) -> str:
    """Both ways of the same passes, one after the other."""
    monkeypatch.setattr(rows_module, "row_kernels", lambda: kernels if request.param == "native" else None)
    return request.param


def logits(vocab: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000, 4097, 49_152])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1.4427, 8.0])
def test_exp2_and_chunk_sums(kernels, vocab, scale):
    columns = -(-vocab // CHUNK)
    row, values, sums = logits(vocab, vocab), np.empty(vocab, np.float32), np.empty(columns, np.float32)
    total = RowPasses(kernels, values, sums).exp2(row, scale)
    exponent = (row * np.float32(scale)).astype(np.float64)
    expected = np.exp2(exponent)
    expected[exponent < -125.5] = 0.0
    tolerance = 4e-7 + np.abs(exponent).max() * 1e-7  # the f32 product's own rounding
    np.testing.assert_allclose(values, expected, rtol=tolerance, atol=1e-37)
    padded = np.zeros(columns * CHUNK)
    padded[:vocab] = expected
    np.testing.assert_allclose(sums, padded.reshape(CHUNK, columns).sum(0), rtol=tolerance + 1e-5, atol=1e-37)
    assert total == pytest.approx(expected.sum(), rel=tolerance + 1e-5)


def test_exp2_of_what_is_no_plain_number(kernels):
    row = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 127.9, 128.0, 0.0, -0.0, 1e-40], np.float32)
    values, sums = np.empty(row.size, np.float32), np.empty(1, np.float32)
    with np.errstate(over="ignore"):
        RowPasses(kernels, values, sums).exp2(row, 1.0)
        expected = np.exp2(row)
    np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_in_place(kernels):
    row = logits(5000, 1)
    values, sums = row.copy(), np.empty(79, np.float32)
    RowPasses(kernels, values, sums).exp2(values, 1.0)
    np.testing.assert_allclose(values, np.exp2(row), rtol=2e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([1, 2, 64, 300, 5000]),
    spread=st.sampled_from([0.0, 0.05, 1.0, 4.0, 30.0]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999]),
)
def test_the_nucleus_holds_the_fewest_tokens_that_make_the_mass_and_few_more(kernels, seed, vocab, spread, top_p):
    columns = -(-vocab // CHUNK)
    values, sums = np.empty(vocab, np.float32), np.empty(columns, np.float32)
    row = logits(vocab, seed, spread)
    passes = RowPasses(kernels, values, sums)
    total = passes.exp2(row - row.max(), 1.0)
    mass = top_p * total
    ids = passes.nucleus(total, mass)
    assert np.all(np.diff(ids) > 0)
    order = np.sort(values.astype(np.float64))[::-1]
    needed = int(np.cumsum(order).searchsorted(mass * (1 - 1e-5))) + 1
    assert np.all(np.isin(np.flatnonzero(values > order[min(needed, vocab) - 1]), ids))
    assert ids.size >= min(needed, vocab)
    # All that was left out is lighter than all that was kept.
    left_out = np.setdiff1d(np.arange(vocab), ids)
    assert not left_out.size or values[left_out].max() <= values[ids].min()


@pytest.mark.parametrize("vocab", [640, 1001, 49_152])
@pytest.mark.parametrize("kind", ["spread", "equal", "few", "masked", "nan", "all masked", "infinite"])
@pytest.mark.parametrize(("k", "drop"), [(1, -math.inf), (5, -1.5), (5, -math.inf), (100, -0.25), (100, -math.inf)])
def test_the_largest(passes, vocab, kind, k, drop):
    row = logits(vocab, 11)
    if kind == "equal":
        row[:] = 1.25
    elif kind == "few":
        row = np.round(row).astype(np.float32)
    elif kind == "masked":
        row[vocab // 8 :] = -np.inf
    elif kind == "all masked":
        row[:] = -np.inf
    elif kind in ("nan", "infinite"):
        row[vocab // 3] = np.nan if kind == "nan" else np.inf
    ids, row_max = ChunkedExp(vocab).largest(row, k, drop)
    if kind in ("nan", "all masked", "infinite"):
        assert ids.size == 0
        np.testing.assert_equal(row_max, row.max())
        return
    assert row_max == row.max()
    bound = max(np.sort(row)[-k], np.float32(float(row_max) + drop))
    assert np.all(np.diff(ids) > 0)
    assert np.all(np.isin(np.flatnonzero(row >= bound), ids))
    left_out = np.setdiff1d(np.arange(vocab), ids)
    assert not left_out.size or row[left_out].max() < row[ids].min()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_top_p_keeps_what_a_full_sort_keeps(passes, top_p, spread):
    row = logits(7001, 3, spread)
    restriction = Restriction(0.7, top_p=top_p)
    ids, _ = select(candidates(row, ChunkedExp(row.size), restriction), restriction)
    weights = np.exp((row.astype(np.float64) - row.max()) / 0.7)
    order = np.argsort(-row, kind="stable")
    count = int(np.cumsum(weights[order]).searchsorted(top_p * weights.sum())) + 1
    # The mass is summed in f32: at the very edge one token more or less is as right.
    assert abs(ids.size - count) <= max(1, count // 1000)
    assert np.all(np.isin(order[: min(ids.size, count) - 1], ids))


def test_a_seed_draws_the_same_tokens_either_way(kernels, monkeypatch):
    batch = np.stack([logits(3000, seed) for seed in range(8)])
    drawn = []
    for found in (kernels, None):
        monkeypatch.setattr(rows_module, "row_kernels", lambda found=found: found)
        sampler = Sampler(3000, [2])
        states = [sampler.new_state(SamplingParams(seed=i, temperature=0.5 + i / 8), [1]) for i in range(8)]
        tokens = []
        for _ in range(50):
            sampled = sampler.sample(batch, states)
            for state, token in zip(states, sampled, strict=True):
                state.append(token.token_id, token.logprob)
            tokens.append([token.token_id for token in sampled])
        drawn.append(tokens)
    # A uniform number within rounding of an edge may fall to either side: 400 draws, at most one of them.
    assert (np.array(drawn[0]) != np.array(drawn[1])).sum() <= 1


@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_the_other_instruction_sets(kernels, isa):
    if os.environ.get("PLANCAST_ISA"):
        pytest.skip("this is the run on another instruction set")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "exp2 or in_place"]
    done = subprocess.run(command, env={**os.environ, "PLANCAST_ISA": isa}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_process_that_has_not_loaded_openvino_finds_the_kernels_too(kernels):
    """An engine that starts again must sample as the one before it, whatever either has imported."""
    code = "from plugins.sampling.native import row_kernels; raise SystemExit(row_kernels() is None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 130, 8192, 49_152])
@pytest.mark.parametrize("kind", ["spread", "equal", "masked", "nan", "infinite"])
def test_the_likeliest_and_its_probability(passes, vocab, kind):
    row = logits(vocab, vocab, 5.0)
    if kind == "equal":
        row[:] = row[0]
    elif kind == "masked":
        row[: vocab // 2] = -np.inf
    elif kind in ("nan", "infinite"):
        row[[vocab // 3, vocab // 2]] = np.nan if kind == "nan" else np.inf
    token_id, share = Likeliest()(row)
    assert token_id == row.argmax()
    if kind not in ("nan", "infinite"):
        exact = np.exp(row.astype(np.float64) - row.max())
        assert share == pytest.approx(1.0 / exact.sum(), rel=1e-5)
