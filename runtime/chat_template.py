"""Chat templates: a conversation to a prompt, in transformers' sandbox and with its rules, without transformers.

The environment is that of `transformers.utils.chat_template_utils`: immutable sandbox, `trim_blocks`, `lstrip_blocks`,
loop controls, `{% generation %}`, `raise_exception`, `strftime_now`, and a `tojson` that escapes no HTML.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.errors import ArtifactError, RequestError
from runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

# Names under which a message's reasoning comes; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# The special tokens that templates know, as in transformers.
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """A model's chat template, or several by name: "tool_use" for requests with tools, "default" for the others."""

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None):
        """Raises `ArtifactError` where a template does not compile."""
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens = {k: v for k, v in (special_tokens or {}).items() if k in _TOKEN_NAMES}
        for name, text in self.sources.items():
            _check_compiles(name, text)

    @classmethod
    def load(cls, folder: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a model folder: chat_template.jinja (and additional_chat_templates/), else that of
        tokenizer_config.json. None where the model has none."""
        folder = Path(folder)
        files = {}
        if (folder / "chat_template.jinja").is_file():
            files["default"] = folder / "chat_template.jinja"
        files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if files:
            return cls({name: _read(path) for name, path in files.items()}, tokenizer.special_tokens)
        configured = tokenizer.config.get("chat_template")
        if isinstance(configured, list):
            configured = {entry["name"]: entry["template"] for entry in configured}
        return cls(configured, tokenizer.special_tokens) if configured else None

    @property
    def source(self) -> str:
        """The text of the template for requests without tools."""
        return self.sources.get("default", "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation. It holds its special tokens: encode it with `add_special_tokens=False`.

        `add_generation_prompt` (default: not `continue_final_message`) opens the assistant's next message;
        `continue_final_message` leaves the last message open. Other keywords reach the template. Raises `RequestError`
        where the template refuses the conversation or fails on it.
        """
        if not messages:
            raise RequestError("messages is empty: a chat needs at least one message", "messages")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first goes on with the last "
                "message, the second opens a new one",
                "continue_final_message",
            )
        source = self._pick(tools)
        chat = [_normalized(message) for message in messages]
        final_text = _mark_final_message(chat, source) if continue_final_message else None
        try:
            text = _compile(source).render(
                messages=chat,
                tools=_plain(tools),
                documents=_plain(documents),
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **_plain(kwargs)},
            )
        except RequestError:
            raise
        except Exception as error:  # a template is code, and may fail in any way on what it is given
            raise RequestError(
                f"the chat template cannot render these messages: {_reason(error)}", "messages"
            ) from error
        return text if final_text is None else _cut_at_tag(text, final_text)

    def _pick(self, tools: object) -> str:
        if tools is not None and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise RequestError(
                f"the model has several chat templates ({', '.join(sorted(self.sources))}) and none is the default",
                "messages",
            )
        return self.sources["default"]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read the chat template {path}: {error}") from error


def _check_compiles(name: str, source: str) -> None:
    import jinja2

    if not isinstance(source, str):
        raise ArtifactError(f"the chat template {name!r} must be text, it is a {type(source).__name__}")
    try:
        _compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise ArtifactError(f"the chat template {name!r} does not compile: line {error.lineno}: {error}") from error


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote, for training; here its body alone counts."""

        tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

        def parse(self, parser: Parser) -> nodes.Node:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A block of its own, as in transformers: assignments inside do not leak.
            return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

        def _body(self, caller) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Refuses attributes that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any):  # no `self`: the template may name an attribute so
            self, args = args[0], args[1:]
            attributes = dict(*args, **kwargs)
            for name in attributes:
                Namespace._check(name)
            jinja2.utils.Namespace.__init__(self, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            Namespace._check(name)
            jinja2.utils.Namespace.__setitem__(self, name, value)

        @staticmethod
        def _check(name: object) -> None:
            if isinstance(name, str) and name.startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")

    class Dict:
        """`dict(...)` for templates, without the type's own attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
            return dict.fromkeys(*args, **kwargs)

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception, strftime_now=strftime_now, dict=Dict(), namespace=Namespace
    )
    return environment


def _plain(value: Any) -> Any:
    """`value` rebuilt of plain JSON types: the template sees no object with methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value) if type(value) is tuple else [_plain(i) for i in value]
    if callable(getattr(value, "model_dump", None)):  # pydantic models, such as the OpenAI client's messages
        return _plain(value.model_dump())
    return f"<{type(value).__name__}>"


def _normalized(message: Any) -> dict:
    """A fresh plain copy, without keys whose value is None, and with reasoning under the names that templates read."""
    message = _plain(message)
    if not isinstance(message, dict):
        raise RequestError(f"each message must be an object with a role, got {message!r}", "messages")
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_FIELDS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _mark_final_message(chat: list[dict], source: str) -> str:
    """Put the tag at the end of the final message's text (in place), and return that text."""
    content = chat[-1].get("content")
    if content is None:
        raise RequestError("continue_final_message: the final message has no content to go on with", "messages")
    if "content" not in source:
        raise RequestError("continue_final_message: the chat template does not read a message's content", "messages")
    if isinstance(content, list):
        block = next((b for b in reversed(content) if isinstance(b, dict) and isinstance(b.get("text"), str)), None)
        if block is None:
            raise RequestError("continue_final_message: the final message holds no text to go on with", "messages")
        text = block["text"]
        block["text"] = text + _CONTINUE_TAG
        return text
    if not isinstance(content, str):
        raise RequestError("continue_final_message: the final message's content is no text", "messages")
    chat[-1]["content"] = content + _CONTINUE_TAG
    return content


def _cut_at_tag(text: str, final_text: str) -> str:
    if final_text.strip() not in text or _CONTINUE_TAG.strip() not in text:
        raise RequestError(
            "continue_final_message: the final message does not appear in the prompt: the template drops part of it",
            "messages",
        )
    start = text.rindex(_CONTINUE_TAG.strip())
    # Where the template strips messages, the tag has lost its trailing space, and so has the text before it.
    kept = text[start : start + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:start] if kept else text[:start].rstrip()


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
