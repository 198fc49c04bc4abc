"""Engines of the tiny ONNX decoder, compiled by the real backend into real artifacts; and steps to feed them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import openvino as ov
import pytest
from numpy.typing import NDArray
from tiny_artifact import tiny_manifest
from tiny_onnx import BLOCK_SIZE, TinyOnnx

from builder.backends.openvino import compile_engine, kv_layout
from builder.passes.quantize_kv import QuantizeKV
from builder.recipe import BackendConfig, KvConfig, Recipe, WeightsConfig
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.executor import StepBatch


def recipe(compute: str = "f32", kv: str = "f32", weights: str = "f32", **backend) -> Recipe:
    """`kv` as one dtype, or as `key:value`."""
    key, _, value = kv.partition(":")
    return Recipe(
        name="tiny",
        model="tiny",
        backend=BackendConfig(compute=compute, **backend),
        kv=KvConfig(key=key, value=value or key),
        weights=WeightsConfig(dtype=weights),
    )


def skip_unless_computed(compute: str) -> None:
    """Skip a test where the CPU does not compute in that dtype."""
    if compute == "bf16" and "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU does not compute in bf16")


def lowered(tiny: TinyOnnx, recipe: Recipe) -> ir.Model:
    """The graph of `tiny` with the recipe's KV cache on its attention nodes."""
    model = tiny.model()
    QuantizeKV().run(model, recipe)
    return model


def build_artifact(folder: Path, tiny: TinyOnnx, recipe: Recipe) -> Artifact:
    """Compile `tiny` into the artifact `folder` and open it."""
    model = lowered(tiny, recipe)
    with ArtifactWriter(folder) as writer:
        info = compile_engine(model, recipe, writer.path)
        writer.commit(tiny_manifest(backend=info, kv=kv_layout(model, recipe)))
    return Artifact.open(folder, verify="full")


class Sequences:
    """Sequences of random tokens whose blocks lie scattered; makes the batches that advance them."""

    def __init__(self, count: int, max_tokens: int, *, vocab_size: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        per_sequence = -(-max_tokens // BLOCK_SIZE)
        self.num_blocks = count * per_sequence + 2
        blocks = rng.permutation(self.num_blocks)[: count * per_sequence].astype(np.int32)
        self.tables = list(blocks.reshape(count, per_sequence))
        self.tokens = rng.integers(0, vocab_size, (count, max_tokens))
        self.lengths = [0] * count

    def batch(self, advance: dict[int, int], *, every_row: bool = False) -> StepBatch:
        """The step that gives sequence i `advance[i]` new tokens; logits for its last row, or for every row."""
        pasts = [self.lengths[i] for i in advance]
        counts = list(advance.values())
        tables, tokens, positions = [], [], []
        for i, past, count in zip(advance, pasts, counts, strict=True):
            self.lengths[i] += count
            tables.append(self.tables[i][: -(-self.lengths[i] // BLOCK_SIZE)])
            tokens.append(self.tokens[i, past : past + count])
            positions.append(np.arange(past, past + count))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return StepBatch(
            token_ids=np.concatenate(tokens),
            positions=np.concatenate(positions),
            past_lens=np.array(pasts, np.int32),
            query_starts=starts,
            block_ids=np.concatenate(tables),
            block_starts=np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int32),
            max_context_len=max(past + count for past, count in zip(pasts, counts, strict=True)),
            logits_rows=np.arange(starts[-1]) if every_row else (starts[1:] - 1).astype(np.int64),
        )


def relative_error(actual: NDArray, expected: NDArray) -> float:
    """The largest error, as a share of the expected values' standard deviation."""
    return float(np.abs(actual - expected).max() / expected.std())
