"""Whether a request can run at all, decided when it arrives, and its `Request` if it can."""

from __future__ import annotations

from array import array

from runtime.config import EngineConfig
from runtime.errors import RequestError
from runtime.messages import EngineRequest
from runtime.pooling import Pooler
from runtime.sequence import Request, Sequence, worst_case_blocks


class RequestGate:
    """Turns messages into requests. Knows the engine's sizes; refuses with the numbers what can never fit them."""

    def __init__(self, config: EngineConfig, vocab_size: int, num_blocks: int, block_size: int):
        self.config = config
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        # A prompt to embed may fill the context: the one token that it is said to generate never comes.
        self._max_total = config.max_context_len + (config.pooling is not None)
        self._eos_token_ids = frozenset(config.eos_token_ids)
        self._arrivals = 0

    def admit(self, message: EngineRequest) -> Request:
        """The request, with its sequences at the tokens that they have already delivered.

        Raises:
            RequestError: parameters out of range, tokens outside the vocabulary, or more than the context, the
                sequence limit or the whole KV cache holds.
        """
        prompt, params = message.prompt_token_ids, message.params
        self._check_prompt(prompt)
        params.verify(
            vocab_size=self.vocab_size,
            max_context_len=self._max_total,
            prompt_len=len(prompt),
            max_logprobs=-1,
        )
        width = max(params.num_sequences, params.beam_width)
        if width > self.config.max_num_seqs:
            name = "beam_width" if params.beam_width else "n" if params.best_of is None else "best_of"
            raise RequestError(
                f"{name} is {width}, and this engine runs at most {self.config.max_num_seqs} sequences at once "
                f"(max_num_seqs)",
                name,
            )
        max_total_tokens = self._max_total_tokens(len(prompt), params.max_tokens, width)
        self._arrivals += 1
        priority = message.priority if self.config.scheduling_policy == "priority" else 0
        eos_token_ids = frozenset() if params.ignore_eos else self._eos_token_ids
        request = Request(message, (priority, self._arrivals), width, max_total_tokens, eos_token_ids)
        if params.prompt_logprobs is not None:
            request.wants_prompt_logprobs = True
            request.reads_cache = False  # a cached token has no logits
            request.prompt_logprobs.append(None)  # nothing precedes the first token
        if self.config.pooling is not None:
            request.pooler = Pooler(self.config.pooling)
            request.reads_cache = self.config.pooling == "last"  # the others want every token's hidden state
        self._add_sequences(request)
        return request

    def _check_prompt(self, prompt: list[int]) -> None:
        if not prompt:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        lowest, highest = min(prompt), max(prompt)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"the prompt holds token id {wrong}; this model's ids run from 0 to {self.vocab_size - 1}", "prompt"
            )

    def _max_total_tokens(self, prompt_len: int, max_tokens: int | None, width: int) -> int:
        """Tokens that one sequence may reach: what was asked for, or all that context and KV cache allow."""
        context, size = self._max_total, self.block_size
        wanted = prompt_len + (max_tokens or 1)
        if wanted > context:
            raise RequestError(
                f"the prompt has {prompt_len} tokens and max_tokens is {max_tokens or 'not set'}: together more than "
                f"the context of {context} tokens. Shorten the prompt or lower max_tokens",
                "max_tokens" if prompt_len < context else "prompt",
            )
        needed = worst_case_blocks(prompt_len, wanted, width, size)
        if needed > self.num_blocks:
            sequences = f" in {width} sequences" if width > 1 else ""
            raise RequestError(
                f"a prompt of {prompt_len} tokens and {wanted - prompt_len} new ones{sequences} need up to {needed} "
                f"KV blocks of {size} tokens, and the engine has {self.num_blocks}. Ask for less, or start the engine "
                f"with more KV cache memory",
                "max_tokens" if max_tokens else "prompt",
            )
        if max_tokens is not None:
            return wanted
        shared = prompt_len // size
        capacity = (shared + (self.num_blocks - shared) // width) * size
        return min(context, capacity + 1)  # the last token is sampled and not stored

    def _add_sequences(self, request: Request) -> None:
        """One sequence to compute the prompt; or, of a resumed request, all that are not over."""
        message = request.message
        delivered = message.resume_token_ids or []
        over = set(message.resume_finished)
        if request.params.beam_width or not (any(delivered) or over):
            tokens = array("i", message.prompt_token_ids)
            request.sequences = [Sequence(request, 0, tokens)]
            request.live = request.sequences[:]
            return
        request.resumed = request.forked = True
        request.wants_prompt_logprobs = False  # delivered before the first token
        for index in range(request.width):
            output = delivered[index] if index < len(delivered) else []
            self._check_resumed(request, output)
            sequence = Sequence(request, index, array("i", [*message.prompt_token_ids, *output]))
            request.sequences.append(sequence)
            if index in over:
                sequence.finish_reason = "resumed"
            else:
                request.live.append(sequence)
        self._count_unshared(request)

    def _count_unshared(self, request: Request) -> None:
        """A sequence that has not begun computes the prompt's last token itself: it cannot share a block that ends with
        it."""
        has_begun = [len(sequence.tokens) > request.num_prompt_tokens for sequence in request.live]
        if all(has_begun) or request.num_prompt_tokens % self.block_size:
            return
        request.unshared_blocks = len(has_begun) - 1
        needed = request.max_blocks(self.block_size)
        if needed > self.num_blocks:
            raise RequestError(
                f"{len(has_begun)} sequences of which some have no token yet need up to {needed} KV blocks, and the "
                f"engine has {self.num_blocks}",
                "resume_token_ids",
            )

    def _check_resumed(self, request: Request, output: list[int]) -> None:
        if request.num_prompt_tokens + len(output) > request.max_total_tokens:
            raise RequestError(
                f"{len(output)} tokens were delivered already, more than the request may have", "resume_token_ids"
            )
        if output and (min(output) < 0 or max(output) >= self.vocab_size):
            raise RequestError("a delivered token is outside the vocabulary", "resume_token_ids")
