"""The real model: what a build of SmolLM2 must reach, read from the manifests of the session's artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.artifact import Artifact
from runtime.executors import open_executor

pytestmark = pytest.mark.model


def test_the_exact_engine_is_the_original(smollm2_f32_artifact: Path) -> None:
    manifest = Artifact.open(smollm2_f32_artifact, verify="full").manifest
    parity = manifest.parity
    assert parity is not None
    assert parity.greedy_prompts >= 12
    assert parity.greedy_matching_prompts == parity.greedy_prompts
    assert parity.greedy_matching_tokens == parity.greedy_tokens == 12 * 32
    assert parity.positions >= 2000
    assert parity.mean_kl < 1e-8
    assert parity.top1_agreement > 0.9999
    assert parity.perplexity == pytest.approx(parity.reference_perplexity, rel=1e-4)
    assert 10 < parity.reference_perplexity < 30  # a language model, not noise
    assert manifest.model.eos_token_ids
    assert manifest.model.license == "apache-2.0"


def test_case_24_the_small_engine_is_near_the_original(smollm2_artifact: Path) -> None:
    manifest = Artifact.open(smollm2_artifact, verify="full").manifest
    # Scales in groups of 32 are most of the rest.
    assert manifest.weights_bytes["int8"] > 0.85 * sum(manifest.weights_bytes.values())
    parity = manifest.parity
    assert parity is not None
    assert parity.mean_kl < 0.02
    assert parity.top1_agreement > 0.93
    assert parity.perplexity / parity.reference_perplexity < 1.02
    assert parity.greedy_matching_tokens > parity.greedy_tokens / 2


@pytest.mark.parametrize("name", ["smollm2_f32_artifact", "smollm2_artifact"])
def test_a_build_stays_below_three_gigabytes(name: str, request: pytest.FixtureRequest) -> None:
    figures = Artifact.open(request.getfixturevalue(name)).manifest.build
    assert figures["max_memory"] < 3e9


def test_it_loads_from_the_compiled_form_where_there_is_one(smollm2_artifact: Path) -> None:
    from plugins.native import find_native

    artifact = Artifact.open(smollm2_artifact)
    executor = open_executor(artifact)
    try:
        expected = "plan" if find_native() is not None and artifact.plan is not None else "ir"
        assert executor.load_source == expected  # type: ignore[attr-defined]
        assert executor.vocab_size == artifact.manifest.model.vocab_size
    finally:
        executor.close()
