"""The real model's engine is killed under its streams: every text is the one of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from runtime.async_llm import AsyncLLM
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paperclip.",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=1234, max_tokens=24)
MEMORY = "256MiB"


@pytest.mark.model
def test_32_streams_of_the_real_model_outlive_two_kills(smollm2_f32_artifact: Path) -> None:
    with LLM(smollm2_f32_artifact, kv_cache_memory=MEMORY) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS] * 8
        params = [GREEDY if i < 16 else SEEDED for i in range(32)]
        calm = [result.outputs[0] for result in llm.generate(prompts, params)]

    async def scenario() -> tuple[list[str], list[list[int]], int]:
        async with await AsyncLLM.start(smollm2_f32_artifact, kv_cache_memory=MEMORY) as llm:
            num_tokens = 0

            async def collect(i: int) -> tuple[str, list[int]]:
                nonlocal num_tokens
                text, token_ids = "", []
                async for output in llm.generate(prompts[i], params[i]):
                    for sequence in output.outputs:
                        text += sequence.text
                        token_ids += sequence.token_ids
                        num_tokens += len(sequence.token_ids)
                return text, token_ids

            streams = [asyncio.create_task(collect(i)) for i in range(32)]
            for target in (160, 480):
                while num_tokens < target:
                    await asyncio.sleep(0.01)
                os.kill(llm.ready.pid, signal.SIGKILL)
            results = await asyncio.gather(*streams)
            return [text for text, _ in results], [ids for _, ids in results], llm.num_restarts

    texts, token_ids, restarts = asyncio.run(asyncio.wait_for(scenario(), 300))
    assert restarts == 2
    assert token_ids == [output.token_ids for output in calm]
    assert texts == [output.text for output in calm]
