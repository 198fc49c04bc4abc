"""Speculation on compiled engines: greedy text is the same for every proposer and KV format (case 25), and structured
output with drafts is valid JSON whatever runs beside it (case 20)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_build import plancast_home, tiny_head, tiny_recipe, tiny_workshop

from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

NEW_TOKENS = 40
KV = ["f32", "f16", "int8"]


@pytest.fixture(scope="module")
def tiny_artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny Llama with each KV format, and with a head that was never trained."""
    from builder.build import build

    workshop, folder = tiny_workshop(), tmp_path_factory.mktemp("kv")
    head = tiny_head(workshop / "model", folder / "head")
    artifacts = {}
    with plancast_home(workshop / "home"):
        for kv in KV:
            recipe = tiny_recipe(
                workshop / "model",
                f"tiny-{kv}",
                kv={"key": kv, "value": kv},
                parity={"enabled": False},
                draft_head=str(head),
            )
            artifacts[kv] = build(recipe, folder / kv)
    return artifacts


def configs(artifact: Path) -> dict[str, dict[str, Any]]:
    """Each proposer at full length, and a chain. The draft engine is the target itself."""
    fixed = {"adaptive": False, "num_speculative_tokens": 5}
    return {
        "ngram": {"method": "ngram", "prompt_lookup_min": 1, **fixed},
        "suffix": {"method": "suffix", "suffix_decoding_max_cached_tokens": 1000, **fixed},
        "draft_model": {"model": str(artifact), **fixed},
        "drawn": {"model": str(artifact), "draft_sampling": "probabilistic", **fixed},
        "eagle": {"method": "eagle", **fixed},
        "eagle drawn": {"method": "eagle", "draft_sampling": "probabilistic", **fixed},
        "chain": {"method": "ngram+suffix+draft_model", "model": str(artifact), "num_speculative_tokens": 6},
    }


PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], list(range(3, 40)), [9], [4, 4, 4, 4, 8, 8, 8, 4, 4], list(range(60, 20, -1))]


def answers(artifact: Path, config: dict[str, Any] | None, params: SamplingParams) -> tuple[list[list[int]], Any]:
    with LLM(artifact, speculative_config=config, num_blocks=64) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        results = llm.generate(prompts, params)
        return [list(output.token_ids) for result in results for output in result.outputs], llm.stats()


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model", "drawn", "eagle", "eagle drawn", "chain"])
def test_greedy_text_is_the_same(name: str, kv: str, tiny_artifacts: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    artifact = tiny_artifacts[kv]
    plain, _ = answers(artifact, None, params)
    speculative, stats = answers(artifact, configs(artifact)[name], params)
    assert speculative == plain
    assert stats.spec_decode_num_drafts > 0  # a random model repeats itself too seldom for look-ups to be right
    if name in ("draft_model", "drawn"):
        assert stats.spec_decode_num_accepted_tokens > 0.9 * stats.spec_decode_num_draft_tokens


def test_a_seeds_text_is_the_same(tiny_artifacts: dict[str, Path]) -> None:
    """Sampled, several sequences of a prompt, penalties: certain drafts change nothing."""
    params = SamplingParams(
        temperature=0.7, top_p=0.9, presence_penalty=0.4, n=2, seed=7, max_tokens=NEW_TOKENS, ignore_eos=True
    )
    plain, _ = answers(tiny_artifacts["f32"], None, params)
    for name in ("ngram", "draft_model", "eagle"):
        speculative, stats = answers(tiny_artifacts["f32"], configs(tiny_artifacts["f32"])[name], params)
        assert speculative == plain
        assert stats.spec_decode_num_drafts > 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix", "chain", "eagle"])
def test_structured_output_with_drafts(method: str, smollm2_artifact: Path) -> None:
    """Case 20: JSON of a schema, several at once, beside free text; greedy and sampled."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    config = configs(smollm2_artifact)[method] | {"adaptive": False}
    with LLM(smollm2_artifact, speculative_config=config, kv_cache_memory=1 << 30) as llm:
        question = [
            {"role": "user", "content": 'Describe a person as JSON, such as {"name": "Ann", "age": 3, "tags": []}'}
        ]
        prompts, params = [], []
        for i in range(6):
            structured = {"json": schema} if i % 3 else None
            temperature = 0.0 if i % 2 else 0.9
            prompts.append(llm.chat_prompt(question))
            params.append(
                SamplingParams(temperature=temperature, seed=i, max_tokens=160, structured_outputs=structured)
            )
        results = llm.generate(prompts, params)
        assert llm.stats().spec_decode_num_accepted_tokens > 0
    for result, asked in zip(results, params, strict=True):
        if asked.structured_outputs is not None:
            assert result.outputs[0].finish_reason == "stop"
            value = json.loads(result.outputs[0].text)
            assert set(value) == {"name", "age", "tags"}
            assert 0 <= value["age"] <= 120


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ngram", "suffix", "draft_model"])
def test_smollm2_says_the_same(name: str, smollm2_f32_artifact: Path) -> None:
    """Case 25 on the exact engine, with prompts that make all of them draft."""
    prompts = [
        "Count: one two three one two three one two",
        "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return",
        "The cat sat on the mat. The dog sat on the mat. The bird sat on",
    ]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    texts = []
    for config in (None, configs(smollm2_f32_artifact)[name]):
        with LLM(smollm2_f32_artifact, speculative_config=config, kv_cache_memory=1 << 30) as llm:
            texts.append([list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)])
            accepted = llm.stats().spec_decode_num_accepted_tokens
    assert texts[0] == texts[1]
    assert accepted > 10
