"""Text Generation Inference's routes: `/generate`, `/generate_stream`, `POST /`, `/info`."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from runtime.outputs import CompletionOutput, Logprob, RequestOutput
from runtime.sampling_params import SamplingParams
from runtime.server import generation, prompts, sampling, sse
from runtime.server.docs import describe
from runtime.server.errors import ApiError, Dialect
from runtime.server.generation import Work
from runtime.server.logprobs import finite, token_text
from runtime.server.protocol.tgi import (
    BestOfSequence,
    CompatGenerateRequest,
    Details,
    FinishReason,
    GenerateParameters,
    GenerateRequest,
    GenerateResponse,
    Grammar,
    Info,
    JsonSchemaGrammar,
    PrefillToken,
    RegexGrammar,
    StreamDetails,
    StreamResponse,
    Token,
)
from runtime.server.registry import ServedModel
from runtime.server.routes.common import accept, json_response, log_usage, stream_response, usage
from runtime.server.sse import unless_disconnected
from runtime.server.state import ServerState, state_of

router = APIRouter(tags=["TGI"])


@dataclass(slots=True)
class Generate:
    """A checked request."""

    state: ServerState
    model: ServedModel
    inputs: str
    parameters: GenerateParameters
    prompt_ids: list[int]
    params: SamplingParams
    top_n: int

    def stream(self) -> AsyncGenerator[RequestOutput, None]:
        return generation.stream(self.state, self.model, Work(self.prompt_ids, self.params, "generate"))

    @property
    def seed(self) -> int | None:
        return None if self.params.is_greedy else self.params.seed

    def prefix(self) -> str:
        return self.inputs if self.parameters.return_full_text else ""


@router.post("/generate", **describe(body=GenerateRequest, returns=GenerateResponse, dialect=Dialect.TGI))
async def generate(request: Request) -> Response:
    """Continue a text."""
    state, body = await accept(request, GenerateRequest)
    return await _whole(request, await check(state, body, streams=False))


@router.post("/generate_stream", **describe(body=GenerateRequest, streams=True, dialect=Dialect.TGI))
async def generate_stream(request: Request) -> Response:
    """Continue a text, an event a token."""
    state, body = await accept(request, GenerateRequest)
    return stream_response(request, events(request, await check(state, body, streams=True)), _error_event)


@router.post(
    "/", **describe(body=CompatGenerateRequest, returns=list[GenerateResponse], streams=True, dialect=Dialect.TGI)
)
async def compat_generate(request: Request) -> Response:
    """Continue a text; `stream` says how."""
    state, body = await accept(request, CompatGenerateRequest)
    job = await check(state, body, streams=bool(body.stream))
    if body.stream:
        return stream_response(request, events(request, job), _error_event)
    return await _whole(request, job, as_list=True)


@router.get("/info", **describe(returns=Info, dialect=Dialect.TGI, statuses=(422,)))
async def info(request: Request) -> Response:
    """What is served, and its limits."""
    state = state_of(request)
    model = state.registry.get(None)
    manifest, limits = model.engine.manifest, state.config.limits
    return json_response(
        Info(
            model_id=model.name,
            model_sha=manifest.model.revision,
            max_concurrent_requests=state.config.max_concurrent_requests,
            max_best_of=limits.max_best_of,
            max_stop_sequences=limits.max_stop,
            max_input_tokens=model.max_context_len - 1,
            max_total_tokens=model.max_context_len,
            max_client_batch_size=1,
            version=request.app.version,
        )
    )


def _error_event(error: ApiError) -> bytes:
    return sse.data(error.body(Dialect.TGI))


async def check(state: ServerState, body: GenerateRequest, *, streams: bool) -> Generate:
    """Refuse what cannot be served, with 422 and the field's name."""
    model = state.registry.get(body.model)
    # TGI: no parameters at all means sampling, parameters without `do_sample` mean greedy.
    given = body.parameters or GenerateParameters(do_sample=True)
    if not body.inputs:
        raise sampling.invalid("inputs", "cannot be empty")
    for name, refused in (("watermark", given.watermark), ("adapter_id", given.adapter_id)):
        if refused:
            raise sampling.invalid(f"parameters.{name}", "is not supported by this server")
    if streams and (given.best_of or 1) > 1:
        raise sampling.invalid("parameters.best_of", "cannot stream: the best sequence is known only at the end")
    if streams and given.decoder_input_details:
        raise sampling.invalid("parameters.decoder_input_details", "is not streamed")
    warped = given.temperature not in (None, 1.0) or given.top_k or given.top_p or given.typical_p
    samples = bool(given.do_sample or warped)
    if (given.best_of or 1) > 1 and not samples:
        raise sampling.invalid("parameters.best_of", "needs sampling: greedy sequences are all the same")
    if (given.best_of or 1) > 1 and given.seed is not None:
        raise sampling.invalid("parameters.seed", "must not be set with `best_of` > 1")
    ids = await prompts.encode_text(model, body.inputs, param="inputs")
    ids = prompts.truncate(ids, given.truncate, model)
    room = model.max_context_len
    top_n = given.top_n_tokens or 0
    chosen = {
        "temperature": (given.temperature or 1.0) if samples else 0.0,
        "top_k": given.top_k,
        "top_p": given.top_p,
        "typical_p": given.typical_p,
        "repetition_penalty": given.repetition_penalty,
        "frequency_penalty": given.frequency_penalty,
        "stop": given.stop,
        "seed": given.seed if given.seed is not None else secrets.randbits(63),
    }
    count = given.best_of or 1
    params = SamplingParams(
        **{name: value for name, value in chosen.items() if value is not None},
        n=count,
        max_tokens=sampling.fit_max_tokens(len(ids), given.max_new_tokens, room, "max_new_tokens", "inputs"),
        logprobs=top_n,
        prompt_logprobs=0 if given.decoder_input_details else None,
        structured_outputs=_constraint(given.grammar),
    )
    sampling.check_limits(params, state.config.limits)
    return Generate(state, model, body.inputs, given, ids, params, top_n)


def _constraint(grammar: Grammar | None) -> dict | None:
    match grammar:
        case None:
            return None
        case RegexGrammar(value=regex):
            return {"regex": regex}
        case JsonSchemaGrammar(value=value):
            return {"json": value.schema}
        case _:
            return {"json": grammar.value}


async def _whole(request: Request, job: Generate, *, as_list: bool = False) -> Response:
    with job.state.admission.admit(job.params.num_sequences):
        (result,) = await unless_disconnected(request, generation.collect([job.stream()]))
    # Likeliest first: TGI's `best_of` returns one and tells of the others.
    ranked = sorted(result.outputs, key=lambda sequence: sequence.cumulative_logprob or 0.0, reverse=True)
    best = ranked[0]
    response = GenerateResponse(generated_text=job.prefix() + best.text)
    if job.parameters.details or job.parameters.decoder_input_details:
        response.details = Details(
            finish_reason=finish_reason(best),
            generated_tokens=len(best.token_ids),
            seed=job.seed,
            prefill=_prefill(job, result),
            tokens=[_token(job, token, position[token]) for token, position in _positions(best)],
            top_tokens=_top_tokens(job, best),
        )
        if len(ranked) > 1:
            response.details.best_of_sequences = [_other(job, sequence) for sequence in ranked[1:]]
    generated = sum(len(sequence.token_ids) for sequence in result.outputs)
    log_usage(request, usage(len(job.prompt_ids), generated))
    return json_response([response] if as_list else response, _headers(job, result, generated))


def _headers(job: Generate, result: RequestOutput, generated: int) -> dict[str, str]:
    metrics = result.metrics
    headers = {
        "x-compute-type": "cpu",
        "x-prompt-tokens": str(len(job.prompt_ids)),
        "x-generated-tokens": str(generated),
        "x-compute-characters": str(len(job.inputs)),
    }
    if metrics.finished_time is not None:
        scheduled = metrics.first_scheduled_time or metrics.arrival_time
        times = {
            "x-total-time": metrics.finished_time - metrics.arrival_time,
            "x-queue-time": scheduled - metrics.arrival_time,
            "x-inference-time": metrics.finished_time - scheduled,
            "x-time-per-token": (metrics.finished_time - scheduled) / max(1, generated),
        }
        headers |= {name: str(round(seconds * 1e3)) for name, seconds in times.items()}
    return headers


def finish_reason(sequence: CompletionOutput) -> FinishReason:
    """TGI's three."""
    if sequence.finish_reason == "length":
        return "length"
    return "stop_sequence" if isinstance(sequence.stop_reason, str) else "eos_token"


def _positions(sequence: CompletionOutput) -> list[tuple[int, dict[int, Logprob]]]:
    return list(zip(sequence.token_ids, sequence.logprobs or [], strict=False))


def _token(job: Generate, token: int, entry: Logprob, text: str | None = None) -> Token:
    special = token in job.model.engine.tokenizer.special_token_ids
    return Token(
        id=token, text=token_text(entry) if text is None else text, logprob=finite(entry.logprob), special=special
    )


def _prefill(job: Generate, result: RequestOutput) -> list[PrefillToken]:
    decode = job.model.engine.tokenizer.decode
    return [
        PrefillToken(id=token, text=decode([token], False), logprob=None)
        if position is None
        else PrefillToken(id=token, text=token_text(position[token]), logprob=finite(position[token].logprob))
        for token, position in zip(job.prompt_ids, result.prompt_logprobs or [], strict=False)
    ]


def _top(job: Generate, position: dict[int, Logprob]) -> list[Token]:
    ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
    return [_token(job, token, entry) for token, entry in ranked if (entry.rank or 0) <= job.top_n]


def _top_tokens(job: Generate, sequence: CompletionOutput) -> list[list[Token]] | msgspec.UnsetType:
    return [_top(job, position) for _, position in _positions(sequence)] if job.top_n else UNSET


def _other(job: Generate, sequence: CompletionOutput) -> BestOfSequence:
    return BestOfSequence(
        generated_text=job.prefix() + sequence.text,
        finish_reason=finish_reason(sequence),
        generated_tokens=len(sequence.token_ids),
        seed=job.seed,
        prefill=[],
        tokens=[_token(job, token, position[token]) for token, position in _positions(sequence)],
        top_tokens=_top_tokens(job, sequence),
    )


async def events(request: Request, job: Generate) -> AsyncGenerator[bytes, None]:
    """An event a token; the last one carries the whole text and the details."""
    text, index = "", 0
    with job.state.admission.admit(1):
        async with aclosing(job.stream()) as deltas:
            async for output in deltas:
                for sequence in output.outputs:
                    text += sequence.text
                    made = _token_events(job, sequence, index)
                    index += len(made)
                    if sequence.finish_reason is not None:
                        last = made[-1] if made else _empty_event(job, index)
                        last.generated_text = job.prefix() + text
                        last.details = StreamDetails(
                            finish_reason=finish_reason(sequence),
                            generated_tokens=index,
                            seed=job.seed,
                            input_length=len(job.prompt_ids),
                        )
                        made = made or [last]
                    if made:
                        yield b"".join(map(sse.data, made))
    log_usage(request, usage(len(job.prompt_ids), index))


def _token_events(job: Generate, sequence: CompletionOutput, index: int) -> list[StreamResponse]:
    """One event a token, whose texts put together are the delta's text."""
    positions = _positions(sequence)
    texts = [token_text(position[token]) for token, position in positions]
    if "".join(texts) != sequence.text and texts:  # a held-back tail, or half characters: the last token brings it all
        texts = [*[""] * (len(texts) - 1), sequence.text]
    return [
        StreamResponse(
            index=index + number + 1,
            token=_token(job, token, position[token], text),
            top_tokens=_top(job, position) if job.top_n else UNSET,
        )
        for number, ((token, position), text) in enumerate(zip(positions, texts, strict=True))
    ]


def _empty_event(job: Generate, index: int) -> StreamResponse:
    eos = job.model.engine.tokenizer.eos_token_id or 0
    return StreamResponse(index=index + 1, token=Token(id=eos, text="", logprob=0.0, special=True))
