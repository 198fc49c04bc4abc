"""Engines that run the same requests side by side: a step of one after a step of another, the order drawn anew.

What disturbs a machine for longer than a step, its clock above all, then meets all of them alike. One after another, a
second each, the same engine twice gave ratios a fifth apart; by turns, two hundredths.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.engine_core import EngineCore
from runtime.messages import EngineRequest
from runtime.sampling_params import SamplingParams


@dataclass(slots=True)
class Played:
    """What one engine did. `seconds` and `cpu_seconds` are those of its steps; `answers`: token ids, by prompt."""

    answers: list[list[int]]
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers))


def play_by_turns(
    cores: Mapping[str, EngineCore], prompts: Sequence[Sequence[int]], params: SamplingParams, order: random.Random
) -> dict[str, Played]:
    """Run the prompts (token ids) on every core to their ends, all of them at once on each.

    Raises `RuntimeError`: a core refused one.
    """
    played = {name: Played([[] for _ in prompts]) for name in cores}
    for core in cores.values():
        for place, prompt in enumerate(prompts):
            core.add_request(
                EngineRequest(
                    request_id=str(place), prompt_token_ids=list(prompt), params=params, arrival_time=core.clock()
                )
            )
    live = list(cores)
    while live:
        order.shuffle(live)
        for name in live:
            _step(cores[name], played[name])
        live = [name for name in live if cores[name].has_work()]
    return played


def _step(core: EngineCore, played: Played) -> None:
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = core.step()
    played.seconds += time.perf_counter() - wall
    played.cpu_seconds += time.process_time() - cpu
    for delta in outputs.deltas:
        if delta.error is not None:
            raise RuntimeError(f"prompt {delta.request_id} was refused: {delta.error}")
        answer = played.answers[int(delta.request_id)]
        for part in delta.sequences:
            answer += part.new_token_ids
