"""`backend: {name: torch}` from recipe to text: the runtime runs on it as on any other engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_build import plancast_home, tiny_recipe, tiny_workshop

from builder.build import build
from runtime.artifact import Artifact
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

PROMPTS = ["one two one two one two one", "the quick brown fox", "a", "one two one two one two two"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def workshop() -> Path:
    return tiny_workshop()


def build_torch(workshop: Path, out: Path, **sections) -> Path:
    recipe = tiny_recipe(workshop / "model", name="tiny-torch", backend={"name": "torch"}, **sections)
    with plancast_home(workshop / "home"):
        return build(recipe, out)


def texts(artifact: Path, params: SamplingParams, **options) -> list[str]:
    with LLM(artifact, **options) as llm:
        return [result.outputs[0].text for result in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def exact(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_torch(workshop, tmp_path_factory.mktemp("torch") / "f32")


def test_its_answers_are_those_of_the_other_backend(workshop: Path, exact: Path) -> None:
    """Greedy and seeded, with paging, prefix cache, drafts and a pool so small that requests are preempted."""
    parity = Artifact.open(exact, verify="full").manifest.parity
    assert parity is not None
    assert parity.greedy_matching_prompts == parity.greedy_prompts
    for params in (GREEDY, SEEDED):
        expected = texts(workshop / "artifact", params)
        assert texts(exact, params) == expected
        assert texts(exact, params, speculative_config="ngram") == expected
    assert texts(exact, GREEDY, num_blocks=4, preemption_mode="swap") == texts(workshop / "artifact", GREEDY)


def test_packed_caches(workshop: Path, tmp_path: Path) -> None:
    """Packed cells survive drafts that are rolled back, and blocks that go to the host and back."""
    kv = {"key": "fp8_e4m3", "value": "int4"}
    artifact = build_torch(workshop, tmp_path / "packed", kv=kv, parity={"enabled": False})
    alone = texts(artifact, GREEDY, max_num_seqs=1)
    assert texts(artifact, GREEDY) == alone
    assert texts(artifact, GREEDY, speculative_config="ngram") == alone
    assert texts(artifact, GREEDY, num_blocks=4, preemption_mode="swap") == alone
