"""The real model's engine is killed under its streams: every text is the one of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tiny_build import plancast_home, tiny_head, tiny_recipe, tiny_workshop

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


@pytest.mark.parametrize("name", ["draft_model", "eagle", "ngram"])
def test_a_kill_under_speculation_changes_no_text(name: str, tmp_path: Path) -> None:
    """Seeded and greedy streams of a tiny compiled engine; the run-time switch is as it was, too."""
    workshop = tiny_workshop()
    head = tiny_head(workshop / "model", tmp_path / "head")
    with plancast_home(workshop / "home"):
        from builder.build import build

        artifact = build(
            tiny_recipe(workshop / "model", "tiny-head", parity={"enabled": False}, draft_head=str(head)),
            tmp_path / "made",
        )
    config = {"method": name, "adaptive": False, "num_speculative_tokens": 3}
    if name == "draft_model":
        config["model"] = str(artifact)
    prompts = [{"prompt_token_ids": list(range(3, 8 + i))} for i in range(4)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=150, ignore_eos=True, presence_penalty=0.5)
        for i in range(4)
    ]
    with LLM(artifact, speculative_config="off", num_blocks=64) as llm:
        calm = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]

    async def scenario() -> tuple[list[list[int]], int, int, list[bool]]:
        async with await AsyncLLM.start(artifact, speculative_config=config, num_blocks=64) as llm:
            counted = 0

            async def collect(i: int) -> list[int]:
                nonlocal counted
                token_ids: list[int] = []
                async for output in llm.generate(prompts[i], params[i]):
                    for sequence in output.outputs:
                        token_ids += sequence.token_ids
                        counted += len(sequence.token_ids)
                return token_ids

            streams = [asyncio.create_task(collect(i)) for i in range(4)]
            while counted < 100:
                await asyncio.sleep(0.001)
            os.kill(llm.ready.pid, signal.SIGKILL)
            found = await asyncio.gather(*streams)
            drafts = (await llm.stats()).spec_decode_num_drafts
            switches = []
            for enabled in (False, True):
                await llm.set_speculation(enabled)
                os.kill(llm.ready.pid, signal.SIGKILL)
                while llm.num_restarts < 2 + enabled:
                    await asyncio.sleep(0.01)
                switches.append((await llm.stats()).speculation_enabled)
            return found, llm.num_restarts, drafts, switches

    found, restarts, drafts, switches = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert found == calm
    assert restarts == 3
    assert drafts > 0
    assert switches == [False, True]


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
