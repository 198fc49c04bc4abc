"""How much of the allocated KV cache holds nothing: paged blocks against reserved sequences, on one length mix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.core_workloads import Job, make_jobs, play, sharegpt_lengths
from bench.fake_executor import FakeExecutor, SimulatedClock
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.messages import EngineRequest
from runtime.sampling_params import SamplingParams


@dataclass(slots=True)
class Waste:
    """Shares of allocated cells that hold no token, as means over the run. `reserved_*`: a baseline that reserves."""

    block_size: int
    paged: float
    reserved_context: float  # each sequence reserves the whole context
    reserved_exact: float  # each reserves its final length, known beforehand (an oracle)


def measure_waste(
    block_size: int, *, num_jobs: int = 400, max_num_seqs: int = 64, max_context_len: int = 2048, every: int = 4
) -> Waste:
    """Play a ShareGPT-like mix, looking at all blocks every few steps."""
    jobs = make_jobs(sharegpt_lengths(num_jobs, max_context_len=max_context_len))
    core = _core(block_size, max_num_seqs, max_context_len, enable_prefix_caching=False)
    held = stored = context = exact = steps = 0

    def look(core: EngineCore) -> None:
        nonlocal held, stored, context, exact, steps
        steps += 1
        if steps % every:
            return
        report = core.kv_report()
        held += report.held_blocks * block_size
        stored += report.stored_tokens
        running = core.scheduler.running
        context += max_context_len * len(running)
        exact += sum(request.max_total_tokens for request in running)

    play(core, jobs, look)
    return Waste(block_size, 1 - stored / held, 1 - stored / context, 1 - stored / exact)


@dataclass(slots=True)
class Sharing:
    """Blocks at the end of `n` samples of one prompt, and what they would be without sharing."""

    n: int
    prompt_tokens: int
    output_tokens: int
    blocks: int
    unshared_blocks: int

    @property
    def saved(self) -> float:
        return 1 - self.blocks / self.unshared_blocks


def measure_sharing(n: int = 8, prompt_tokens: int = 1000, output_tokens: int = 100, block_size: int = 32) -> Sharing:
    """`n` samples of one prompt."""
    core = _core(block_size, n, prompt_tokens + output_tokens)
    params = SamplingParams(n=n, seed=0, max_tokens=output_tokens, ignore_eos=True)
    prompt = make_jobs([(prompt_tokens, output_tokens)])[0].prompt
    core.add_request(EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival_time=0.0))
    blocks = unshared = 0
    while core.has_work():
        core.step()
        report = core.kv_report()
        if report.table_entries >= unshared:
            blocks, unshared = report.held_blocks, report.table_entries
    return Sharing(n, prompt_tokens, output_tokens, blocks, unshared)


@dataclass(slots=True)
class Reuse:
    """Prompt tokens computed for a prompt, and for a second one with the same beginning."""

    first: int
    second: int

    @property
    def saved(self) -> float:
        return 1 - self.second / self.first


def measure_reuse(shared_tokens: int = 1000, own_tokens: int = 16, block_size: int = 32) -> Reuse:
    """Two requests with `shared_tokens` in common, one after the other."""
    core = _core(block_size, 4, 2048)
    shared = make_jobs([(shared_tokens, 1)])[0].prompt
    computed = []
    for ending in range(2):
        cached = core.stats().prefix_cache_hits
        prompt = shared + [ending] * own_tokens
        play(core, [Job(0.0, prompt, 2)])
        computed.append(len(prompt) - (core.stats().prefix_cache_hits - cached))
    return Reuse(*computed)


def _core(block_size: int, max_num_seqs: int, max_context_len: int, **options: Any) -> EngineCore:
    num_blocks = max_num_seqs * -(-max_context_len // block_size)
    limits = {"max_num_seqs": max_num_seqs, "max_context_len": max_context_len, "max_num_batched_tokens": 512}
    executor = FakeExecutor(num_blocks, block_size=block_size)
    return EngineCore(executor, EngineConfig(**limits, **options), clock=SimulatedClock())
