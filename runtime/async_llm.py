"""`AsyncLLM`: a loaded engine for asyncio, with a stream of deltas for each request. The server is built on it."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runtime.client.frontend import Frontend, Prompt
from runtime.client.loaded_model import LoadedModel
from runtime.client.mailbox import Mailbox, deliver
from runtime.messages import EngineRequest, EngineStats
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams

__all__ = ["AsyncLLM", "RequestStream"]


class RequestStream:
    """One request's outputs: an async iterator of `RequestOutput`, each with what is new since the one before.

    Leaving it early aborts the request: `aclose`, the end of `async with`, cancelling the task that waits, or dropping
    the last reference. Iteration raises what the engine refused the request with: `RequestError`, `OverloadedError`,
    `QueueTimeoutError`, `EngineDeadError`.
    """

    def __init__(self, llm: AsyncLLM, request: EngineRequest, box: Mailbox):
        self._llm = llm
        self._box = box
        self._done = False
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._done:
            raise StopAsyncIteration
        try:
            output = await self._box.take()
        except BaseException:
            self._abort()
            raise
        self._done = output.finished
        if output.error is not None:
            raise output.error
        return output

    async def aclose(self) -> None:
        """Abort the request, unless it is over. Idempotent."""
        self._abort()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._abort()

    def __del__(self) -> None:
        if not self._done:
            self._llm._frontend.drop(self.request_id)

    def _abort(self) -> None:
        if not self._done:
            self._done = True
            self._llm._frontend.abort([self.request_id])


class AsyncLLM(LoadedModel):
    """A loaded engine. Blocks until it is ready: `await AsyncLLM.start(...)` does so beside the event loop.

        async with await AsyncLLM.start("artifacts/smollm2-135m-cpu") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(temperature=0)):
                print(output.outputs[0].text, end="")

    Args:
        artifact: its folder.
        in_process: False: the engine runs in a process of its own, which is replaced when it dies, and the streams go
            on. True: in a thread of this process.
        options: see `runtime.client.frontend.Frontend`: num_threads, kv_cache_memory, speculative_config,
            verify, max_logprobs, and the fields of `EngineConfig` (max_num_seqs, scheduling_policy, ...).

    Raises:
        PlancastError: the artifact, an option or the memory does not serve. The message says what to do.
    """

    def __init__(self, artifact: str | os.PathLike[str], *, in_process: bool = False, **options: Any):
        self._frontend: Frontend[Mailbox] = Frontend(artifact, deliver, in_process=in_process, **options)
        self._finalizer = weakref.finalize(self, self._frontend.close)

    @classmethod
    async def start(cls, artifact: str | os.PathLike[str], **options: Any) -> AsyncLLM:
        """Load without blocking the event loop. Arguments and errors as of the class."""
        return await asyncio.to_thread(cls, artifact, **options)

    # Requests

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
        final: bool = False,
    ) -> RequestStream:
        """Start a request. A plain call on the event loop: whatever is wrong with it is raised here, before it is sent.

        Args:
            prompt: text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            params: None: the model's own defaults.
            request_id: unique among the requests under way; None: one is made up.
            priority: lower runs first, under the priority policy.
            user: whom to be fair to.
            cache_salt: the prefix cache is shared only among requests with the same one.
            final: one output at the end instead of deltas; what `best_of` needs.

        Raises:
            RequestError: names the field, its value and its limit.
            EngineDeadError: there is no engine any more.
        """
        request, text = self._frontend.prepare(
            prompt,
            params if params is not None else self.default_sampling_params(),
            request_id=request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )
        box = Mailbox(asyncio.get_running_loop())
        self._frontend.submit(request, text, box, stream=not final)
        return RequestStream(self, request, box)

    def embed(
        self,
        prompt: Prompt,
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Start a request for a prompt's embedding; its one output has `embedding` set (`runtime.pooling`).

        Arguments and errors otherwise as of `generate`. Raises `RequestError` where the engine does not embed.
        """
        request, text = self._frontend.prepare_embedding(
            prompt,
            truncate_prompt_tokens=truncate_prompt_tokens,
            request_id=request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )
        box = Mailbox(asyncio.get_running_loop())
        self._frontend.submit(request, text, box, stream=False)
        return RequestStream(self, request, box)

    async def check_structured_outputs(self, structured_outputs: dict[str, Any]) -> None:
        """Compile a grammar beside the event loop. `generate` then finds it compiled; else it compiles in the call.

        Raises:
            RequestError: malformed, unsupported or too complex.
        """
        await asyncio.to_thread(self._frontend.check_structured_outputs, structured_outputs)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; their streams get a last output with finish reason "abort". Unknown ids are ignored."""
        self._frontend.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    # The model

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """A prompt's token ids, as `generate` takes it. Raises `RequestError`."""
        return self._frontend.tokenize(prompt, add_special_tokens=add_special_tokens)[1]

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as prompt text. Raises `RequestError` where there is no template, or it refuses."""
        return self._frontend.render_chat(messages, **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """A conversation as a prompt for `generate`. Options go to the template. Errors as of `render_chat`."""
        return self._frontend.chat_prompt(messages, **options)

    # The engine

    @property
    def is_alive(self) -> bool:
        """Whether requests are still taken."""
        return self._frontend.engine.is_alive

    @property
    def num_unfinished(self) -> int:
        return self._frontend.num_unfinished

    @property
    def num_restarts(self) -> int:
        """How often the engine's process was replaced."""
        return self._frontend.engine.num_restarts

    async def stats(self, with_blocks: bool = False) -> EngineStats:
        """A snapshot of the engine; `with_blocks` adds one byte a KV block. Raises `EngineDeadError`."""
        return await self._call("stats", with_blocks=with_blocks)

    async def reset_prefix_cache(self) -> int:
        """Forget every cached block. Returns how many there were. Raises `EngineDeadError`."""
        return await self._call("reset_prefix_cache")

    async def set_speculation(self, enabled: bool) -> bool:
        """Switch drafting on or off while requests run; no text changes by it. Returns what it was.

        Raises `PlancastError` where the engine was loaded without a method to draft with.
        """
        return await self._call("set_speculation", enabled=enabled)

    async def _call(self, method: str, **args: Any) -> Any:
        return await asyncio.wrap_future(self._frontend.engine.call(method, **args))

    async def drain(self, timeout: float) -> bool:
        """Wait until no request is under way, at most `timeout` seconds; returns whether it came to that."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.num_unfinished:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let what runs go on for at most `drain_s` seconds, and free the engine. Idempotent."""
        await asyncio.to_thread(self._frontend.close, drain_s)
        self._finalizer.detach()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
