"""`AsyncLLM`: streams of deltas, their cancellation, slow consumers, and the death of the engine under them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_model import HashModelExecutor
from tiny_served import write_served_artifact

from runtime.async_llm import AsyncLLM
from runtime.errors import EngineDeadError, OverloadedError, QueueTimeoutError, RequestError
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_artifact(tmp_path_factory.mktemp("served") / "tiny")


@asynccontextmanager
async def started(artifact: Path, *, in_process: bool = True, step_s: float = 0.0, **options: Any) -> AsyncIterator:
    options = {"executor_factory": "tiny_served:open_hash", "executor_args": {"step_s": step_s}} | options
    llm = await AsyncLLM.start(artifact, in_process=in_process, **options)
    async with llm:
        yield llm


def run(scenario: Callable[[], Awaitable[None]], timeout: float = 60.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout))  # type: ignore[arg-type]


def expected(prompt: list[int], length: int = 16) -> list[int]:
    model, history = HashModelExecutor(512), list(prompt)
    for _ in range(length):
        history.append(int(model.logits_after(history).argmax()))
    return history[len(prompt) :]


async def tokens_of(stream: AsyncIterator[RequestOutput], index: int = 0) -> list[int]:
    return [
        token
        async for output in stream
        for sequence in output.outputs
        if sequence.index == index
        for token in sequence.token_ids
    ]


async def until_idle(llm: AsyncLLM) -> None:
    """The engine has nothing left, and all blocks are free: within a step or so."""
    stats = await llm.stats()
    for _ in range(200):
        if stats.num_running == stats.num_waiting == 0:
            assert stats.num_free_blocks == stats.num_blocks
            return
        await asyncio.sleep(0.005)
        stats = await llm.stats()
    raise AssertionError(f"still busy: {stats}")


@pytest.mark.parametrize("in_process", [True, False])
def test_streams_run_side_by_side(artifact: Path, in_process: bool) -> None:
    async def scenario() -> None:
        async with started(artifact, in_process=in_process) as llm:
            prompts = [[i + 1, 2, 3] for i in range(16)]
            answers = await asyncio.gather(*(tokens_of(llm.generate(prompt, GREEDY)) for prompt in prompts))
            assert answers == [expected(prompt) for prompt in prompts]
            assert llm.num_unfinished == 0
            assert llm.is_alive
            assert llm.max_context_len == 256

    run(scenario)


def test_a_stream_of_n_sequences_keeps_them_apart(artifact: Path) -> None:
    async def scenario() -> None:
        params = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=10, ignore_eos=True)
        async with started(artifact) as llm:
            texts: dict[int, str] = {0: "", 1: "", 2: ""}
            async for output in llm.generate("Paris is", params):
                for sequence in output.outputs:
                    texts[sequence.index] += sequence.text
            whole = [output async for output in llm.generate("Paris is", params, final=True)]
            assert len(whole) == 1
            assert texts == {sequence.index: sequence.text for sequence in whole[0].outputs}

    run(scenario)


def test_what_is_wrong_is_raised_at_the_call(artifact: Path) -> None:
    async def scenario() -> None:
        async with started(artifact) as llm:
            for prompt, params, problem in (
                ("", GREEDY, "empty"),
                ("Paris", SamplingParams(temperature=-1), "temperature"),
                ([1] * 200, SamplingParams(max_tokens=100), r"200.*100.*256"),
                ("Paris", SamplingParams(best_of=3, n=1), "best_of"),
                ("Paris", SamplingParams(stop=["x"], detokenize=False), "stop"),
            ):
                with pytest.raises(RequestError, match=problem):
                    llm.generate(prompt, params)
            stream = llm.generate("Paris", LONG, request_id="mine")
            with pytest.raises(RequestError, match="mine"):
                llm.generate("Paris", GREEDY, request_id="mine")
            await stream.aclose()
            assert llm.num_unfinished == 0

    run(scenario)


def test_a_cancelled_consumer_frees_its_blocks(artifact: Path) -> None:
    """Case 13: by cancellation, by leaving the loop, by closing, by dropping, by abort."""

    async def scenario() -> None:
        async with started(artifact, step_s=0.005) as llm:
            task = asyncio.create_task(tokens_of(llm.generate([1, 2, 3], LONG)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_idle(llm)

            async for _ in llm.generate([1, 2, 3], LONG):
                break
            gc.collect()
            await until_idle(llm)

            async with llm.generate([1, 2, 3], LONG) as stream:
                await anext(stream)
            await until_idle(llm)

            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await tokens_of(llm.generate([1, 2, 3], LONG))
            await until_idle(llm)

            stream = llm.generate([1, 2, 3], LONG)
            await anext(stream)
            await llm.abort(stream.request_id)
            outputs = [output async for output in stream]
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
            await until_idle(llm)
            await llm.abort(["never was"])
            assert (await llm.stats()).requests_aborted == 5
            assert llm.num_unfinished == 0

    run(scenario)


def test_a_dropped_stream_that_nobody_closed_is_aborted(artifact: Path) -> None:
    async def scenario() -> None:
        async with started(artifact, step_s=0.005) as llm:
            stream = llm.generate([1, 2, 3], LONG)
            cycle: list[Any] = [stream]
            cycle.append(cycle)
            del stream, cycle
            gc.collect()
            await until_idle(llm)
            assert llm.num_unfinished == 0

    run(scenario)


def test_a_slow_consumer_gets_merged_deltas_and_holds_nobody_back(artifact: Path) -> None:
    async def scenario() -> None:
        async with started(artifact) as llm:
            slow = llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            first = await anext(slow)
            fast = [await tokens_of(llm.generate([i, 5], GREEDY)) for i in range(1, 9)]
            assert fast == [expected([i, 5]) for i in range(1, 9)]
            await until_idle(llm)
            rest = [output async for output in slow]
            assert len(rest) == 1, "what nobody took is one delta"
            assert rest[0].finished
            assert len(first.outputs[0].token_ids) + len(rest[0].outputs[0].token_ids) == 100

    run(scenario)


def test_the_loop_stays_free_while_the_engine_loads_and_works(artifact: Path) -> None:
    async def scenario() -> None:
        async def watch(gaps: list[float]) -> None:
            before = time.monotonic()
            while True:
                await asyncio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - before)
                before = now

        gaps: list[float] = []
        watcher = asyncio.create_task(watch(gaps))
        async with started(artifact, in_process=False) as llm:
            await asyncio.gather(*(tokens_of(llm.generate([i, 2], GREEDY)) for i in range(1, 20)))
        watcher.cancel()
        assert len(gaps) > 10, "the loop was blocked"

    run(scenario)


def test_32_streams_outlive_a_killed_engine(artifact: Path) -> None:
    """Text, tokens and log probabilities are those of an undisturbed run, and nothing comes twice."""
    stops = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, stop=["e"])
    scored = SamplingParams(temperature=0.9, seed=1, max_tokens=60, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    pair = SamplingParams(n=2, temperature=0.9, seed=2, max_tokens=60, ignore_eos=True, presence_penalty=1.0)
    plain = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    bound = SamplingParams(temperature=0.7, seed=3, max_tokens=60, structured_outputs={"regex": "[a-z ]{40,80}"})
    jobs = [([i + 1, 9, 8], [plain, scored, pair, stops, bound][i % 5]) for i in range(32)]

    async def collect(llm: AsyncLLM, job: tuple[list[int], SamplingParams], counts: list[int]) -> RequestOutput:
        whole: RequestOutput | None = None
        async for output in llm.generate(*job):
            if whole is None:
                whole = output
            else:
                whole.add(output)
            counts[0] += 1
        assert whole is not None
        whole.outputs.sort(key=lambda sequence: sequence.index)
        return whole

    async def scenario() -> None:
        async with started(artifact) as llm:
            calm = await asyncio.gather(*(collect(llm, job, [0]) for job in jobs))
        async with started(artifact, in_process=False, step_s=0.004) as llm:
            counts = [0]
            tasks = [asyncio.create_task(collect(llm, job, counts)) for job in jobs]
            for target in (200, 700):
                while counts[0] < target:
                    await asyncio.sleep(0.01)
                os.kill(llm.ready.pid, signal.SIGKILL)
            disturbed = await asyncio.gather(*tasks)
            assert llm.num_restarts == 2
            for ours, theirs in zip(disturbed, calm, strict=True):
                for one, other in zip(ours.outputs, theirs.outputs, strict=True):
                    assert (one.text, one.token_ids) == (other.text, other.token_ids)
                    assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
                    assert one.logprobs == other.logprobs
                    assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob)
                assert ours.prompt_logprobs == theirs.prompt_logprobs
            await until_idle(llm)

    run(scenario, 120)


def test_a_dead_engine_ends_every_stream_with_the_reason(artifact: Path) -> None:
    async def scenario() -> None:
        async with started(artifact, in_process=False, step_s=0.01, max_restarts=0) as llm:
            streams = [llm.generate([i, 2], LONG) for i in range(1, 5)]
            for stream in streams:
                await anext(stream)
            os.kill(llm.ready.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(EngineDeadError, match="signal 9"):
                    await tokens_of(stream)
            assert not llm.is_alive
            with pytest.raises(EngineDeadError, match="signal 9"):
                llm.generate("Paris", GREEDY)
            with pytest.raises(EngineDeadError, match="signal 9"):
                await llm.stats()

    run(scenario)


def test_refusals_of_the_core_come_as_their_own_errors(artifact: Path) -> None:
    async def scenario() -> None:
        options = {"max_num_seqs": 1, "max_num_waiting": 1, "queue_timeout": 0.05, "step_s": 0.01}
        async with started(artifact, **options) as llm:
            running = llm.generate([1, 2], LONG)
            await anext(running)
            waiting = llm.generate([3, 4], GREEDY)
            refused = llm.generate([5, 6], GREEDY)
            with pytest.raises(OverloadedError):
                await tokens_of(refused)
            with pytest.raises(QueueTimeoutError):
                await tokens_of(waiting)
            await running.aclose()
            await until_idle(llm)

    run(scenario)


def test_closing_drains_then_ends(artifact: Path) -> None:
    """Case 21, as far as the engine goes."""

    async def scenario() -> None:
        async with started(artifact, in_process=False, step_s=0.005) as llm:
            short, long = llm.generate([1, 2], GREEDY), llm.generate([3, 4], LONG)
            first = (await anext(short)).outputs[0].token_ids
            await anext(long)
            pid = llm.ready.pid
            closing = asyncio.create_task(llm.close(drain_s=0.3))
            assert first + await tokens_of(short) == expected([1, 2])
            with pytest.raises(EngineDeadError, match="shut down"):
                await tokens_of(long)
            await closing
            assert not Path(f"/proc/{pid}").exists()
            with pytest.raises(EngineDeadError, match="shut down"):
                llm.generate([1], GREEDY)

    run(scenario)


def test_nothing_is_left_after_many_lives(artifact: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def life(in_process: bool) -> None:
        async with started(artifact, in_process=in_process) as llm:
            await tokens_of(llm.generate([1, 2], GREEDY))
            abandoned = llm.generate([3, 4], LONG)
            await anext(abandoned)

    run(lambda: life(False))
    threads, files = threading.active_count(), open_files()
    for in_process in (True, False, True, False):
        run(lambda in_process=in_process: life(in_process))
    assert threading.active_count() <= threads
    assert open_files() <= files


def test_structured_output_is_checked_before_it_is_sent_and_then_kept(artifact: Path) -> None:
    async def scenario() -> None:
        schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
        async with started(artifact, in_process=False) as llm:
            await llm.check_structured_outputs({"json": schema})
            for bad in ({"json": {"type": "nonsense"}}, {"regex": "("}, {"colour": 1}, {}):
                with pytest.raises(RequestError):
                    await llm.check_structured_outputs(bad)
                with pytest.raises(RequestError):
                    llm.generate("Paris", SamplingParams(structured_outputs=bad))
            params = SamplingParams(temperature=1.0, seed=1, max_tokens=100, structured_outputs={"json": schema})
            (output,) = [output async for output in llm.generate("Paris", params, final=True)]
            assert isinstance(json.loads(output.outputs[0].text)["ok"], bool)

    run(scenario)


def test_the_model_is_at_hand(artifact: Path) -> None:
    async def scenario() -> None:
        async with started(artifact) as llm:
            assert llm.manifest.name == "tiny-byte_level"
            assert llm.tokenize("Paris is") == llm.tokenizer.encode("Paris is")
            messages = [{"role": "user", "content": "Hello"}]
            assert llm.render_chat(messages).endswith("<|im_start|>assistant\n")
            prompt = llm.chat_prompt(messages)
            assert llm.tokenizer.decode(prompt["prompt_token_ids"], skip_special_tokens=False) == prompt["prompt"]
            stream = llm.generate(prompt, GREEDY)
            assert stream.prompt_token_ids == prompt["prompt_token_ids"]
            assert len(await tokens_of(stream)) == 16
            stats = await llm.stats(with_blocks=True)
            assert len(stats.block_states) == stats.num_blocks == llm.ready.num_blocks
            assert await llm.reset_prefix_cache() > 0
            assert await llm.drain(1.0)

    run(scenario)
