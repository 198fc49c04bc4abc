"""The exact recipe against transformers: token for token, however the requests are run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from runtime.llm import LLM
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

LENGTHS = (1, 2, 5, 17, 31, 32, 33, 64, 100, 129, 257, 600)  # tokens; both sides of a block's edge among them
NEW_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(smollm2_f32_artifact: Path) -> list[list[int]]:
    from bench.prompts import prompts_of_length
    from runtime.tokenizer import Tokenizer

    return prompts_of_length(Tokenizer.load(smollm2_f32_artifact).encode, list(LENGTHS))


def generate(artifact: Path, prompts: list[list[int]], **options: int) -> list[list[int]]:
    with LLM(artifact, kv_cache_memory=1 << 30, **options) as llm:
        results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.fixture(scope="module")
def alone(smollm2_f32_artifact: Path, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Each prompt's answer when nothing else runs."""
    with LLM(smollm2_f32_artifact, kv_cache_memory=1 << 30, enable_prefix_caching=False) as llm:
        yield [list(llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs[0].token_ids) for ids in prompts]


def test_alone_equals_transformers(prompts: list[list[int]], alone: list[list[int]]) -> None:
    """Every token is transformers' greedy choice after the tokens before it: so the whole answer is its answer."""
    import torch
    from transformers import AutoModelForCausalLM

    import zoo
    from builder.recipe import load_recipe

    folder = zoo.resolve(load_recipe("smollm2-135m-cpu-f32").model).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, alone, strict=True):
        assert len(answer) == NEW_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        np.testing.assert_array_equal(logits.argmax(-1).numpy(), answer, err_msg=f"prompt of {len(prompt)} tokens")


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 16},
        {"max_num_seqs": 16, "max_prefill_chunk": 7},
        {"max_num_seqs": 16, "max_prefill_chunk": 33},
        {"max_num_seqs": 4, "max_num_batched_tokens": 40},  # eight wait while four run
    ],
    ids=["one batch", "chunks of 7", "chunks of 33", "a small batch"],
)
def test_batches_equal_alone(
    options: dict[str, int], smollm2_f32_artifact: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Case 11."""
    assert generate(smollm2_f32_artifact, prompts, **options) == alone


def test_prompts_that_arrive_while_others_decode(
    smollm2_f32_artifact: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """A new prompt every few steps, in the middle of the others' answers."""
    import asyncio

    from runtime.async_llm import AsyncLLM

    async def run() -> list[list[int]]:
        llm = AsyncLLM(smollm2_f32_artifact, in_process=True, kv_cache_memory=1 << 30)
        answers: list[list[int]] = [[] for _ in prompts]
        arrived = [asyncio.Event() for _ in prompts]

        async def one(index: int) -> None:
            if index:
                await arrived[index - 1].wait()
            async for output in llm.generate({"prompt_token_ids": prompts[index]}, GREEDY, request_id=str(index)):
                answers[index] += delta(output)
                if len(answers[index]) >= 3:
                    arrived[index].set()

        await asyncio.gather(*(one(i) for i in range(len(prompts))))
        await llm.close()
        return answers

    assert asyncio.run(run()) == alone


def delta(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_same_prompt_twice_with_the_prefix_cache(
    smollm2_f32_artifact: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Case 10, over the real engine: the second answer starts from cached blocks and is the same."""
    with LLM(smollm2_f32_artifact, kv_cache_memory=1 << 30, enable_prefix_caching=True) as llm:
        for index in (8, 11):
            for turn in range(2):
                result = llm.generate({"prompt_token_ids": prompts[index]}, GREEDY)[0]
                assert list(result.outputs[0].token_ids) == alone[index]
                assert (result.num_cached_tokens > 0) == (turn == 1)
