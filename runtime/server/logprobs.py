"""Log probabilities in the shapes that clients know. A token's bytes are its real ones, half a character included."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from runtime.outputs import Logprob
from runtime.server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from runtime.server.protocol.completions import CompletionLogprobs
from runtime.server.protocol.sampling import PromptLogprob, PromptLogprobs

# JSON has no -inf: a token that a mask forbids shows as OpenAI shows it.
LEAST = -9999.0


def token_text(entry: Logprob) -> str:
    """The token's text; bytes that are no text by themselves as OpenAI writes them, `bytes:\\xc4`."""
    try:
        return entry.token_bytes.decode() if entry.token_bytes else entry.decoded_token or ""
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.token_bytes)


def finite(value: float) -> float:
    """A log probability that JSON can say; rounding may have brought a certain one just above 0."""
    return min(0.0, max(value, LEAST))


def _top(position: dict[int, Logprob], count: int) -> list[Logprob]:
    """The `count` likeliest entries. The sampled token's own entry counts only where it is among them."""
    ranked = [entry for entry in position.values() if entry.rank is not None and entry.rank <= count]
    return sorted(ranked, key=lambda entry: entry.rank or 0)[:count]


def chat_logprobs(token_ids: Sequence[int], positions: Iterable[dict[int, Logprob]], top: int) -> ChatLogprobs:
    """`choices[].logprobs` of a chat completion: one entry a token, `top` alternatives each."""
    content = []
    for token, position in zip(token_ids, positions, strict=False):
        entry = position[token]
        alternatives = [
            TopLogprob(token=token_text(other), logprob=finite(other.logprob), bytes=list(other.token_bytes))
            for other in _top(position, top)
        ]
        content.append(
            TokenLogprob(
                token=token_text(entry),
                logprob=finite(entry.logprob),
                bytes=list(entry.token_bytes),
                top_logprobs=alternatives,
            )
        )
    return ChatLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[dict[int, Logprob] | None],
    top: int,
    offset: int = 0,
    decode: Callable[[list[int]], str] | None = None,
) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion.

    `offset` is where in the text the first token begins; `decode` gives the text of a prompt's first token, which has
    no entry, for want of a history.
    """
    made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, position in zip(token_ids, positions, strict=False):
        made.text_offset.append(offset)
        if position is None:
            text = decode([token]) if decode is not None else ""
            made.tokens.append(text)
            offset += len(text)
            made.token_logprobs.append(None)
            made.top_logprobs.append(None)
            continue
        entry = position[token]
        text = token_text(entry)
        made.tokens.append(text)
        made.token_logprobs.append(finite(entry.logprob))
        shown = {token_text(other): finite(other.logprob) for other in _top(position, top)}
        shown.setdefault(text, finite(entry.logprob))  # OpenAI: the sampled token is always there
        made.top_logprobs.append(shown)
        offset += len(entry.decoded_token or "")
    return made


def prompt_logprobs(positions: Sequence[dict[int, Logprob] | None] | None) -> PromptLogprobs | None:
    """vLLM's `prompt_logprobs`: a mapping a position, null for the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token): PromptLogprob(logprob=finite(entry.logprob), rank=entry.rank, decoded_token=token_text(entry))
            for token, entry in position.items()
        }
        for position in positions
    ]
