"""`LLM`: many prompts, one stream, chats, beams, and what it refuses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import HashModelExecutor
from tiny_served import write_served_artifact

from runtime.errors import ArtifactError, EngineDeadError, PlancastError, RequestError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TEXTS = ["The quick brown fox", "Paris is", "ďábel", "def main(argv):", "x" * 60]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_artifact(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="module")
def llm(artifact: Path) -> Iterator[LLM]:
    with LLM(artifact, executor_factory="tiny_served:open_hash") as llm:
        yield llm


def expected(prompt: list[int], length: int = 12) -> list[int]:
    model, history = HashModelExecutor(512), list(prompt)
    for _ in range(length):
        history.append(int(model.logits_after(history).argmax()))
    return history[len(prompt) :]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [*TEXTS, {"prompt": "a mapping"}, {"prompt_token_ids": [5, 6, 7]}]
    params = [SamplingParams(temperature=0.0, max_tokens=3 + i, ignore_eos=True) for i in range(len(prompts))]
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == [*TEXTS, "a mapping", None]
    assert results[-1].prompt_token_ids == [5, 6, 7]
    for i, result in enumerate(results):
        assert result.finished
        assert result.outputs[0].token_ids == expected(result.prompt_token_ids, 3 + i)
        assert result.outputs[0].text == llm.tokenizer.decode(result.outputs[0].token_ids)
        assert result.outputs[0].finish_reason == "length"
        assert result.metrics.first_token_time is not None


def test_one_prompt_gives_one_result(llm: LLM) -> None:
    for prompt in ("Paris is", {"prompt": "Paris is"}, llm.tokenizer.encode("Paris is")):
        (result,) = llm.generate(prompt, GREEDY)
        assert result.outputs[0].token_ids == expected(llm.tokenizer.encode("Paris is"))


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_more_prompts_than_the_queue_holds(artifact: Path) -> None:
    with LLM(artifact, executor_factory="tiny_served:open_hash", max_num_seqs=4, max_num_waiting=8) as llm:
        prompts = [[i % 500, i // 500 + 1] for i in range(300)]
        seen = []
        results = llm.generate(prompts, GREEDY, progress=lambda output: seen.append(output.request_id))
        assert [result.prompt_token_ids for result in results] == prompts
        assert all(result.outputs[0].token_ids == expected(result.prompt_token_ids) for result in results)
        assert len(set(seen)) == 300


def test_a_stream_gives_what_is_new_and_together_the_whole(llm: LLM) -> None:
    deltas = list(llm.stream("Paris is", GREEDY))
    assert len(deltas) > 1
    whole = llm.generate("Paris is", GREEDY)[0].outputs[0]
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == whole.token_ids
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_merged_deltas_are_the_whole(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=0.7, seed=4, max_tokens=9, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    first, *later = llm.stream("Paris is the capital", params)
    for delta in later:
        first.add(delta)
    first.outputs.sort(key=lambda output: output.index)
    (whole,) = llm.generate("Paris is the capital", params)
    assert first.outputs == whole.outputs
    assert first.prompt_logprobs == whole.prompt_logprobs
    assert len(whole.prompt_logprobs or []) == len(whole.prompt_token_ids)


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    """Case 13."""
    stream = llm.stream("Paris is", SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks
    unused = llm.stream("Paris is", GREEDY)
    del unused
    assert llm.stats().num_waiting == 0


def test_stop_strings_end_the_answer_and_the_request(llm: LLM) -> None:
    whole = llm.generate("Paris is", GREEDY)[0].outputs[0].text
    stop = whole[len(whole) // 2 :][:3]
    (result,) = llm.generate("Paris is", SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=stop))
    assert result.outputs[0].text == whole[: whole.index(stop)]
    assert result.outputs[0].finish_reason == "stop"
    assert result.outputs[0].stop_reason == stop
    assert llm.stats().num_running == 0


def test_seeded_text_is_the_same_alone_and_in_a_batch(llm: LLM) -> None:
    """Case 9."""
    params = SamplingParams(temperature=1.0, seed=77, max_tokens=12, ignore_eos=True)
    alone = llm.generate("Paris is", params)[0].outputs[0].token_ids
    batch = llm.generate(["Paris is", *TEXTS, "Paris is"], params)
    assert batch[0].outputs[0].token_ids == batch[-1].outputs[0].token_ids == alone


def test_unseeded_text_varies(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    results = llm.generate(["Paris is"] * 8, params)
    assert len({tuple(result.outputs[0].token_ids) for result in results}) > 1
    assert params.seed is None, "the caller's parameters are not written to"


def test_best_of_gives_the_n_best(llm: LLM) -> None:
    params = SamplingParams(n=2, best_of=6, temperature=1.0, seed=1, max_tokens=8, logprobs=0, ignore_eos=True)
    (result,) = llm.generate("Paris is", params)
    assert [output.index for output in result.outputs] == [0, 1]
    first, second = (output.cumulative_logprob for output in result.outputs)
    assert first is not None
    assert second is not None
    assert first >= second


def test_beam_search_gives_beams_likeliest_first(llm: LLM) -> None:
    (result,) = llm.beam_search("Paris is", beam_width=4, n=3, max_tokens=8, ignore_eos=True)
    beams = [output.token_ids for output in result.outputs]
    assert len(beams) == len({tuple(beam) for beam in beams}) == 3
    scores = [output.cumulative_logprob or 0.0 for output in result.outputs]
    assert scores == sorted(scores, reverse=True)
    greedy = llm.generate("Paris is", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0))[0]
    assert scores[0] >= (greedy.outputs[0].cumulative_logprob or 0.0) - 1e-4


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Paris?"}]
    (result,) = llm.chat(messages, GREEDY)
    text = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is Paris?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert result.prompt == text
    assert result.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    both = llm.chat([messages, messages[1:]], GREEDY)
    assert both[0].outputs == result.outputs
    assert both[1].prompt_token_ids != both[0].prompt_token_ids


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_prompt_that_holds_bos_gets_no_second_one(tmp_path: Path, kind: str) -> None:
    """Case 18."""
    with LLM(write_served_artifact(tmp_path / "a", kind), executor_factory="tiny_served:open_hash") as llm:
        bos, text = llm.tokenizer.bos_token_id, llm.tokenizer.special_tokens["bos_token"]
        assert bos is not None
        (result,) = llm.generate(text + "Where is Paris?", GREEDY)
        assert result.prompt_token_ids.count(bos) == 1
        (bare,) = llm.generate("Where is Paris?", GREEDY)
        assert bare.prompt_token_ids.count(bos) == (1 if llm.tokenizer.adds_bos else 0)


def test_prompt_and_max_tokens_over_the_context_name_all_numbers(llm: LLM) -> None:
    """Case 16."""
    prompt = {"prompt_token_ids": [1] * 200}
    with pytest.raises(RequestError, match=r"200.*100.*300.*256") as caught:
        llm.generate(prompt, SamplingParams(max_tokens=100))
    assert caught.value.param == "max_tokens"
    (result,) = llm.generate(prompt, SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 56
    with pytest.raises(RequestError, match=r"300.*256"):
        llm.generate({"prompt_token_ids": [1] * 300}, GREEDY)
    with pytest.raises(RequestError):
        llm.generate("Paris", SamplingParams(max_tokens=10**30))
    assert len(llm.generate("Paris", GREEDY)[0].outputs[0].token_ids) == 12


def test_truncation_keeps_the_end_of_the_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, truncate_prompt_tokens=3)
    (result,) = llm.generate({"prompt_token_ids": list(range(1, 300))}, params)
    assert result.prompt_token_ids == [297, 298, 299]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, truncate_prompt_tokens=-1)
    (result,) = llm.generate({"prompt_token_ids": list(range(1, 300))}, params)
    assert result.prompt_token_ids == list(range(300 - 244, 300))


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1, 512]}, "512.*0 to 511"),
        ({"prompt_token_ids": [1, -1]}, "-1"),
        ({"prompt_token_ids": [1, 2.5]}, "2.5"),
        ({"prompt_token_ids": [True]}, "True"),
        ({"prompt_token_ids": "text"}, "list of token ids"),
        ({"prompt_token_ids": None}, "list of token ids"),
        ({"text": "x"}, "'prompt'"),
        ({}, "'prompt'"),
        ({"prompt": 5}, "'prompt'"),
        (5, "prompt"),
        (None, "prompt"),
        ("\ud800", "Unicode"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompt: object, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        llm.generate(prompt, GREEDY)  # type: ignore[arg-type]


def test_a_bad_one_of_many_is_named_and_nothing_runs(llm: LLM) -> None:
    before = llm.stats().generation_tokens
    with pytest.raises(RequestError, match=r"^prompt 2: .*empty"):
        llm.generate(["a", "b", "", "d"], GREEDY)
    with pytest.raises(RequestError, match=r"^prompt 1: .*temperature"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=-1)])
    with pytest.raises(PlancastError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    assert llm.stats().generation_tokens == before


def test_chat_refuses_what_is_no_conversation(llm: LLM) -> None:
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], GREEDY)


def test_an_interrupt_aborts_what_runs(llm: LLM) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i, 1] for i in range(100)], GREEDY, progress=interrupt)
    stats = llm.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert stats.num_free_blocks == stats.num_blocks


def test_options_reach_the_engine_and_bad_ones_are_named(artifact: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    with LLM(artifact, executor_factory="tiny_served:open_hash", num_blocks=40, iteration_log=str(log)) as llm:
        llm.generate("Paris", GREEDY)
        assert llm.ready.num_blocks == llm.stats().num_blocks == 40
    assert log.read_text().count("\n") >= 12
    with LLM(artifact, executor_factory="tiny_served:open_hash", kv_cache_memory="64KiB") as llm:
        assert 0 < llm.ready.kv_cache_bytes <= 65536
    hash_model: dict[str, Any] = {"executor_factory": "tiny_served:open_hash"}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"colour": "blue"}, "unknown engine option colour"),
        ({"kv_cache_memory": "lots"}, "not a size"),
        ({"kv_cache_memory": "1000TiB"}, "does not fit"),
        ({"kv_cache_memory": 1}, "holds no block"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_context_len": 10_000}, "10000.*256"),
        ({"verify": "never"}, "quick or full"),
        ({"executor_factory": "nowhere:nothing"}, "no executor factory"),
    ]
    for options, problem in refused:
        with pytest.raises(PlancastError, match=problem):
            LLM(artifact, **(hash_model | options))
    with pytest.raises(ArtifactError, match="no such artifact"):
        LLM(tmp_path / "nothing")


def test_a_request_that_can_never_fit_its_pool_is_refused_with_the_numbers(artifact: Path) -> None:
    """Case 15."""
    with LLM(artifact, executor_factory="tiny_served:open_hash", num_blocks=4) as llm:
        with pytest.raises(RequestError, match=r"\b4\b"):
            llm.generate({"prompt_token_ids": [1] * 60}, GREEDY)
        assert llm.generate("Paris", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].finished


def test_a_refused_request_among_many_leaves_the_others(artifact: Path) -> None:
    with LLM(artifact, executor_factory="tiny_served:open_hash", num_blocks=8) as llm:
        prompts = [[1, 2], [1] * 60, [3, 4]]
        results = dict(llm.as_completed(prompts, GREEDY))
        assert isinstance(results[1].error, RequestError)
        assert results[0].outputs[0].token_ids == expected([1, 2])
        assert results[2].outputs[0].token_ids == expected([3, 4])


def test_closing_is_final_and_repeatable(artifact: Path) -> None:
    threads = threading.active_count()
    llm = LLM(artifact, executor_factory="tiny_served:open_hash")
    llm.close()
    llm.close()
    assert threading.active_count() == threads
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("Paris", GREEDY)


def test_dropping_the_last_reference_ends_the_engine(artifact: Path) -> None:
    threads = threading.active_count()
    llm = LLM(artifact, executor_factory="tiny_served:open_hash")
    llm.generate("Paris", GREEDY)
    gone = weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    assert threading.active_count() == threads


def test_out_of_process_gives_the_same(artifact: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True)
    with LLM(artifact, in_process=False, executor_factory="tiny_served:open_hash") as other:
        assert other.ready.pid != llm.ready.pid
        results, theirs = llm.generate(TEXTS, params), other.generate(TEXTS, params)
        assert [result.outputs for result in theirs] == [result.outputs for result in results]
        assert other.stats().num_running == 0
