"""`plancast chat`: talk with the model at the terminal, or feed it a line a turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.commands.common import Costs, default_params, loaded, printed, say
from runtime.errors import PlancastError, RequestError
from runtime.llm import LLM
from runtime.outputs import RequestOutput
from runtime.sampling_params import SamplingParams

_HELP = """/reset        forget the conversation
/system TEXT  set the system message and forget the conversation; without TEXT: none
/quit         leave (so does Ctrl-D)
Ctrl-C        stop an answer"""
# Room that an answer needs at least, before the oldest turns are dropped for it.
_ANSWER_TOKENS = 256
_TEMPERATURE = 0.7


@dataclass(kw_only=True)
class ChatCommand:
    """The arguments of `plancast chat`, and the conversation so far."""

    artifact: Path
    engine_options: dict[str, Any]
    sampling: dict[str, Any]
    system: str | None
    quiet: bool
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Raises `PlancastError` where the engine does not load, or the model has no chat template."""
        with loaded(self.artifact, self.engine_options, quiet=self.quiet) as llm:
            if llm.chat_template is None:
                raise PlancastError(f"{llm.manifest.name} has no chat template: use plancast generate")
            params = default_params(llm, self.sampling, temperature=_TEMPERATURE)
            # What is wrong with the options shows now, not at the first question.
            params.verify(vocab_size=llm.manifest.model.vocab_size, max_context_len=llm.max_context_len)
            self._reset()
            if sys.stdin.isatty() and not self.quiet:
                say("Type a message; /help lists the commands.")
            for line in self._lines():
                if line.startswith("/"):
                    if self._command(line):
                        return
                elif line:
                    self._turn(llm, params, line)

    def _lines(self) -> Iterator[str]:
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (input() then edits lines and remembers them)
        while True:
            try:
                yield input("> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    say("")
                return
            except KeyboardInterrupt:
                if not interactive:
                    raise
                say("\n(Ctrl-D or /quit leaves)")
            except UnicodeDecodeError as error:
                raise PlancastError(f"standard input is not {error.encoding} text: {error.reason}") from None

    def _command(self, line: str) -> bool:
        """Whether to leave."""
        name, _, rest = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return True
            case "/reset":
                self._reset()
                say("(forgotten)")
            case "/system":
                self.system = rest.strip() or None
                self._reset()
                say("(system message set, conversation forgotten)" if self.system else "(no system message)")
            case "/help":
                say(_HELP)
            case _:
                say(f"unknown command {name}\n{_HELP}")
        return False

    def _reset(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def _turn(self, llm: LLM, params: SamplingParams, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        whole: RequestOutput | None = None
        costs = Costs(llm.manifest.kv.block_size)
        try:
            with printed(llm.stream(self._prompt(llm, params), params)) as outputs:
                for output in outputs:
                    if whole is None:
                        whole = output
                    else:
                        whole.add(output)
        except KeyboardInterrupt:
            say("(stopped)")
        except RequestError as error:
            say(f"error: {error}")
            self.messages.pop()
            return
        answer = whole.outputs[0].text if whole is not None and whole.outputs else ""
        self.messages.append({"role": "assistant", "content": answer})
        if whole is not None and whole.finished and not self.quiet:
            costs.add(whole)
            say(f"({costs.line(llm)})")

    def _prompt(self, llm: LLM, params: SamplingParams) -> dict[str, Any]:
        """The conversation, without its oldest turns where it would leave no room for an answer."""
        room = llm.max_context_len - (params.max_tokens or min(_ANSWER_TOKENS, llm.max_context_len // 2))
        dropped = False
        while True:
            prompt = llm.chat_prompt(self.messages)
            first = 1 if self.messages[0]["role"] == "system" else 0
            if len(prompt["prompt_token_ids"]) <= room or len(self.messages) - first <= 1:
                break
            del self.messages[first : first + 2]
            dropped = True
        if dropped:
            say("(the conversation outgrew the context: its oldest turns are forgotten)")
        return prompt
