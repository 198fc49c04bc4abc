"""Drives an `EngineCore` in tests: every step is followed by the invariant checks and by poisoning what nobody owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from device_model import DeviceHashModel
from drafters import ANY_DRAFTS, HashTarget
from tiny_model import HashModelExecutor, TinyModelExecutor

from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.messages import EngineRequest, RequestDelta, SequenceDelta, TokenLogprobs
from runtime.sampling_params import SamplingParams
from runtime.speculation.draft_engine import DraftEngine


class FakeClock:
    """Seconds that pass only when told to, or by `tick` at each look."""

    def __init__(self, tick: float = 0.0):
        self.now = 1000.0
        self.tick = tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def make_core(
    num_blocks: int = 100,
    *,
    model: str = "hash",
    block_size: int = 4,
    clock: Any = None,
    drafter: Any = None,
    **options: Any,
) -> EngineCore:
    """A core on a tiny model ("hash", "tiny", or "device": the hash model that runs beside the host), with small limits
    unless `options` (`EngineConfig`) say otherwise.

    `drafter`: a proposer whose drafts it takes at full length.
    """
    executor_class = {
        "hash": HashModelExecutor, "tiny": TinyModelExecutor, "with_head": HashTarget, "device": DeviceHashModel,
    }[model]  # fmt: skip
    config: dict[str, Any] = {"max_context_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32} | options
    executor = executor_class(num_blocks=num_blocks, block_size=block_size)
    extra = {} if clock is None else {"clock": clock}
    if drafter is not None:
        config = {"speculation": ANY_DRAFTS} | config
        extra["draft_engine"] = drafter
    return EngineCore(executor, EngineConfig(**config), **extra)


def make_request(request_id: str, prompt: list[int], *, greedy: bool = True, **options: Any) -> EngineRequest:
    """A request; `options` go to `SamplingParams` or, where `EngineRequest` has the field, to the request."""
    fields = {name: options.pop(name) for name in list(options) if name in EngineRequest.__struct_fields__}
    params = SamplingParams(**({"temperature": 0.0} if greedy else {"seed": 0}) | options)
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        arrival_time=fields.pop("arrival_time", 0.0),
        **fields,
    )


@dataclass
class Answer:
    """What a request got, over all its deltas."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    stop_reasons: dict[int, int | None] = field(default_factory=dict)
    cumulative: dict[int, float | None] = field(default_factory=dict)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    deltas: list[RequestDelta] = field(default_factory=list)
    error: str | None = None
    error_kind: str | None = None
    finished: bool = False

    def take(self, delta: RequestDelta) -> None:
        assert not self.finished, f"a delta after the end: {delta}"
        self.deltas.append(delta)
        self.finished, self.error, self.error_kind = delta.finished, delta.error, delta.error_kind
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "prompt log probabilities came twice"
            self.prompt_logprobs = delta.prompt_logprobs
        for part in delta.sequences:
            self._take_sequence(part)

    def _take_sequence(self, part: SequenceDelta) -> None:
        assert part.index not in self.finish_reasons, f"sequence {part.index} goes on after its end"
        if part.replaces:
            self.tokens[part.index] = []
        self.tokens.setdefault(part.index, []).extend(part.new_token_ids)
        self.logprobs.setdefault(part.index, []).extend(part.logprobs or [])
        self.cumulative[part.index] = part.cumulative_logprob
        if part.finish_reason is not None:
            self.finish_reasons[part.index], self.stop_reasons[part.index] = part.finish_reason, part.stop_reason


class Driver:
    """A core and the answers so far."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.answers: dict[str, Answer] = {}

    def add(self, request: EngineRequest) -> None:
        self.answers[request.request_id] = Answer()
        self.core.add_request(request)

    def step(self) -> None:
        outputs = self.core.step()
        for delta in outputs.deltas:
            self.answers[delta.request_id].take(delta)
        self.core.check()
        poison_unowned(self.core)
        drafter = self.core.speculator and self.core.speculator.proposers[0]
        if isinstance(drafter, DraftEngine):
            drafter.check()
            poison_unowned(drafter)

    def run(self, max_steps: int = 3000) -> dict[str, Answer]:
        """Step until nothing is left. Fails when that takes more than `max_steps`."""
        for _ in range(max_steps):
            if not self.core.has_work():
                return self.answers
            self.step()
        raise AssertionError(f"not done after {max_steps} steps: {self.core.scheduler.running}")

    def tokens(self) -> dict[str, list[int]]:
        """The tokens of each request's first sequence."""
        return {request_id: answer.tokens.get(0, []) for request_id, answer in self.answers.items()}


def poison_unowned(core: EngineCore | DraftEngine) -> None:
    """Destroy what lies in blocks that neither a sequence nor the prefix cache owns."""
    pool = core.kv.pool
    core.executor.poison(  # type: ignore[attr-defined]
        [b for b in range(pool.num_blocks) if not pool.ref_counts[b] and not pool.cached[b]]
    )


def run_alone(request: EngineRequest, **options: Any) -> Answer:
    """The request's answer on a core of its own, without a prefix cache and in whole chunks."""
    driver = Driver(
        make_core(**{"num_blocks": 400, "enable_prefix_caching": False, "max_num_batched_tokens": 256} | options)
    )
    driver.add(request)
    return driver.run()[request.request_id]


def random_prompts(count: int, *, seed: int = 0, vocab_size: int = 50, longest: int = 40) -> list[list[int]]:
    """Prompts of 1 to `longest` random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, rng.integers(1, longest + 1)).tolist() for _ in range(count)]
