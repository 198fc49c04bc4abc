"""What the client side and the engine core say to each other: typed messages, the same in and out of process.

The core deals in token ids only. Text (detokenizing, stop strings, log-probability text) is the client's, so that the
client alone knows what was delivered and can resume a request on a fresh core after a crash.
"""

from __future__ import annotations

from typing import Union

import msgspec

from runtime.sampling_params import SamplingParams


class EngineRequest(msgspec.Struct, kw_only=True, tag="add"):
    """One request for the core. Times are `time.monotonic()` seconds (one clock on one machine)."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    priority: int = 0  # lower runs first
    user: str | None = None  # fairness key
    cache_salt: str | None = None
    # Resume after a crash: what each of the n sequences has already delivered. They count as output: sampling
    # positions, penalties, min_tokens and max_tokens go on from there.
    resume_token_ids: list[list[int]] | None = None
    resume_finished: list[int] = []  # indices of the sequences that are over already, and must not run


class AbortRequests(msgspec.Struct, tag="abort"):
    """Requests to end whole, and single sequences of requests (id, index) that a stop string ended."""

    request_ids: list[str]
    sequences: list[tuple[str, int]] = []


class Utility(msgspec.Struct, tag="utility"):
    """A call that is answered by one `UtilityReply`: "stats", "reset_prefix_cache", "set_speculation", "ping"."""

    call_id: int
    method: str
    args: dict = {}


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Finish the running requests for at most `drain_s` seconds, then exit."""

    drain_s: float = 0.0


ToEngine = Union[EngineRequest, AbortRequests, Utility, Shutdown]  # noqa: UP007 (msgspec reads it at run time)


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position: the sampled (or prompt) token first, then the top ones, likeliest first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SequenceDelta(msgspec.Struct, array_like=True):
    """What is new on one of a request's n sequences."""

    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | None = None  # the stop token id
    cumulative_logprob: float | None = None
    # Beam search hypotheses come whole, at the end, and replace what the sequence held.
    replaces: bool = False


class RequestDelta(msgspec.Struct, kw_only=True):
    """What one step brought for one request."""

    request_id: str
    sequences: list[SequenceDelta] = []
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None  # the pooled hidden state, f32
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    # Of the request so far, all its sequences together: drafts verified, their tokens, and the accepted ones of those.
    drafted: tuple[int, int, int] | None = None
    error: str | None = None  # for people; the request is over
    error_kind: str | None = None  # request | overloaded | queue_timeout | generation | engine


class StepOutputs(msgspec.Struct, kw_only=True, tag="outputs"):
    """Everything one engine step brought."""

    deltas: list[RequestDelta]
    stats: EngineStats | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the core. Counters only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # free for allocation, cached-but-unreferenced ones included
    num_cached_blocks: int = 0
    block_size: int = 0
    peak_used_blocks: int = 0  # the most that sequences held after a step
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # tokens asked for
    prefix_cache_hits: int = 0  # tokens found
    preemptions: int = 0
    swapped_out_blocks: int = 0  # written to the swap file, for whatever reason
    swapped_in_blocks: int = 0  # read from it
    num_spilled_blocks: int = 0  # evicted cached blocks that the swap file keeps now
    spilled_blocks: int = 0  # cached blocks that went there
    restored_blocks: int = 0  # those that a prefix hit brought back
    requests_in_slo: int = 0  # finished ones that met ttft_slo and tpot_slo (goodput); all where none is set
    tokens_in_slo: int = 0  # the output tokens of those
    requests_finished: int = 0
    requests_aborted: int = 0
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: list[int] = []
    spec_decode_draft_seconds: float = 0.0  # spent on proposing
    step_seconds: float = 0.0  # spent on steps, proposing included
    speculation_enabled: bool = False
    block_states: bytes = b""  # one byte a block: 0 free, 1 cached, 2 used, 3 shared; only when asked for


class UtilityReply(msgspec.Struct, kw_only=True, tag="reply"):
    call_id: int
    result: object = None
    error: str | None = None


class Ready(msgspec.Struct, kw_only=True, tag="ready"):
    """The core has loaded its engine and waits for requests."""

    pid: int
    num_blocks: int
    load_seconds: float
    load_source: str  # plan | blob | ir, or the backend's own word
    kv_cache_bytes: int = 0
    kv_cache_reason: str = ""  # how its size came about, for people
    notes: list[str] = []  # what works less well here than it could, for people


class EngineFailure(msgspec.Struct, kw_only=True, tag="failure"):
    """The last word of a core that could not load, or whose executor failed in a step."""

    error: str  # for people
    error_class: str = "EngineDeadError"  # the name of its class in runtime.errors
    traceback: str = ""  # for us


class Stopped(msgspec.Struct, tag="stopped"):
    """The last word of a core that was shut down."""


FromEngine = Union[StepOutputs, UtilityReply, Ready, EngineFailure, Stopped]  # noqa: UP007
