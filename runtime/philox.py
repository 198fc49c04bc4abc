"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A draw is a pure function of (seed, sequence index, output position, stream). So a seeded sequence gets the same numbers
alone, in any batch, after a preemption and on a fresh engine: there is no generator state to lose.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_ROUNDS = 10

# What a draw is for; each purpose has numbers of its own at every position.
TOKEN_STREAM = 0  # picks the token
ACCEPT_STREAM = 1  # accepts or rejects a drafted token
RESIDUAL_STREAM = 2  # picks from the residual after a rejection
DRAFT_STREAM = 3  # picks a draft engine's token


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The ten-round bijection on 32-bit words, held in uint64: `counter` [4, N] under `key` [2, N] gives [4, N]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(_ROUNDS):
        if i:
            k0 = (k0 + np.uint64(_W0)) & _LOW
            k1 = (k1 + np.uint64(_W1)) & _LOW
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(
    seeds: NDArray[np.uint64],
    sequence_indices: NDArray[np.uint64],
    positions: NDArray[np.uint64],
    stream: int = TOKEN_STREAM,
) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) with 53 random bits, in the shape to which the three arrays broadcast."""
    seeds, sequence_indices, positions = np.broadcast_arrays(seeds, sequence_indices, positions)
    shape = seeds.shape
    flat_seeds = seeds.ravel()
    counter = np.empty((4, flat_seeds.size), np.uint64)
    counter[0] = positions.ravel() & _LOW
    counter[1] = sequence_indices.ravel() & _LOW
    counter[2] = stream
    counter[3] = 0
    words = philox4x32(counter, np.stack([flat_seeds & _LOW, flat_seeds >> _32]))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return ((high * np.uint64(1 << 26) + low) * 2.0**-53).reshape(shape)


def uniform(seed: int, sequence_index: int, position: int, stream: int = TOKEN_STREAM) -> float:
    """One number of `uniforms`."""
    return float(uniforms(np.uint64(seed), np.uint64(sequence_index), np.uint64(position), stream))  # type: ignore[arg-type]
