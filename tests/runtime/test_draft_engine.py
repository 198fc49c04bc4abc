"""The draft engine's mirrors keep step with the target: a wrong one shows as a draft that is not accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from core_driver import Driver, make_core, make_request
from drafted_runs import DRAFTED_REQUESTS, TARGET_OPTIONS, draft_figures, drive_drafts
from drafters import hash_draft_engine
from tiny_served import write_served_artifact

from runtime.errors import PlancastError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams
from runtime.speculation.vocabulary import DraftVocabulary


def drive(requests: list[Any], *, right: float = 1.0, draft: dict[str, Any] | None = None, **options: Any) -> Driver:
    """Run requests with a draft engine; every answer must be that of the request alone."""
    return drive_drafts(requests, hash_draft_engine(right=right, **draft or {}), **options)


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS))
    assert drafted == accepted > 50


def test_refused_tokens_leave_the_mirror_right() -> None:
    """After a refusal the next draft starts from the true text: a share is accepted all along."""
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS, right=0.8))
    assert 0.3 * drafted < accepted < drafted


@pytest.mark.parametrize("options", TARGET_OPTIONS, ids=str)
def test_in_step_whatever_the_target_does(options: dict[str, Any]) -> None:
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS, **options))
    assert drafted == accepted > 0


def test_long_prompts_are_read_in_chunks() -> None:
    """A prompt longer than the draft's pass: no draft until it is read, and right ones then."""
    requests = [make_request("long", list(range(40)) * 2, max_tokens=40)]
    drafted, accepted = draft_figures(drive(requests, draft={"max_num_batched_tokens": 8}, max_num_batched_tokens=64))
    assert drafted == accepted > 5


def test_few_blocks_drop_the_mirror_not_the_request() -> None:
    drafted, accepted = draft_figures(drive(DRAFTED_REQUESTS, draft={"num_blocks": 12}))
    assert drafted == accepted > 0


def test_beyond_the_drafts_context_nothing_is_drafted() -> None:
    driver = drive([make_request("r", [1, 2, 3], max_tokens=60)], draft={"max_context_len": 20})
    drafted, accepted = draft_figures(driver)
    assert 0 < drafted == accepted < 25


def test_forks_and_sampling() -> None:
    """Each of n sequences has a mirror; a drafted argmax is accepted as often as it is sampled."""
    requests = [
        make_request("n", [1, 2, 3, 4, 5], greedy=False, n=3, seed=1, temperature=0.4, max_tokens=20),
        make_request("p", [4, 4, 4], greedy=False, seed=2, presence_penalty=1.5, temperature=0.3, max_tokens=20),
        make_request("bias", [4, 1], logit_bias={7: 20.0}, max_tokens=20),
    ]
    drafted, accepted = draft_figures(drive(requests))
    assert accepted > 0.2 * drafted


def test_an_abort_frees_the_mirror() -> None:
    drafter = hash_draft_engine()
    driver = Driver(make_core(drafter=drafter))
    driver.add(make_request("r", [1, 2, 3], max_tokens=100))
    for _ in range(5):
        driver.step()
    assert drafter.kv.pool.num_used > 0
    driver.core.abort(["r"])
    assert drafter.kv.pool.num_used == 0


def test_a_shared_prompt_is_found_in_the_drafts_own_cache() -> None:
    drafter = hash_draft_engine()
    driver = Driver(make_core(drafter=drafter))
    for turn in range(2):
        driver.add(make_request(f"r{turn}", list(range(20)), max_tokens=5))
        driver.run()
    assert drafter.kv.prefix_hits >= 16


def test_reduced_vocabulary() -> None:
    vocabulary = DraftVocabulary.of([3, 10, 20], 1, 50)
    assert vocabulary.to_draft[[3, 10, 20, 4]].tolist() == [0, 1, 2, 1]
    assert vocabulary.to_target.tolist() == [3, 10, 20]


def test_two_artifacts(tmp_path: Path) -> None:
    """A whole engine with a draft artifact: found beside the target, its cache sized with the target's."""
    target, draft = write_served_artifact(tmp_path / "target"), write_served_artifact(tmp_path / "draft")
    assert draft.exists()
    options: dict[str, Any] = {"executor_factory": "tiny_served:open_hash", "num_blocks": 64}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    texts = []
    for config in (None, {"model": "draft", "num_speculative_tokens": 4, "adaptive": False}):
        with LLM(target, speculative_config=config, **options) as llm:
            texts.append(llm.generate("Hello there", params)[0].outputs[0].token_ids)
            if config is not None:
                stats = llm.stats()
                assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 10
                assert llm.set_speculation(False) is True
    assert texts[0] == texts[1]


def test_another_vocabulary_is_refused_by_name(tmp_path: Path) -> None:
    target = write_served_artifact(tmp_path / "target")
    write_served_artifact(tmp_path / "other", "byte_fallback")
    with pytest.raises(PlancastError, match=r"tiny-byte_fallback .* cannot draft for tiny-byte_level .* token"):
        LLM(target, speculative_config={"model": "other"}, executor_factory="tiny_served:open_hash", num_blocks=8)
    with pytest.raises(PlancastError, match="no draft artifact 'nowhere'"):
        LLM(target, speculative_config={"model": "nowhere"}, executor_factory="tiny_served:open_hash", num_blocks=8)
