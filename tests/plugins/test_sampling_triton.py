"""The sampling kernels, interpreted on the CPU, against NumPy, the runtime's Philox and the runtime's sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", reason="the Triton kernels need triton (pip install 'plancast[triton]')")
tl = triton.language

from plugins.sampling import torch_kernel  # noqa: E402
from plugins.sampling.kernel import uniform  # noqa: E402
from plugins.sampling.reference import distribution, pick, verify  # noqa: E402
from plugins.sampling.torch_kernel import Draws, SamplingRows  # noqa: E402
from runtime import philox  # noqa: E402
from runtime.logprobs import RowLogprobs  # noqa: E402
from runtime.sampler import Sampler  # noqa: E402
from runtime.sampling.rows import ChunkedExp  # noqa: E402
from runtime.sampling_params import SamplingParams  # noqa: E402

VOCAB = 150  # more than a tile, and no whole number of them
BLOCK = 128


def rows_of(*settings):
    """SamplingRows of (temperature, top_k, top_p, min_p) each."""
    columns = list(zip(*settings, strict=True))
    kinds = (torch.float32, torch.int32, torch.float32, torch.float32)
    return SamplingRows(*(torch.tensor(column, dtype=kind) for column, kind in zip(columns, kinds, strict=True)))


def draws_of(seeds, sequences, positions):
    return Draws(
        torch.tensor(np.array(seeds, np.uint64).astype(np.int64)),
        torch.tensor(sequences, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
    )


@triton.jit
def _uniforms(seeds, sequences, positions, out, STREAM: tl.constexpr):
    r = tl.program_id(0)
    tl.store(out + r, uniform(tl.load(seeds + r), tl.load(sequences + r), tl.load(positions + r), STREAM))


def test_random_numbers_are_the_runtimes():
    seeds, sequences, positions = [0, 7, 2**63 + 5, 2**64 - 1], [0, 3, 100, 2], [0, 1, 65_000, 2**31 - 1]
    draws = draws_of(seeds, sequences, positions)
    out = torch.zeros(4, dtype=torch.float64)
    for stream in (philox.TOKEN_STREAM, philox.RESIDUAL_STREAM):
        _uniforms[(4,)](draws.seed, draws.sequence, draws.position, out, STREAM=stream)
        expected = [philox.uniform(*three, stream) for three in zip(seeds, sequences, positions, strict=True)]
        assert out.tolist() == expected


SETTINGS = [
    (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 60, 0.8, 0.0), (0.9, 40, 0.6, 0.0),
    (1.0, 0, 1.0, 0.1), (1.5, 20, 0.9, 0.05), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-6, 0.0),
]  # fmt: skip


def test_tokens_are_those_of_the_runtimes_sampler():
    """The same logits, parameters and seed give the same token on the device and in the runtime.

    But for rows with more than 128 candidates, of which there is none here.
    """
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((len(SETTINGS), VOCAB)) * 2).astype(np.float32)
    logits[3, 17] = logits[3].max()  # equals at the top
    sampler = Sampler(VOCAB, [0])
    params = [
        SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=100 + i)
        for i, (t, k, p, m) in enumerate(SETTINGS)
    ]
    states = [sampler.new_state(p, [1], sequence_index=i) for i, p in enumerate(params)]
    expected = [token.token_id for token in sampler.sample(logits, states)]
    count = len(SETTINGS)
    draws = draws_of([state.seed for state in states], range(count), [state.position for state in states])
    tokens = torch_kernel.sample(torch.from_numpy(logits), rows_of(*SETTINGS), draws, block=BLOCK)
    assert tokens.tolist() == expected


def test_equals_at_the_edge_of_the_nucleus_keep_the_lower_ids():
    """Eight equal logits and top_p 0.5 leave the first four."""
    row = np.full(VOCAB, -50, np.float32)
    ids = [3, 20, 21, 64, 90, 127, 128, 149]
    row[ids] = 1.0
    rows = 12
    logits = torch.from_numpy(np.tile(row, (rows, 1)))
    draws = draws_of([9] * rows, [0] * rows, range(rows))
    tokens = torch_kernel.sample(logits, rows_of(*[(1.0, 0, 0.5, 0.0)] * rows), draws, block=BLOCK).tolist()
    exact = distribution(row, 1.0, top_p=0.5)
    assert np.flatnonzero(exact).tolist() == ids[:4]
    assert tokens == [pick(exact, philox.uniform(9, 0, position)) for position in range(rows)]
    assert len(set(tokens)) > 2


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_give_no_token(broken):
    logits = torch.zeros(3, VOCAB)
    logits[:2, 70] = broken
    settings = [(0.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.0), (1.0, 0, 1.0, 0.0)]
    tokens = torch_kernel.sample(logits, rows_of(*settings), draws_of([1] * 3, [0] * 3, [0] * 3), block=BLOCK)
    assert tokens[:2].tolist() == [-1, -1]
    assert tokens[2] >= 0


def drafts_of(rows, tokens, temperatures, distributions):
    """Drafts of (ids, probabilities) each, ids ascending."""
    i32 = {"dtype": torch.int32}
    sizes = [len(ids) for ids, _ in distributions]
    return torch_kernel.Drafts(
        torch.tensor(rows, **i32), torch.tensor(tokens, **i32), torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(np.cumsum([0, *sizes]), **i32), torch.tensor(np.concatenate([i for i, _ in distributions]), **i32),
        torch.tensor(np.concatenate([p for _, p in distributions]), dtype=torch.float32),
    )  # fmt: skip


def test_verification_is_the_references():
    """Sequences with 3, 0, 2 and 2 tokens drawn from dense drafts and drafts of a few tokens: the same stay, and the
    same token comes after them, under every restriction."""
    rng = np.random.default_rng(8)
    drafted = [3, 0, 2, 2]
    settings = [(1.0, 0, 1.0, 0.0), (0.8, 10, 1.0, 0.0), (0.6, 7, 1.0, 0.1), (1.2, 0, 0.9, 0.0)]
    starts = np.concatenate([[0], np.cumsum(np.array(drafted) + 1)]).tolist()
    stayed = 0
    for round_ in range(3):
        logits = rng.standard_normal((starts[-1], VOCAB)).astype(np.float32) * 2
        rows = [setting for setting, n in zip(settings, drafted, strict=True) for _ in range(n + 1)]
        target = [distribution(row, t, k, p, m) for row, (t, k, p, m) in zip(logits, rows, strict=True)]
        at, tokens, dense = [], [], []
        for s, n in enumerate(drafted):
            for i in range(n):
                q = rng.dirichlet(np.full(VOCAB, 0.3))
                if (i + round_) % 2:  # a few tokens, of which the target may know none
                    q[q < np.sort(q)[-9]] = 0
                q = q / q.sum() if round_ < 2 else 0.5 * q / q.sum() + 0.5 * target[starts[s] + i]
                at.append(starts[s] + i)
                dense.append(q)
                tokens.append(int(rng.choice(VOCAB, p=q)))
        positions = [10 + r - starts[s] for s, n in enumerate(drafted) for r in range(starts[s], starts[s + 1])]
        owners = [s for s, n in enumerate(drafted) for _ in range(n + 1)]
        draws = draws_of(owners, owners, positions)
        plain = [(-1.0 if r in at else t, *rest) for r, (t, *rest) in enumerate(rows)]
        got = torch_kernel.sample(torch.from_numpy(logits), rows_of(*plain), draws, block=BLOCK)
        assert all(got[r] == -1 for r in at)
        sparse = [(np.flatnonzero(q), q[q > 0]) for q in dense]
        drafts = drafts_of(at, tokens, [rows[r][0] for r in at], sparse)
        torch_kernel.verify(torch.from_numpy(logits), rows_of(*plain), draws, drafts, got, block=BLOCK)
        for s, n in enumerate(drafted):
            first = sum(drafted[:s])
            proposals = tokens[first : first + n]
            numbers = [
                [philox.uniform(s, s, i, stream) for i in range(10, 11 + n)]
                for stream in (philox.TOKEN_STREAM, philox.ACCEPT_STREAM, philox.RESIDUAL_STREAM)
            ]
            order = "down" if settings[s][1:] != (0, 1.0, 0.0) else "chunked"
            expected = verify(target[starts[s] : starts[s + 1]], proposals, dense[first : first + n], *numbers, order)
            mine = got[starts[s] : starts[s + 1]].tolist()
            kept = next((i for i in range(n) if mine[i] != proposals[i]), n)
            assert (kept, mine[kept]) == expected, (round_, s)
            stayed += kept
    assert 0 < stayed < 3 * sum(drafted)


def test_a_draft_equal_to_the_target_always_stays_or_comes_from_the_target():
    """p = q: nothing is refused but by rounding, and then the token is one that p allows."""
    logits = np.full((4, VOCAB), -np.inf, np.float32)
    logits[:, [3, 60, 140]] = [1.0, 0.5, 0.2]
    q = distribution(logits[0], 0.9)
    ids = np.flatnonzero(q)
    drafts = drafts_of(range(4), [3, 60, 140, 3], [0.9] * 4, [(ids, q[ids] * 4)] * 4)  # q too large: u decides
    tokens = torch.full((4,), -7, dtype=torch.int32)
    rows = rows_of(*[(-1.0, 0, 1.0, 0.0)] * 4)
    torch_kernel.verify(torch.from_numpy(logits), rows, draws_of([1, 2, 3, 4], [0] * 4, [0] * 4), drafts, tokens)
    expected = []
    for i, drafted in enumerate([3, 60, 140, 3]):
        stays = philox.uniform(i + 1, 0, 0, philox.ACCEPT_STREAM) * 4 < 1
        expected.append(drafted if stays else pick(q, philox.uniform(i + 1, 0, 0, philox.RESIDUAL_STREAM), "up"))
    assert tokens.tolist() == expected
    assert expected != [3, 60, 140, 3]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits_verify_nothing(broken):
    logits = torch.zeros(2, VOCAB)
    logits[0, 70] = broken
    drafts = drafts_of([0, 1], [5, 5], [1.0, 1.0], [([5], [1e-9])] * 2)
    tokens = torch.full((2,), -7, dtype=torch.int32)
    rows = rows_of(*[(-1.0, 0, 1.0, 0.0)] * 2)
    torch_kernel.verify(logits, rows, draws_of([1] * 2, [0] * 2, [0] * 2), drafts, tokens, block=BLOCK)
    assert tokens.tolist() == [-1, 5]


def test_rows_that_leave_many_candidates_are_told_apart():
    """Of 150 tokens: exactly 60 stay, 61, and all 150 where nothing restricts the row; one row is not to be sampled."""
    row = np.linspace(3, 2, VOCAB).astype(np.float32)
    settings = [(1.0, 60, 1.0, 0.0), (1.0, 61, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (-1.0, 0, 1.0, 0.0), (0.0, 61, 1.0, 0.0)]
    count = len(settings)
    logits = torch.from_numpy(np.tile(row, (count, 1)))
    draws = draws_of([3] * count, [0] * count, [0] * count)
    tokens = torch_kernel.sample(logits, rows_of(*settings), draws, most=60, block=BLOCK).tolist()
    assert tokens[0] >= 0
    assert tokens[1] == -2
    assert tokens[2] >= 0
    assert tokens[3:] == [-1, 0]
    assert torch_kernel.sample(logits, rows_of(*settings), draws, block=BLOCK)[1] >= 0


def test_log_probabilities_are_the_runtimes():
    """The token's, its rank, and the likeliest: what `RowLogprobs` gathers, equals and minus infinity included."""
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((5, VOCAB)) * 3).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equals
    logits[2, 10:] = -np.inf  # fewer than are asked for
    tokens = [int(logits[0].argmin()), 77, 3, 5, -1]
    num_tops = [5, 20, 12, 0, 4]
    scores = torch_kernel.score(
        torch.from_numpy(logits), torch.tensor(tokens, dtype=torch.int32), torch.tensor(num_tops, dtype=torch.int32),
        block=BLOCK,
    )  # fmt: skip
    exp = ChunkedExp(VOCAB)
    for r, (token, num_top) in enumerate(zip(tokens[:4], num_tops, strict=False)):
        expected = RowLogprobs(logits[r], exp).gather(token, num_top)
        peak, total, value = scores.stats[r].tolist()
        ids = [token, *scores.top_ids[r, :num_top].tolist()]
        values = np.array([value, *scores.top_values[r, :num_top].tolist()])
        assert ids == expected.token_ids
        assert int(scores.ranks[r]) == expected.ranks[0]
        np.testing.assert_allclose(values - peak - math.log(total), expected.logprobs, atol=5e-6)
    assert not scores.stats[4].any()
