"""A listener for engine clients that deals in token ids: it keeps what was delivered."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import msgspec

from runtime.messages import AbortRequests, EngineRequest, RequestDelta
from runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def request(request_id: str, prompt: list[int], params: SamplingParams = GREEDY, **fields) -> EngineRequest:
    fields.setdefault("arrival_time", time.monotonic())
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, **fields)


class Recorder:
    """Keeps each request's tokens by sequence. `wait` blocks until all requests of interest are over."""

    def __init__(self) -> None:
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.finished: dict[str, RequestDelta] = {}
        self.num_delivered = 0
        self._changed = threading.Condition()

    def add(self, message: EngineRequest) -> EngineRequest:
        self.requests[message.request_id] = message
        return message

    def on_outputs(self, deltas: list[RequestDelta]) -> AbortRequests | None:
        with self._changed:
            for delta in deltas:
                assert delta.request_id not in self.finished, f"{delta.request_id} goes on after its end"
                for sequence in delta.sequences:
                    self.tokens[delta.request_id][sequence.index] += sequence.new_token_ids
                    self.num_delivered += len(sequence.new_token_ids)
                if delta.finished:
                    self.finished[delta.request_id] = delta
            self._changed.notify_all()
        return None

    def resume_request(self, request_id: str) -> EngineRequest:
        with self._changed:
            message = self.requests[request_id]
            tokens = self.tokens[request_id]
            resumed = [list(tokens[index]) for index in range(message.params.num_sequences)]
            return msgspec.structs.replace(message, resume_token_ids=resumed)

    def wait(self, *request_ids: str, timeout: float = 60.0) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: all(name in self.finished for name in request_ids), timeout)
        assert done, f"unfinished after {timeout} s: {[name for name in request_ids if name not in self.finished]}"

    def wait_for_tokens(self, count: int, timeout: float = 60.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_delivered >= count, timeout)
