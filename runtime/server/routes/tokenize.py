"""`/tokenize` and `/detokenize`, as vLLM and TGI have them, and `/score`: the log-likelihood of a continuation."""

from __future__ import annotations

from time import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from runtime.outputs import RequestOutput
from runtime.pooling import embedding_of
from runtime.sampling_params import SamplingParams
from runtime.server import generation, prompts, sampling
from runtime.server.docs import describe
from runtime.server.embedding import embed_all, embedding_info, embedding_work
from runtime.server.errors import ApiError, Kind
from runtime.server.generation import Work
from runtime.server.logprobs import finite
from runtime.server.protocol.tgi import SimpleToken
from runtime.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizeResponse,
)
from runtime.server.registry import ServedModel
from runtime.server.routes.common import accept, json_response, log_usage, usage_of
from runtime.server.sse import unless_disconnected
from runtime.server.state import ServerState

router = APIRouter(tags=["Tokens"])


@router.post("/tokenize", **describe(body=TokenizeRequest, returns=TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """Token ids of a text or a chat."""
    state, body = await accept(request, TokenizeRequest, places=0)
    model = state.registry.get(body.model)
    given = [name for name in ("prompt", "messages", "inputs") if getattr(body, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        message = f"give exactly one of `prompt`, `messages` and `inputs`; found {found}"
        raise ApiError(Kind.INVALID, message, param=given[1] if given else "prompt")
    special = body.add_special_tokens
    if body.inputs is not None:
        ids = await prompts.encode_text(
            model, body.inputs, add_special_tokens=True if special is None else special, param="inputs"
        )
        return json_response(simple_tokens(model, ids))
    if body.messages is not None:
        continues = bool(body.continue_final_message)
        _, ids = await prompts.render_chat(
            model,
            prompts.plain_messages(body.messages),
            tools=body.tools,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            add_special_tokens=bool(special),
            kwargs=body.chat_template_kwargs,
        )
    else:
        ids = await prompts.encode_text(
            model, body.prompt or "", add_special_tokens=True if special is None else special, param="prompt"
        )
    strings = [model.engine.tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
    return json_response(
        TokenizeResponse(count=len(ids), max_model_len=model.max_context_len, tokens=ids, token_strs=strings)
    )


@router.post("/detokenize", **describe(body=DetokenizeRequest, returns=DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state, body = await accept(request, DetokenizeRequest, places=0)
    model = state.registry.get(body.model)
    ids = prompts.check_ids(model, body.tokens, "tokens")
    text = model.engine.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens))
    return json_response(DetokenizeResponse(prompt=text))


@router.post("/score", **describe(body=ScoreRequest, returns=ScoreResponse))
@router.post("/v1/score", **describe(body=ScoreRequest, returns=ScoreResponse))
async def score(request: Request) -> Response:
    """How likely the model finds each continuation of a text; of a model that embeds: how near each text is."""
    state, body = await accept(request, ScoreRequest)
    model = state.registry.get(body.model)
    continuations = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if not continuations or len(continuations) > state.config.limits.max_prompts:
        limit = state.config.limits.max_prompts
        raise sampling.invalid("text_2", f"{len(continuations)} continuations; give 1 to {limit}")
    if model.engine.manifest.embedding is not None:
        return await _similarities(request, state, model, body.text_1, continuations)
    context = await prompts.encode_text(model, body.text_1, param="text_1")
    streams, starts = [], []
    for number, text in enumerate(continuations):
        param = f"text_2[{number}]"
        ids = await prompts.encode_text(model, body.text_1 + text, param=param)
        start = _common(context, ids)
        if start in (0, len(ids)):  # the two grew into one token: put them side by side
            ids = context + await prompts.encode_text(model, text, add_special_tokens=False, param=param)
            start = len(context)
        if start in (0, len(ids)):
            raise sampling.invalid(param, "is empty, or has nothing before it: there is nothing to score")
        sampling.fit_max_tokens(len(ids), 1, model.max_context_len, prompt_param=param)
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        streams.append(generation.stream(state, model, Work(ids, params, "score", body.priority or 0)))
        starts.append(start)
    with state.admission.admit(len(streams)):
        results = await unless_disconnected(request, generation.collect(streams))
    counted = usage_of(results)
    log_usage(request, counted)
    scored = [
        _scored(number, result, start) for number, (result, start) in enumerate(zip(results, starts, strict=True))
    ]
    return json_response(
        ScoreResponse(id=generation.new_id("score-"), created=int(time()), model=model.name, data=scored, usage=counted)
    )


async def _similarities(
    request: Request, state: ServerState, model: ServedModel, text: str, others: list[str]
) -> Response:
    """The cosine of `text`'s vector with that of each of the others, as vLLM scores with embeddings."""
    params = [("text_1", text), *((f"text_2[{number}]", other) for number, other in enumerate(others))]
    works = [
        embedding_work(model, await prompts.encode_text(model, each, param=param), "score", param)
        for param, each in params
    ]
    results = await unless_disconnected(request, embed_all(state, model, works))
    counted = usage_of(results)
    log_usage(request, counted)
    info = embedding_info(model)
    first, *rest = [embedding_of(result, info, normalize=True) for result in results]
    return json_response(
        ScoreResponse(
            id=generation.new_id("score-"),
            created=int(time()),
            model=model.name,
            data=[ScoreData(index=number, score=float(first @ other)) for number, other in enumerate(rest)],
            usage=counted,
        )
    )


def simple_tokens(model: ServedModel, ids: list[int]) -> list[SimpleToken]:
    """TGI's tokens: each with its place in the text, in characters."""
    decode = model.engine.tokenizer.token_text
    tokens, start = [], 0
    for token in ids:
        text = decode(token)
        tokens.append(SimpleToken(id=token, text=text, start=start, stop=start + len(text)))
        start += len(text)
    return tokens


def _common(first: list[int], second: list[int]) -> int:
    """How many ids the two begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _scored(number: int, result: RequestOutput, start: int) -> ScoreData:
    ids = result.prompt_token_ids
    positions = result.prompt_logprobs or []
    entries = [positions[at][ids[at]] for at in range(start, len(ids)) if positions[at] is not None]  # type: ignore[index]
    total = sum(finite(entry.logprob) for entry in entries)
    return ScoreData(
        index=number,
        score=total,
        mean=total / max(1, len(entries)),
        tokens=len(entries),
        is_greedy=all(entry.rank == 1 for entry in entries),
    )
