"""Philox4x32-10 against the known answers of its authors' library (Random123), and the uniforms drawn from it."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from runtime.philox import ACCEPT_STREAM, TOKEN_STREAM, philox4x32, uniform, uniforms

KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


def test_known_answers_together():
    counters, keys, expected = (np.array(column, np.uint64).T for column in zip(*KNOWN_ANSWERS, strict=True))
    assert philox4x32(counters, keys).tolist() == expected.tolist()


def test_one_number_does_not_depend_on_those_drawn_with_it():
    seeds = np.array([0, 1, 2**64 - 1, 12345678901234567890], np.uint64)
    together = uniforms(seeds[:, None], np.uint64(3), np.arange(7, dtype=np.uint64))
    assert together.shape == (4, 7)
    for i, seed in enumerate(seeds):
        for position in range(7):
            assert together[i, position] == uniform(int(seed), 3, position)


def test_every_argument_matters():
    numbers = {
        uniform(1, 0, 0),
        uniform(2, 0, 0),
        uniform(1 + 2**32, 0, 0),
        uniform(1, 1, 0),
        uniform(1, 0, 1),
        uniform(1, 0, 0, ACCEPT_STREAM),
    }
    assert len(numbers) == 6
    assert uniform(1, 0, 0) == uniform(1, 0, 0, TOKEN_STREAM)


def test_uniform_in_the_unit_interval():
    numbers = uniforms(np.arange(200, dtype=np.uint64)[:, None], np.uint64(0), np.arange(500, dtype=np.uint64)).ravel()
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    # Neighbours along positions and along seeds are independent.
    grid = numbers.reshape(200, 500)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.01
