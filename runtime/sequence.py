"""A request and its sequences, as the scheduler sees them.

A sequence is one line of text: tokens, a block table, and how many of its tokens have their keys and values in the
cache. Everything else follows from these: one uncomputed token is a decode, several are a prefill (of a prompt, or of
what a preemption threw away, or of drafted tokens), and a roll-back is a smaller length.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from runtime.prefix_cache import CachedBlock

if TYPE_CHECKING:
    from runtime.messages import EngineRequest, TokenLogprobs
    from runtime.pooling import Pooler

NEVER = 1 << 62


class Sequence:
    """One of a request's sequences. Token ids are int32 arrays; block tables hold block ids in order of position."""

    __slots__ = (
        "block_ids",
        "commit_at",
        "digests",
        "draft_distributions",
        "draft_token_ids",
        "drafting",
        "finish_reason",
        "index",
        "num_committed",
        "num_computed",
        "prefix_node",
        "request",
        "sampling",
        "shared_tokens",
        "stop_reason",
        "tokens",
    )

    def __init__(self, request: Request, index: int, tokens: array[int]):
        self.request = request
        self.index = index
        self.tokens = tokens  # prompt and output
        self.block_ids: array[int] = array("i")
        self.num_computed = 0  # tokens whose keys and values are in the cache
        self.digests: list[bytes] = []  # of the leading full blocks, as far as they were needed
        self.num_committed = 0  # leading full blocks that were offered to the prefix cache
        self.prefix_node: CachedBlock | None = None  # the node of the last committed block
        self.commit_at = NEVER  # value of num_computed at which the next block is full
        # After a preemption: tokens that the request's first sequence computes for this one too. Until they are
        # computed (`num_computed` is smaller) this one waits.
        self.shared_tokens = 0
        self.draft_token_ids: list[int] = []  # proposed for this step, not part of `tokens`
        self.draft_distributions: Any = None  # what they were drawn from; None: point masses
        self.drafting: Any = None  # what speculation remembers; opaque here
        self.sampling: Any = None  # the sampler's state; opaque here
        self.finish_reason: str | None = None
        self.stop_reason: int | None = None

    @property
    def num_uncomputed(self) -> int:
        """Tokens that still have to go through the model before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.request.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.request.num_prompt_tokens :].tolist()

    def __repr__(self) -> str:
        return f"<{self.request.request_id}[{self.index}] {self.num_computed}/{len(self.tokens)} tokens>"


class Request:
    """A request in the core: its limits, its place in line, and its live sequences.

    A fresh request has one sequence until its prompt is computed, and then forks into `width` of them.
    """

    __slots__ = (
        "admissions_at_arrival",
        "arrival_time",
        "beam",
        "end_token_ids",
        "eos_token_ids",
        "finished",
        "first_scheduled_time",
        "first_token_time",
        "forked",
        "last_token_time",
        "live",
        "max_total_tokens",
        "message",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_draft_tokens",
        "num_drafts",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "pooler",
        "priority",
        "prompt_logprobs",
        "protected",
        "rank",
        "reads_cache",
        "request_id",
        "resumed",
        "root",
        "sequences",
        "stop_token_ids",
        "swapped",
        "unshared_blocks",
        "user",
        "wants_prompt_logprobs",
        "width",
    )

    def __init__(
        self,
        message: EngineRequest,
        rank: tuple[int, int],
        width: int,
        max_total_tokens: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ):
        params = message.params
        self.message = message
        self.request_id = message.request_id
        self.params = params
        self.user = message.user
        self.priority = rank[0]
        self.rank = rank  # (priority, order of arrival): smaller runs first and is preempted last
        self.arrival_time = message.arrival_time
        self.width = width  # sequences that it runs side by side
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.max_total_tokens = max_total_tokens  # prompt and output of one sequence
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.sequences: list[Sequence] = []  # every one that was started, by index
        self.live: list[Sequence] = []  # the unfinished ones
        self.forked = width == 1
        self.beam: Any = None  # the beam search's state
        self.root: CachedBlock | None = None  # where its prefix chain starts
        self.reads_cache = True
        self.wants_prompt_logprobs = False
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.pooler: Pooler | None = None  # takes the hidden states, where the engine embeds
        self.protected = False  # preempted often enough: its blocks are reserved, nothing preempts it
        # Swapped out: of each live sequence the computed tokens, and the slots that hold them.
        self.swapped: list[tuple[int, array[int]]] | None = None
        self.unshared_blocks = 0  # blocks of the prompt that its sequences cannot share after all
        self.resumed = False  # it had already delivered tokens when it came
        self.finished = False
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_drafts = 0  # verified ones, of all its sequences; their tokens, and the accepted ones of those
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.admissions_at_arrival = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None

    def max_blocks(self, block_size: int) -> int:
        """Blocks that it may hold at once at the very most: one copy of the prompt's full ones, and each one's tail."""
        width = len(self.live) if self.forked else self.width
        return (
            worst_case_blocks(self.num_prompt_tokens, self.max_total_tokens, width, block_size) + self.unshared_blocks
        )

    def __repr__(self) -> str:
        return f"<request {self.request_id} rank={self.rank} live={self.live}>"


def worst_case_blocks(num_prompt_tokens: int, max_total_tokens: int, width: int, block_size: int) -> int:
    """Distinct blocks of `width` sequences that share a prompt and grow to `max_total_tokens` each.

    The last token is sampled and never stored.
    """
    shared = num_prompt_tokens // block_size
    return shared + width * (-(-(max_total_tokens - 1) // block_size) - shared)
