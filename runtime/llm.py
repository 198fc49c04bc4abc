"""`LLM`: a loaded engine for plain Python. Many prompts in one call, or one as a stream."""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from runtime.client.frontend import Frontend, Prompt
from runtime.client.loaded_model import LoadedModel
from runtime.engine_process import EngineSpec
from runtime.errors import EngineDeadError, PlancastError, RequestError
from runtime.messages import EngineRequest, EngineStats
from runtime.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from runtime.pooling import check_dimensions, embedding_of
from runtime.sampling_params import SamplingParams

Message = Mapping[str, Any]
_Box = queue.SimpleQueue[RequestOutput]

# Requests handed to the engine at a time, as a multiple of those that it runs side by side.
_WINDOW = 4
_CALL_TIMEOUT_S = 60.0


class LLM(LoadedModel):
    """A loaded engine.

        with LLM("artifacts/smollm2-135m-cpu") as llm:
            for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0)):
                print(result.outputs[0].text)

    Args:
        artifact: its folder.
        in_process: True: the engine runs in a thread of this process. False: in a process of its own, which is replaced
            when it dies, and the requests go on.
        options: see `runtime.client.frontend.Frontend`: num_threads, kv_cache_memory, speculative_config,
            verify, max_logprobs, and the fields of `EngineConfig` (max_num_seqs, scheduling_policy, ...).

    Raises:
        PlancastError: the artifact, an option or the memory does not serve. The message says what to do.
    """

    def __init__(self, artifact: str | os.PathLike[str], *, in_process: bool = True, **options: Any):
        self._frontend: Frontend[_Box] = Frontend(artifact, _deliver, in_process=in_process, **options)
        self._finalizer = weakref.finalize(self, self._frontend.close)

    # Requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[[RequestOutput], None] = False,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """Complete prompts, all together in one batch as far as the engine's limits allow.

        Args:
            prompts: one, or a list. A prompt is text, `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: for all, or one a prompt; None: the model's own defaults.
            progress: True: a bar on standard error. A function: called with each result as it comes.
            priority: lower runs first, under the priority policy; for all, or one a prompt.

        Returns:
            One result a prompt, in the order of the prompts.

        Raises:
            RequestError: the first prompt or parameter that is invalid, before anything runs.
            PlancastError: a request failed; the others are aborted.
        """
        listed = _as_list(prompts)
        results: list[RequestOutput | None] = [None] * len(listed)
        with _reporter(progress, len(listed)) as report:
            for position, output in self.as_completed(listed, sampling_params, priority=priority):
                if output.error is not None:
                    raise output.error
                results[position] = output
                report(output)
        return [result for result in results if result is not None]

    def as_completed(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        labels: Sequence[str] | None = None,
    ) -> Generator[tuple[int, RequestOutput]]:
        """Complete prompts as `generate` does, and yield (position, result) as each ends. Closing aborts the rest.

        A result whose request failed has its `error` set; the others go on. `labels` name the prompts in errors.

        Raises:
            RequestError: at the call, for the first prompt or parameter that is invalid.
        """
        default = self.default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each(default, len(prompts), "sampling_params")
        priorities = _one_each(priority, len(prompts), "priority")
        prepared = []
        for i, prompt in enumerate(prompts):
            try:
                prepared.append(self._frontend.prepare(prompt, params[i], priority=priorities[i]))
            except RequestError as error:
                label = labels[i] if labels else f"prompt {i}" if len(prompts) > 1 else ""
                raise RequestError(f"{label}: {error}" if label else str(error), error.param) from None
        return self._as_completed(prepared)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | Callable[[RequestOutput], None] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list, through the model's chat template.

        A message is `{"role": "user", "content": "..."}`. Arguments, results and errors otherwise as of `generate`.
        """
        if not messages:
            raise RequestError("there are no messages: a conversation holds at least one", "messages")
        single = isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        prompts = [
            self.chat_prompt(conversation, tools=tools, add_generation_prompt=add_generation_prompt, **template_options)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, progress=progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | Callable[[RequestOutput], None] = False,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts, all together in one batch as far as the engine's limits allow.

        Args:
            dimensions: keep only so many of the vector's entries, before it is normalized; None: all.
            normalize: to length 1; None: as the recipe said.
            truncate_prompt_tokens: keep the last so many of each prompt; -1: as many as the context holds.
            prompts, progress, priority: as of `generate`.

        Raises:
            RequestError: the engine does not embed, or a prompt or argument is invalid; nothing runs then.
            PlancastError: a request failed; the others are aborted.
        """
        listed = _as_list(prompts)
        prepared = [
            self._frontend.prepare_embedding(prompt, truncate_prompt_tokens=truncate_prompt_tokens, priority=priority)
            for prompt in listed
        ]
        info = self.manifest.embedding
        if info is None:  # there were no prompts to refuse
            return []
        check_dimensions(dimensions, info)
        results: list[EmbeddingRequestOutput | None] = [None] * len(listed)
        with _reporter(progress, len(listed)) as report:
            for position, output in self._as_completed(prepared):
                if output.error is not None:
                    raise output.error
                vector = embedding_of(output, info, dimensions=dimensions, normalize=normalize)
                results[position] = EmbeddingRequestOutput(
                    output.request_id,
                    EmbeddingOutput(vector.tolist()),
                    output.prompt_token_ids,
                    num_cached_tokens=output.num_cached_tokens,
                )
                report(output)
        return [result for result in results if result is not None]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int = 4,
        max_tokens: int = 64,
        n: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        **params: Any,
    ) -> list[RequestOutput]:
        """The `n` best of `beam_width` beams for each prompt, likeliest first. Errors as of `generate`."""
        search = SamplingParams(
            beam_width=beam_width,
            max_tokens=max_tokens,
            n=n,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            temperature=0.0,
            **params,
        )
        return self.generate(prompts, search)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[RequestOutput]:
        """Complete one prompt and yield what is new, step by step. Closing the iterator aborts the request.

        Raises:
            RequestError: at the call, where the prompt or a parameter is invalid.
            PlancastError: from the iteration, where the request failed.
        """
        params = sampling_params if sampling_params is not None else self.default_sampling_params()
        request, text = self._frontend.prepare(prompt, params)
        return self._iterate(request, text)

    def _iterate(self, request: EngineRequest, text: str | None) -> Generator[RequestOutput]:
        box: _Box = queue.SimpleQueue()
        self._frontend.submit(request, text, box, stream=True)
        try:
            while True:
                output = box.get()
                if output.error is not None:
                    raise output.error
                yield output
                if output.finished:
                    return
        finally:
            self._frontend.abort([request.request_id])

    def _as_completed(self, prepared: list[tuple[EngineRequest, str | None]]) -> Generator[tuple[int, RequestOutput]]:
        """Keep a window of the requests in the engine until all are over."""
        box: _Box = queue.SimpleQueue()
        waiting = iter(enumerate(prepared))
        under_way: dict[str, int] = {}
        config = self._frontend.config
        window = min(_WINDOW * config.max_num_seqs, config.max_num_waiting)
        try:
            while True:
                while len(under_way) < window and (following := next(waiting, None)) is not None:
                    position, (request, text) = following
                    under_way[request.request_id] = position
                    self._frontend.submit(request, text, box, stream=False)
                if not under_way:
                    return
                output = box.get()
                yield under_way.pop(output.request_id), output
        finally:
            self._frontend.abort(under_way)

    # The model

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> dict[str, Any]:
        """A conversation as a prompt for `generate` and `stream`: its text, and its token ids with nothing added.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        template_options.setdefault("add_generation_prompt", True)
        return self._frontend.chat_prompt(messages, **template_options)

    # The engine

    @property
    def engine_spec(self) -> EngineSpec:
        """What opens another core like this engine's: `runtime.engine_process.open_engine`."""
        return self._frontend.spec

    def stats(self, with_blocks: bool = False) -> EngineStats:
        """A snapshot of the engine; `with_blocks` adds one byte a KV block. Raises `EngineDeadError`."""
        return self._call("stats", with_blocks=with_blocks)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block. Returns how many there were. Raises `EngineDeadError`."""
        return self._call("reset_prefix_cache")

    def set_speculation(self, enabled: bool) -> bool:
        """Switch drafting on or off while requests run; no text changes by it. Returns what it was.

        Raises `PlancastError` where the engine was loaded without a method to draft with.
        """
        return self._call("set_speculation", enabled=enabled)

    def _call(self, method: str, **args: Any) -> Any:
        try:
            return self._frontend.engine.call(method, **args).result(_CALL_TIMEOUT_S)
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer within {_CALL_TIMEOUT_S:.0f} s") from None

    def close(self) -> None:
        """End what runs and free the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _deliver(pairs: list[tuple[_Box, RequestOutput]]) -> None:
    for box, output in pairs:
        box.put(output)


@contextmanager
def _reporter(
    progress: bool | Callable[[RequestOutput], None], total: int
) -> Iterator[Callable[[RequestOutput], None]]:
    if progress is True:
        from runtime.client.progress import progress_bar

        with progress_bar(total) as report:
            yield report
    else:
        yield progress or (lambda _: None)


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt, or a list of them. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be text, a prompt or a list of prompts, not {type(prompts).__name__}", "prompt"
        )
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]
    return list(prompts)


def _one_each(values: Any, count: int, name: str) -> Sequence[Any]:
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise PlancastError(f"{name} holds {len(values)} entries for {count} prompts: give one for all, or one each")
    return values
