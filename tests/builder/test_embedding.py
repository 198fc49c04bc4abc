"""`task: embed`: the graph ends in the last hidden state, the engine's vectors are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import transformers
from onnx_steps import hf_hidden, largest_difference
from safetensors.numpy import save_file
from tiny_build import plancast_home, tiny_recipe
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint
from tiny_hf import CONTEXT, VOCAB, tiny_weights, write_tiny_hf

from builder.build import build
from builder.embedding_parity import check_embedding_quality
from builder.passes import run_passes
from builder.passes.graph import dims
from builder.recipe import QualityConfig, Recipe, load_recipe
from builder.trace import trace
from runtime.errors import BuildError, RecipeError
from runtime.llm import LLM
from runtime.manifest import EmbeddingParity
from runtime.outputs import EmbeddingRequestOutput


@pytest.mark.parametrize(
    ("family", "headless"), [("llama-tied-bias", False), ("gpt2", False), ("qwen3", True), ("gemma2", True)]
)
def test_hidden_states_equal_eager_ones(family: str, headless: bool, tmp_path: Path) -> None:
    """From a checkpoint with a head, and from a base model's, whose weights bear other names."""
    model = write_tiny_checkpoint(family, tmp_path)
    if headless:
        (tmp_path / "model.safetensors").unlink()
        model.base_model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["architectures"][0].endswith("Model")
    graph = trace(open_tiny_checkpoint(tmp_path), max_context_len=32, task="embed")
    (output,) = graph.graph.outputs
    assert (output.name, dims(output)) == ("hidden", ("R", model.config.hidden_size))
    assert not any("lm_head" in (name or "") for name in graph.graph.initializers)
    assert largest_difference(graph, model.base_model, VOCAB_SIZE, hf_hidden) < 2e-5
    run_passes(graph, Recipe(name="tiny", model=str(tmp_path), task="embed"))
    assert largest_difference(graph, model.base_model, VOCAB_SIZE, hf_hidden) < 2e-5
    # Everything after the last attention runs on the wanted rows alone.
    assert [node.op_type for node in graph.graph if any(v is not None and v.name == "logits_rows" for v in node.inputs)]


def test_a_base_model_cannot_generate(tmp_path: Path) -> None:
    model = write_tiny_checkpoint("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.base_model.save_pretrained(tmp_path)
    with pytest.raises(BuildError, match="task: embed"):
        trace(open_tiny_checkpoint(tmp_path), max_context_len=32)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama without a head, as embedding checkpoints are published (Qwen3-Embedding): no `model.` in names."""
    folder = write_tiny_hf(tmp_path_factory.mktemp("base"), config={"architectures": ["LlamaModel"]})
    weights = {name.removeprefix("model."): weight for name, weight in tiny_weights().items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with plancast_home(tmp_path_factory.mktemp("home")) as folder:
        yield folder


@pytest.mark.parametrize(
    ("pooling", "sections"),
    [("last", {}), ("mean", {"weights": {"dtype": "int8"}, "quality": {"min_cosine": 0.99}})],
)
def test_a_built_engine_embeds_as_transformers_does(
    base_model: Path, home: Path, tmp_path: Path, pooling: str, sections: dict
) -> None:
    recipe = tiny_recipe(base_model, f"tiny-{pooling}", task="embed", embedding={"pooling": pooling}, **sections)
    artifact = build(recipe, tmp_path / "artifact")
    model = transformers.AutoModel.from_pretrained(base_model, dtype=torch.float32).eval()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 7, 65, 130, CONTEXT)]  # chunks are of 64
    with LLM(artifact) as llm:
        results = llm.embed(prompts)
        raw = llm.embed(prompts[:1], normalize=False)[0]
        info = llm.manifest.embedding
    assert info is not None
    assert info.parity is not None
    least = 0.999999 if not sections else 0.99
    assert info.parity.min_cosine > least
    assert info.parity.hidden_mean_cosine > (least if not sections else 0.9)  # a random model magnifies each rounding
    assert (info.size, info.pooling, info.normalize) == (64, pooling, True)
    for prompt, result in zip(prompts, results, strict=True):
        hidden = hf_hidden(model, prompt).astype(np.float64)
        expected = hidden[-1] if pooling == "last" else hidden.mean(0)
        vector = np.array(result.outputs.embedding)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
        assert vector @ expected / np.linalg.norm(expected) > least
    assert _length(raw) == pytest.approx(np.linalg.norm(hf_hidden(model, prompts[0])[0]), rel=0.02)
    card = (artifact / "README.md").read_text()
    assert "/v1/embeddings" in card
    assert "cosine" in card


def _length(result: EmbeddingRequestOutput) -> float:
    return float(np.linalg.norm(result.outputs.embedding))


def test_the_bound_on_the_cosine() -> None:
    figures = EmbeddingParity(
        prompts=4, min_cosine=0.98, mean_cosine=0.99, positions=9, hidden_min_cosine=0.9, hidden_mean_cosine=0.95
    )
    check_embedding_quality(figures, QualityConfig(min_cosine=0.97))
    with pytest.raises(BuildError, match=r"0\.980000, under quality\.min_cosine 0\.99"):
        check_embedding_quality(figures, QualityConfig(min_cosine=0.99))
    with pytest.raises(BuildError, match=r"min_cosine"):
        check_embedding_quality(
            msgspec.structs.replace(figures, min_cosine=float("nan")), QualityConfig(min_cosine=0.9)
        )
    with pytest.raises(BuildError, match=r"parity\.enabled"):
        check_embedding_quality(None, QualityConfig(min_cosine=0.9))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["task=embedd"], "did you mean 'embed'"),
        (["task=embed", "embedding.pooling=max"], "last, mean, cls"),
        (["embedding.pooling=mean"], "set task: embed"),
        (["task=embed", "quality.max_kl=0.1"], "usable: min_cosine"),
        (["task=embed", "speculation.method=[ngram]"], "generates nothing"),
        (["quality.min_cosine=0.9"], "usable: max_kl"),
    ],
)
def test_recipes_that_make_no_sense(settings: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        load_recipe("local", ["model=/models/m", "limits.max_context_len=256", *settings])
