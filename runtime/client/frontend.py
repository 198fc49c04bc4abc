"""What `LLM` and `AsyncLLM` share: a prompt becomes a request, and each answer finds whoever waits for it."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from runtime.artifact import Artifact
from runtime.chat_template import ChatTemplate
from runtime.config import EngineConfig
from runtime.engine_client import MAX_RESTARTS, STEP_TIMEOUT_S, EngineClient, InProcessEngine
from runtime.engine_process import DEFAULT_FACTORY, EngineSpec
from runtime.errors import PlancastError, RequestError
from runtime.memory import parse_size
from runtime.messages import AbortRequests, EngineRequest, RequestDelta
from runtime.output_processor import OutputProcessor
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.speculation.config import SpeculationConfig, parse_speculation
from runtime.tokenizer import Tokenizer, read_json

if TYPE_CHECKING:
    from runtime.structured import GrammarCompiler

# A prompt: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]
BoxT = TypeVar("BoxT")

logger = logging.getLogger("plancast.engine")
# The environment may name another executor: for tests of whole processes.
_FACTORY_VARIABLE = "PLANCAST_EXECUTOR_FACTORY"
# What a model's generation_config.json may set, under the same names.
_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class Frontend(Generic[BoxT]):
    """A loaded model: its tokenizer, chat template and engine, and the requests under way.

    Answers go to `deliver`, called from the engine's thread with all that one step brought: pairs of the box that
    `submit` was given and a `RequestOutput`.

    Args:
        artifact: its folder.
        in_process: the engine runs in a thread here; else in a process of its own, which is replaced when it dies.
        num_threads: of the engine; None: the artifact's default, or the machine's cores.
        kv_cache_memory: bytes, or a size such as "1GiB"; None: the artifact's default, or a share of the free memory.
        speculative_config: how to draft, as `runtime.speculation.config.parse_speculation` reads it: vLLM's JSON or
            dictionary, or a method ("ngram"); "off" for none; None: as the artifact's recipe says.
        verify: "quick", or "full" to hash every file first.
        max_logprobs: the most log probabilities a position that a request may ask for; -1: no limit.
        max_restarts: deaths of the engine's process within five minutes that are mended.
        engine_step_timeout: seconds; a process that does not finish a step for so long is replaced like a dead one.
            None or 0: it may take for ever. An engine in process cannot be replaced.
        executor_factory: `module:function` that opens the engine, and `executor_args` for it.
        engine_options: fields of `EngineConfig`.

    Raises:
        PlancastError: the artifact, an option or the memory does not serve. The message says what to do.
    """

    def __init__(
        self,
        artifact: str | os.PathLike[str],
        deliver: Callable[[list[tuple[BoxT, RequestOutput]]], None],
        *,
        in_process: bool,
        num_threads: int | None = None,
        kv_cache_memory: int | str | None = None,
        speculative_config: SpeculationConfig | Mapping[str, Any] | str | None = None,
        verify: str = "quick",
        max_logprobs: int = 20,
        max_restarts: int = MAX_RESTARTS,
        engine_step_timeout: float | None = STEP_TIMEOUT_S,
        executor_factory: str | None = None,
        executor_args: dict[str, Any] | None = None,
        **engine_options: Any,
    ):
        if verify not in ("quick", "full"):
            raise PlancastError(f"verify is {verify!r}: choose quick or full")
        if engine_step_timeout is not None and not engine_step_timeout >= 0:
            raise PlancastError(f"engine_step_timeout is {engine_step_timeout}: give seconds, or 0 for no limit")
        opened = Artifact.open(artifact)
        self.manifest = opened.manifest
        self.config = EngineConfig.from_manifest(
            opened.manifest,
            kv_cache_memory=None if kv_cache_memory is None else parse_size(kv_cache_memory),
            speculation=None if speculative_config is None else parse_speculation(speculative_config),
            **engine_options,
        )
        self._max_logprobs = max_logprobs
        self._deliver = deliver
        self._lock = threading.RLock()  # guards the processor and the boxes
        self._boxes: dict[str, BoxT] = {}
        self._dropped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._grammars: GrammarCompiler | None = None
        self._numbers = itertools.count()
        factory_args = dict(executor_args or {})
        threads = num_threads if num_threads is not None else opened.manifest.defaults.num_threads
        if threads is not None:
            factory_args["num_threads"] = threads
        self.spec = spec = EngineSpec(
            config=self.config,
            artifact=str(opened.path),
            verify=verify,
            factory=executor_factory or os.environ.get(_FACTORY_VARIABLE) or DEFAULT_FACTORY,
            factory_args=factory_args,
        )
        # The engine loads beside the tokenizer, and asks for neither before its first request.
        self.engine: EngineClient
        if in_process:
            self.engine = InProcessEngine(spec, self, wait=False)
        else:
            from runtime.client.process_engine import ProcessEngine

            self.engine = ProcessEngine(
                spec, self, max_restarts=max_restarts, step_timeout_s=engine_step_timeout or None, wait=False
            )
        try:
            self.tokenizer = Tokenizer.load(opened.path)
            self.chat_template = ChatTemplate.load(opened.path, self.tokenizer)
            self._generation_config = read_json(opened.path / "generation_config.json")
            self._processor = OutputProcessor(self.tokenizer)
            _ = self.tokenizer.pieces  # made at its first use: better now than in the first answer
            self.engine.wait_ready()
        except BaseException:
            self.engine.close()
            raise
        for note in self.engine.ready.notes:
            logger.warning("%s", note)

    # What a model offers

    @property
    def vocab_size(self) -> int:
        return self.manifest.model.vocab_size

    @property
    def max_context_len(self) -> int:
        return self.config.max_context_len

    @property
    def num_unfinished(self) -> int:
        return len(self._boxes)

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """`SamplingParams` with what the model's generation config sets, and `changes` (None: no change) on top."""
        values = {name: self._generation_config.get(name) for name in _GENERATION_DEFAULTS}
        values.update({name: value for name, value in changes.items() if value is not None})
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})

    @property
    def generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json; {} where it has none."""
        return self._generation_config

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt text of a conversation. Raises `RequestError` where there is no template, or it refuses."""
        if self.chat_template is None:
            raise RequestError(
                f"{self.manifest.name} has no chat template, so it cannot chat: give a prompt instead", "messages"
            )
        return self.chat_template.render(messages, **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """The prompt of a conversation, text and token ids: the template says all, nothing is added to it."""
        text = self.render_chat(messages, **options)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    # Requests

    def tokenize(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[str | None, list[int]]:
        """A prompt's text, where it has one, and its token ids, with exactly one BOS where the model wants one.

        Raises:
            RequestError: the prompt is none, or holds an id that the vocabulary lacks.
        """
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            if "prompt_token_ids" in prompt:
                return text if isinstance(text, str) else None, self._checked_ids(prompt["prompt_token_ids"])
            if not isinstance(text, str):
                keys = ", ".join(map(repr, prompt)) or "nothing"
                raise RequestError(f"a prompt must hold 'prompt' (text) or 'prompt_token_ids', not {keys}", "prompt")
            prompt = text
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return None, self._checked_ids(prompt)

    def _checked_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise RequestError(f"a prompt must be text or a list of token ids, not {type(ids).__name__}", "prompt")
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt holds {token_id!r}; token ids of this model are whole numbers from 0 to "
                    f"{self.vocab_size - 1}",
                    "prompt",
                )
        return list(ids)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[EngineRequest, str | None]:
        """The checked request, and the prompt's text. Nothing is sent.

        Raises:
            RequestError: names the field, its value and its limit.
        """
        if self.manifest.embedding is not None:
            raise RequestError(f"{self.manifest.name} embeds texts and generates none: use its embeddings", "model")
        params.verify(vocab_size=self.vocab_size, max_context_len=self.max_context_len, max_logprobs=self._max_logprobs)
        text, token_ids = self.tokenize(prompt)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-self._num_kept(params) :]
        params.verify(
            vocab_size=self.vocab_size,
            max_context_len=self.max_context_len,
            prompt_len=len(token_ids),
            max_logprobs=self._max_logprobs,
        )
        if params.structured_outputs is not None:
            self.check_structured_outputs(params.structured_outputs)
        resolved = params.resolved(self.tokenizer)
        return self._request(token_ids, resolved, request_id, priority, user, cache_salt), text

    def prepare_embedding(
        self,
        prompt: Prompt,
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> tuple[EngineRequest, str | None]:
        """As `prepare`, for the prompt's embedding. `truncate_prompt_tokens`: the last ones; -1: as many as fit.

        Raises:
            RequestError: this engine does not embed, or the prompt does not fit.
        """
        if self.manifest.embedding is None:
            raise RequestError(
                f"{self.manifest.name} has no embedding output: it was built to generate text. Build its model with "
                "task: embed",
                "model",
            )
        text, token_ids = self.tokenize(prompt)
        if truncate_prompt_tokens is not None:
            keep = self.max_context_len if truncate_prompt_tokens < 0 else max(1, truncate_prompt_tokens)
            token_ids = token_ids[-keep:]
        if not token_ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        if len(token_ids) > self.max_context_len:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; the context holds {self.max_context_len}. Shorten it, or set "
                "truncate_prompt_tokens",
                "prompt",
            )
        # Nothing is sampled; a request still has parameters.
        params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, detokenize=False)
        return self._request(token_ids, params, request_id, priority, user, cache_salt), text

    def _request(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        priority: int,
        user: str | None,
        cache_salt: str | None,
    ) -> EngineRequest:
        if not isinstance(priority, int) or not -(1 << 31) <= priority < 1 << 31:
            raise RequestError(f"priority must be a whole number of 32 bits, got {priority!r}", "priority")
        return EngineRequest(
            request_id=request_id if request_id is not None else f"request-{next(self._numbers)}",
            prompt_token_ids=token_ids,
            params=params,
            arrival_time=time.monotonic(),
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )

    def check_structured_outputs(self, structured_outputs: Any) -> None:
        """Compile a grammar here, so that a bad one is refused before it is sent. Compiled ones are remembered.

        Raises:
            RequestError: malformed, unsupported or too complex.
        """
        with self._lock:
            if self._grammars is None:
                from runtime.structured import GrammarCompiler

                tokenizer = self.tokenizer
                self._grammars = GrammarCompiler(lambda: tokenizer, self.vocab_size, self.config.eos_token_ids)
        self._grammars.check(structured_outputs)

    def _num_kept(self, params: SamplingParams) -> int:
        """Prompt tokens to keep, the last ones; -1 keeps what leaves room for the output."""
        assert params.truncate_prompt_tokens is not None
        if params.truncate_prompt_tokens > 0:
            return params.truncate_prompt_tokens
        return max(1, self.max_context_len - (params.max_tokens or 1))

    def submit(self, request: EngineRequest, text: str | None, box: BoxT, *, stream: bool) -> None:
        """Hand a prepared request to the engine. Its outputs go to `box`: deltas (`stream`), or one at the end.

        Raises:
            RequestError: its id is in use, or it cannot be streamed (`best_of`).
            EngineDeadError: there is no engine any more.
        """
        with self._lock:
            self._processor.add_request(request, text, stream=stream)
            self._boxes[request.request_id] = box
            try:
                self.engine.add_request(request)
            except BaseException:
                self._forget(request.request_id)
                raise

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: each that is under way gets a last output with finish reason "abort". Others are ignored."""
        with self._lock:
            known = [request_id for request_id in request_ids if request_id in self._boxes]
            if not known:
                return
            self.engine.abort(AbortRequests(known))
            outputs = self._processor.abort(known)
            self._deliver([(self._boxes.pop(output.request_id), output) for output in outputs])

    def drop(self, request_id: str) -> None:
        """Abort a request that nobody can wait for any more, at the engine's next answer.

        Takes no lock, so that a garbage collector may call it wherever it strikes.
        """
        self._dropped.put(request_id)

    def close(self, drain_s: float = 0.0) -> None:
        """Let what runs go on for at most `drain_s` seconds, end the rest, and free the engine. Idempotent."""
        self.engine.close(drain_s)
        if self._grammars is not None:
            self._grammars.close()

    def _forget(self, request_id: str) -> None:
        self._processor.remove_request(request_id)
        self._boxes.pop(request_id, None)

    # The engine's listener

    def on_outputs(self, deltas: list[RequestDelta]) -> AbortRequests | None:
        pairs: list[tuple[BoxT, RequestOutput]] = []
        aborts = AbortRequests([], [])
        with self._lock:
            while not self._dropped.empty():
                dropped = self._dropped.get_nowait()
                if dropped in self._boxes:
                    aborts.request_ids.append(dropped)
                    self._forget(dropped)
            for delta in deltas:
                outputs, ended = self._process(delta)
                if ended is not None:
                    aborts.request_ids += ended.request_ids
                    aborts.sequences += ended.sequences
                for output in outputs:
                    box = self._boxes.get(output.request_id)
                    if output.finished:
                        self._boxes.pop(output.request_id, None)
                    if box is not None:
                        pairs.append((box, output))
        if pairs:
            self._deliver(pairs)
        return aborts if aborts.request_ids or aborts.sequences else None

    def _process(self, delta: RequestDelta) -> tuple[list[RequestOutput], AbortRequests | None]:
        try:
            return self._processor.process([delta])
        except Exception as error:  # a fault of ours in one request's text must not stop the others
            logger.exception("request %s: its answer could not be read", delta.request_id)
            problem = PlancastError(f"the answer could not be read: {type(error).__name__}: {error}")
            return self._processor.fail([delta.request_id], problem), AbortRequests([delta.request_id])

    def resume_request(self, request_id: str) -> EngineRequest:
        with self._lock:
            return self._processor.resume_request(request_id)
