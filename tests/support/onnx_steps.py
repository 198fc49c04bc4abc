"""Runs a traced graph in NumPy, step by step over a real paged cache, and the same tokens through transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from plugins.paged_attention.op import DOMAIN
from plugins.paged_attention.reference import reference
from runtime.executor import Executor, StepBatch

if TYPE_CHECKING:
    import onnx_ir as ir


class PagedAttention(OpRun):
    """`plancast::PagedAttention` in NumPy. The caches are written in place, as the operator says."""

    op_domain = DOMAIN

    def _run(self, *inputs: Any, kv_dtype: str = "f32", layer: int = 0, **attributes: Any) -> tuple[np.ndarray]:
        padded: list[Any] = [*inputs, *(None,) * (12 - len(inputs))]
        for details in ("group_size", "key_scale", "value_scale"):  # of packed cells: the caches here are f32
            attributes.pop(details, None)
        return (reference(*padded, **attributes),)


def self_contained(model: ir.Model) -> onnx.ModelProto:
    """The proto of `model` with every weight in it."""
    import onnx_ir as ir

    proto = ir.serde.serialize_model(model)
    for tensor in proto.graph.initializer:
        value = model.graph.initializers[tensor.name].const_value
        assert value is not None
        tensor.CopyFrom(onnx.numpy_helper.from_array(value.numpy(), tensor.name))
    return proto


class Steps(ABC):
    """Sequences of tokens that advance step by step over scattered blocks; a subclass runs the model."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0):
        self.block_size = block_size
        self.free = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @abstractmethod
    def run(self, batch: StepBatch) -> np.ndarray:
        """Logits `[R, V]`."""

    def step(self, new_tokens: dict[str, list[int]], rows: list[int] | None = None) -> np.ndarray:
        """Run the new tokens of each sequence (by its name) and return the logits `[R, V]` of `rows` (default: all)."""
        past, positions, starts = [], [], [0]
        for name, tokens in new_tokens.items():
            before = self.lengths.get(name, 0)
            past.append(before)
            positions += range(before, before + len(tokens))
            starts.append(starts[-1] + len(tokens))
            self.lengths[name] = before + len(tokens)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < self.lengths[name]:
                table.append(self.free.pop())
        tables = [self.tables[name] for name in new_tokens]
        batch = StepBatch(
            token_ids=np.array([t for tokens in new_tokens.values() for t in tokens], np.int64),
            positions=np.array(positions, np.int64),
            past_lens=np.array(past, np.int32),
            query_starts=np.array(starts, np.int32),
            block_ids=np.array([b for table in tables for b in table], np.int32),
            block_starts=np.cumsum([0, *map(len, tables)]).astype(np.int32),
            max_context_len=max(self.lengths[name] for name in new_tokens),
            logits_rows=np.arange(starts[-1]) if rows is None else np.array(rows, np.int64),
        )
        return self.run(batch)


class OnnxSteps(Steps):
    """A graph run by ONNX's own reference evaluator, attention by ours."""

    def __init__(self, model: ir.Model, num_blocks: int = 24, seed: int = 0):
        self.evaluator = ReferenceEvaluator(self_contained(model), new_ops=[PagedAttention])
        self.names = [value.name or "" for value in model.graph.inputs]
        self.caches: dict[str, np.ndarray] = {}
        block_size = 0
        for value in model.graph.inputs:
            if "_cache." in (value.name or ""):
                assert value.shape is not None
                dims = [num_blocks if not isinstance(dim, int) else dim for dim in value.shape]
                # NaN: a read of a cell that nobody wrote shows.
                self.caches[value.name or ""] = np.full(dims, np.nan, np.float32)
                block_size = dims[2]
        super().__init__(num_blocks, block_size, seed)

    def run(self, batch: StepBatch) -> np.ndarray:
        feeds = {
            "input_ids": batch.token_ids,
            "position_ids": batch.positions,
            "past_lens": batch.past_lens,
            "query_starts": batch.query_starts,
            "block_ids": batch.block_ids,
            "block_starts": batch.block_starts,
            "max_context_len": np.array(batch.max_context_len, np.int32),
            "logits_rows": batch.logits_rows,
            **self.caches,
        }
        (logits,) = self.evaluator.run(None, {name: feeds[name] for name in self.names})
        return np.asarray(logits)


class ExecutorSteps(Steps):
    """A compiled engine."""

    def __init__(self, executor: Executor, num_blocks: int = 24, seed: int = 0):
        self.executor = executor
        executor.allocate(num_blocks)
        super().__init__(num_blocks, executor.kv_layout.block_size, seed)

    def run(self, batch: StepBatch) -> np.ndarray:
        return self.executor.run(batch).copy()


def hf_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits `[T, V]` of transformers over one whole sequence."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


def hf_hidden(model: Any, tokens: list[int]) -> np.ndarray:
    """Last hidden states `[T, H]` of a base model of transformers over one whole sequence."""
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0].float().numpy()


def largest_difference(steps: ir.Model | Steps, model: Any, vocab_size: int, truth: Any = hf_logits) -> float:
    """Largest |graph or engine - transformers| over the output's scale: two prompts, a chunk with a decode, a decode.

    `truth(model, tokens)` is what transformers says.
    """
    rng = np.random.default_rng(1)
    whole = {name: rng.integers(3, vocab_size, n).tolist() for name, n in (("a", 21), ("b", 12))}
    expected = {name: truth(model, tokens) for name, tokens in whole.items()}
    scale = max(float(np.abs(logits).max()) for logits in expected.values())
    run = steps if isinstance(steps, Steps) else OnnxSteps(steps)
    done = dict.fromkeys(whole, 0)
    worst = 0.0
    for counts in ({"a": 9, "b": 11}, {"a": 11, "b": 1}, {"a": 1}):
        logits = run.step({name: whole[name][done[name] : done[name] + n] for name, n in counts.items()})
        want = np.concatenate([expected[name][done[name] : done[name] + n] for name, n in counts.items()])
        worst = max(worst, float(np.abs(logits - want).max()))
        for name, n in counts.items():
            done[name] += n
    return worst / scale
