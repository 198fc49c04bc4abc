"""Speculative sampling on a compiled engine: at every position, tokens are distributed as without drafts.

Many seeds of one prompt, with drafts drawn at random and with certain ones, against the engine's own distribution where
it is known (the first position), and against as many plain samples where it is not.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as statistics
from tiny_build import plancast_home, tiny_head, tiny_recipe, tiny_workshop

from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

SAMPLES, LENGTH = 1500, 4
PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
PLAIN: dict[str, Any] = {"temperature": 0.9, "top_k": 4}
# Penalties and a bias change the distribution by what was said before, drafted tokens among it.
PROCESSED: dict[str, Any] = PLAIN | {"repetition_penalty": 1.3, "presence_penalty": 0.6, "logit_bias": {7: 1.5}}
FIXED = {"adaptive": False, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from builder.build import build

    workshop, folder = tiny_workshop(), tmp_path_factory.mktemp("chi")
    head = tiny_head(workshop / "model", folder / "head")
    with plancast_home(workshop / "home"):
        return build(
            tiny_recipe(workshop / "model", "tiny-head", parity={"enabled": False}, draft_head=str(head)),
            folder / "made",
        )


def texts(artifact: Path, config: Any, options: dict[str, Any], first_seed: int) -> tuple[list[tuple[int, ...]], Any]:
    """`SAMPLES` sampled texts of `LENGTH` tokens."""
    params = [
        SamplingParams(seed=first_seed + i, max_tokens=LENGTH, ignore_eos=True, **options) for i in range(SAMPLES)
    ]
    with LLM(artifact, speculative_config=config, num_blocks=64) as llm:
        results = llm.generate([{"prompt_token_ids": PROMPT}] * SAMPLES, params)
        return [tuple(result.outputs[0].token_ids) for result in results], llm.stats()


@pytest.mark.slow
@pytest.mark.parametrize("options", [PLAIN, PROCESSED], ids=["plain", "processors"])
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_drawn_drafts_leave_the_distribution(method: str, options: dict[str, Any], artifact: Path) -> None:
    config = {"method": method, "draft_sampling": "probabilistic", **FIXED}
    if method == "draft_model":
        config["model"] = str(artifact)
    plain, _ = texts(artifact, "off", options, 0)
    drafted, figures = texts(artifact, config, options, 10_000_000)
    assert figures.spec_decode_num_draft_tokens > SAMPLES
    for position in range(LENGTH):
        same = equal_distributions(
            Counter(text[position] for text in plain), Counter(text[position] for text in drafted)
        )
        assert same > 1e-4, f"position {position}: p = {same:.1e}"
    # Positions together: what follows what.
    assert equal_distributions(Counter(text[:2] for text in plain), Counter(text[:2] for text in drafted)) > 1e-4


def equal_distributions(one: Counter[Any], other: Counter[Any]) -> float:
    """The p-value of a chi-square test that both were drawn from one distribution; rare outcomes are pooled."""
    kinds = sorted(one.keys() | other.keys(), key=lambda kind: -(one[kind] + other[kind]))
    common = [kind for kind in kinds if one[kind] + other[kind] >= 20]
    table = [[counts[kind] for kind in common] for counts in (one, other)]
    rest = [sum(counts.values()) - sum(row) for counts, row in zip((one, other), table, strict=True)]
    if sum(rest) >= 20:
        for row, left in zip(table, rest, strict=True):
            row.append(left)
    return 1.0 if len(table[0]) < 2 else float(statistics.chi2_contingency(np.array(table)).pvalue)


def test_the_test_tells_a_skewed_distribution() -> None:
    rng = np.random.default_rng(0)
    one, other = (Counter(rng.choice(4, SAMPLES, p=p).tolist()) for p in ([0.4, 0.3, 0.2, 0.1], [0.34, 0.3, 0.2, 0.16]))
    assert equal_distributions(one, other) < 1e-4
