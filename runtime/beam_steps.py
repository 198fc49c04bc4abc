"""Beam search in the core: the beams' moves carried out on block tables. Which moves, `runtime/beam.py` says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime.beam import BeamSearch
from runtime.messages import SequenceDelta
from runtime.scheduling.kv_manager import KvManager
from runtime.sequence import Request, Sequence


def start_beams(request: Request) -> None:
    """Give a fresh request its search. Its one sequence becomes the beams once the prompt is computed."""
    params = request.params
    request.beam = BeamSearch(
        beam_width=params.beam_width,
        n=params.n,
        eos_token_ids=request.end_token_ids,
        max_tokens=request.max_total_tokens - request.num_prompt_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        prompt_len=request.num_prompt_tokens,
        processors=request.live[0].sampling.processors,
    )


def advance_beams(request: Request, logits: NDArray[np.float32], kv: KvManager) -> int:
    """One step of the search on logits f32 [live beams, V]: fork, append, drop. Returns the tokens appended.

    A parent's first child takes over its blocks, further ones share them; parents without a child give theirs back.
    """
    parents = request.live
    moves = request.beam.step(logits)
    request.forked = True
    if request.beam.is_done:
        return len(moves)
    beams: list[Sequence] = []
    continued: set[int] = set()
    for move in moves:
        parent = parents[move.parent]
        if move.parent in continued:
            child = Sequence(request, len(beams), parent.tokens[:])
            kv.fork(parent, child)
        else:
            continued.add(move.parent)
            child = parent
        beams.append(child)
    for index, parent in enumerate(parents):
        if index not in continued:
            kv.release(parent)
    for index, (beam, move) in enumerate(zip(beams, moves, strict=True)):
        beam.index = index
        beam.tokens.append(move.token_id)
    request.live = beams
    request.sequences = beams[:]
    return len(moves)


def beam_result(request: Request) -> list[SequenceDelta]:
    """The best hypotheses, whole, best first. They replace whatever the request's sequences held."""
    results = []
    for index, hypothesis in enumerate(request.beam.hypotheses()):
        tokens, reason = hypothesis.token_ids, hypothesis.finish_reason
        stop_reason = None
        if reason == "stop" and tokens[-1] not in request.eos_token_ids:
            stop_reason = tokens[-1]
        results.append(SequenceDelta(index, tokens, None, reason, stop_reason, hypothesis.score, replaces=True))
    return results
