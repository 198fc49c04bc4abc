"""What a request returns, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.errors import PlancastError


@dataclass(slots=True)
class Logprob:
    """One token's log probability (natural), its rank (1 is the likeliest), its text and its real UTF-8 bytes."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    token_bytes: bytes = b""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n sequences. In DELTA streams text, token_ids and logprobs hold only what is new."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # stop | length | abort
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def add(self, later: CompletionOutput) -> None:
        """Take in the delta that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        if later.cumulative_logprob is not None:
            self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Monotonic times in seconds; counts in tokens."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0  # verified ones, of all its sequences; their tokens, and the accepted ones of those
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verification brought: the accepted ones and one more. None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


@dataclass(slots=True)
class RequestOutput:
    """A request's state: its prompt and its n outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: PlancastError | None = None  # the request failed: the front end raises it
    embedding: bytes | None = None  # of an engine that embeds: the pooled hidden state, f32, not yet normalized

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.num_cached_tokens

    def add(self, later: RequestOutput) -> None:
        """Take in the delta that follows this one (or follows all that it holds so far)."""
        by_index = {output.index: output for output in self.outputs}
        for new in later.outputs:
            known = by_index.get(new.index)
            if known is None:
                self.outputs.append(new)
            else:
                known.add(new)
        if later.prompt_logprobs:
            self.prompt_logprobs = (self.prompt_logprobs or []) + later.prompt_logprobs
        self.finished, self.metrics, self.error = later.finished, later.metrics, later.error
        self.embedding = later.embedding


@dataclass(slots=True)
class EmbeddingOutput:
    """A prompt's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0
