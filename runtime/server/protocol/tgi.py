"""Text Generation Inference: types, under TGI's names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class JsonGrammar(msgspec.Struct, tag="json", kw_only=True):
    value: dict[str, Any] | str


class JsonObjectGrammar(msgspec.Struct, tag="json_object", kw_only=True):
    value: dict[str, Any] | str


class RegexGrammar(msgspec.Struct, tag="regex", kw_only=True):
    value: str


class JsonSchemaValue(msgspec.Struct, kw_only=True):
    schema: dict[str, Any]
    name: str | None = None


class JsonSchemaGrammar(msgspec.Struct, tag="json_schema", kw_only=True):
    value: JsonSchemaValue


Grammar = JsonGrammar | JsonObjectGrammar | RegexGrammar | JsonSchemaGrammar


class GenerateParameters(msgspec.Struct, kw_only=True):
    best_of: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(gt=0)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    typical_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    do_sample: bool | None = None
    max_new_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: Annotated[int, msgspec.Meta(ge=1)] | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    top_n_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: GenerateParameters | None = None
    model: str | None = None  # ours: which model, where the server holds several


class CompatGenerateRequest(GenerateRequest, kw_only=True):
    stream: bool | None = None


class PrefillToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float | None


class Token(msgspec.Struct, kw_only=True):
    id: int
    text: str
    logprob: float
    special: bool


FinishReason = Literal["length", "eos_token", "stop_sequence"]


class BestOfSequence(msgspec.Struct, kw_only=True):
    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    top_tokens: list[list[Token]] | UnsetType = UNSET


class Details(msgspec.Struct, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    prefill: list[PrefillToken]
    tokens: list[Token]
    best_of_sequences: list[BestOfSequence] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET


class GenerateResponse(msgspec.Struct, kw_only=True):
    generated_text: str
    details: Details | UnsetType = UNSET


class StreamDetails(msgspec.Struct, kw_only=True):
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    input_length: int


class StreamResponse(msgspec.Struct, kw_only=True):
    index: int
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None
    details: StreamDetails | None = None


class Info(msgspec.Struct, kw_only=True):
    model_id: str
    model_sha: str | None
    model_pipeline_tag: str = "text-generation"
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    max_client_batch_size: int
    router: str = "plancast"
    version: str


class SimpleToken(msgspec.Struct, kw_only=True):
    id: int
    text: str
    start: int
    stop: int
