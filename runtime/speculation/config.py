"""What speculation is asked for. One struct for the recipe, the manifest, the command line and the engine."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from runtime.errors import PlancastError

Method = Literal["ngram", "suffix", "draft_model", "eagle"]
METHODS = ("ngram", "suffix", "draft_model", "eagle")
# A draft longer than this never pays, and a step's rows of logits are memory.
MAX_DRAFT = 32


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names follow vLLM's `speculative_config`. No method: no speculation. Several: the first that has a draft."""

    method: tuple[Method, ...] = ()
    enabled: bool = True  # at the start; it can be switched while the engine runs
    # Tokens drafted at most. With the one that they follow these are 12 rows, two full tiles of the kernels.
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFT)] = 11
    adaptive: bool = True  # fewer, down to none, as acceptance and load say; false: always as many as there are
    # ngram: the last tokens, so many of them, are looked up in the text before them; the longest find wins.
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 2
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 5
    # suffix: tokens of finished outputs that are searched too (0: none), and how likely a draft must be to go on.
    suffix_decoding_max_cached_tokens: Annotated[int, Meta(ge=0, le=2**24)] = 0
    suffix_decoding_min_token_prob: Annotated[float, Meta(gt=0, le=1)] = 0.1
    # draft_model: an artifact's folder; not absolute: from here, or else beside the target's.
    model: str | None = None
    # draft_model, eagle: the draft engine picks its likeliest token, or draws one from its distribution. Drawn ones may
    # be accepted more often at high temperatures, but then a seed's text depends on what else runs.
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"

    def __post_init__(self) -> None:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise PlancastError(
                f"speculation: prompt_lookup_min {self.prompt_lookup_min} is more than prompt_lookup_max "
                f"{self.prompt_lookup_max}: lower the one or raise the other"
            )
        if len(set(self.method)) < len(self.method):
            raise PlancastError(f"speculation: method names one twice: {', '.join(self.method)}")
        if "draft_model" in self.method and not self.model:
            raise PlancastError("speculation: method draft_model needs `model`, the folder of the draft's artifact")
        if {"draft_model", "eagle"} <= set(self.method):
            raise PlancastError("speculation: method names draft_model and eagle, and one engine drafts: choose one")
        if self.model and "draft_model" not in self.method:
            raise PlancastError(f"speculation: model is {self.model!r}, and method does not name draft_model")

    @property
    def is_on(self) -> bool:
        """Whether there is anything to speculate with."""
        return bool(self.method)


def parse_speculation(value: object) -> SpeculationConfig:
    """A config from what callers write: vLLM's JSON (text or an object), a bare method, or a config as it is.

    `{"method": "ngram", "num_speculative_tokens": 5}`; `method` may be a list; `model` alone means draft_model; "off"
    and false mean none. Raises `PlancastError` that names the key, its value and what is allowed.
    """
    if isinstance(value, SpeculationConfig):
        return value
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("{"):
            try:
                value = json.loads(text)
            except ValueError as error:
                raise PlancastError(f"speculative config: no valid JSON ({error}): {text!r}") from None
        else:
            value = {"method": text}
    if value is False:
        value = {"method": "off"}
    if not isinstance(value, dict):
        raise PlancastError(f"speculative config: {value!r} is neither an object nor a method ({', '.join(METHODS)})")
    return _from_dict(dict(value))


def _from_dict(value: dict[str, Any]) -> SpeculationConfig:
    method = value.get("method")
    if method is None:
        method = ["draft_model"] if value.get("model") else []
        if not method:
            raise PlancastError(f"speculative config: give a method: {', '.join(METHODS)}, or off")
    if isinstance(method, str):
        method = [] if method == "off" else [part.strip() for part in method.replace("+", ",").split(",")]
    for name in method if isinstance(method, list | tuple) else ():
        if name not in METHODS:
            raise PlancastError(
                f"speculative config: method {name!r} is unknown; choose of {', '.join(METHODS)}, or off"
            )
    unknown = [key for key in value if key not in SpeculationConfig.__struct_fields__]
    if unknown:
        raise PlancastError(
            f"speculative config: unknown key {unknown[0]!r}; allowed: {', '.join(SpeculationConfig.__struct_fields__)}"
        )
    try:
        return msgspec.convert(value | {"method": method}, SpeculationConfig)
    except msgspec.ValidationError as error:
        raise PlancastError(f"speculative config: {error}") from None
