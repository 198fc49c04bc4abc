"""Runs a draft head that was built for OpenVINO without its runtime, which takes as long as the head itself."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plugins.block.host import HostModel, UnknownOperationError
from plugins.linear.op import OP_TYPE
from plugins.native import find_native
from runtime.executors.batch_checks import check_ids
from runtime.executors.kv_cache import CacheOwner
from runtime.executors.one_sequence import OneSequence
from runtime.executors.openvino_inputs import SCALAR, STEP_INPUTS
from runtime.executors.openvino_model import OpenVINOEngine

if TYPE_CHECKING:
    from runtime.artifact import Artifact
    from runtime.executor import StepBatch

_FEW_ROWS = 32  # room for so many at first


class HeadExecutor(CacheOwner):
    """An `Executor` over the C++ library alone. `open_head` makes one.

    Attributes:
        load_source: "ir": a head's portable form is lowered in 0.1 s.
        load_seconds: what loading took.
        hidden_states: f32 [R, H], what the last pass's logits were read off.
        num_threads: threads that a pass uses.
    """

    load_source = "ir"

    def __init__(self, artifact: Artifact, model: HostModel, num_threads: int, began: float):
        self.kv_layout = artifact.manifest.kv
        self.num_threads = num_threads
        self.vocab_size = model.widths[0]
        self.hidden_states: NDArray[np.float32] | None = None
        self._known_tokens = artifact.manifest.model.vocab_size
        self._most_positions = artifact.manifest.limits.max_context_len
        self._graph = model.graph
        fields = {name: STEP_INPUTS[name] for name in model.inputs if name in STEP_INPUTS and name != SCALAR}
        # Of each input that is read, its place, the batch's field, and an array that stays, with room for all rows.
        self._fields: list[tuple[int, str, NDArray[Any]]] = []
        for name, (field, dtype) in fields.items():
            width = model.input_widths[model.inputs[name]]
            self._fields.append((model.inputs[name], field, np.empty((0, width) if width else 0, dtype)))
        self._one: OneSequence | None = None
        (self._cache_place,) = (place for name, place in model.inputs.items() if name not in STEP_INPUTS)
        self._results = [np.empty((0, width), np.float32) for width in model.widths]
        self.load_seconds = time.perf_counter() - began

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache. Raises `PlancastError`, with the numbers, where memory does not suffice."""
        cache = self._new_cache(num_blocks, [self.kv_layout.bytes_per_block])
        self._graph.set_input(self._cache_place, cache.arrays[0], num_blocks)
        self._cache = cache

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one pass; see `Executor.run`.

        Raises:
            PlancastError: nothing is allocated.
            ValueError: a block or token id out of range, or a position that the head was not built for.
        """
        cache, graph = self._allocated(), self._graph
        check_ids(batch, cache.num_blocks, self._known_tokens)
        if batch.max_context_len > self._most_positions:
            raise ValueError(f"a context of {batch.max_context_len} tokens, and the head knows {self._most_positions}")
        if batch.copies:
            cache.copy_blocks(batch.copies)
        for at, (place, field, array) in enumerate(self._fields):
            value = getattr(batch, field)
            count = len(value)
            if count > len(array):
                array = self._widen(at, count)
            array[:count] = value
            graph.set_length(place, count)
        rows = len(batch.logits_rows)
        if rows > len(self._results[0]):
            self._widen_results(rows)
        graph.run(self.num_threads)
        logits, hidden = self._results
        self.hidden_states = hidden[:rows]
        return logits[:rows]

    def one_sequence(self, num_tokens: int, num_blocks: int) -> OneSequence | None:
        """What runs a pass over so many tokens of one sequence with so many blocks; None where only `run` has room."""
        if self._one is None:
            for at, (_, _, array) in enumerate(self._fields):
                if not len(array):
                    self._widen(at, _FEW_ROWS)
            if not len(self._results[0]):
                self._widen_results(_FEW_ROWS)
            fields = {field: (place, array) for place, field, array in self._fields}
            self._one = OneSequence(self._graph, self.num_threads, fields, (self._results[0], self._results[1]))
        return self._one if self._one.fits(num_tokens, num_blocks) else None

    def _widen(self, at: int, rows: int) -> NDArray[Any]:
        place, field, array = self._fields[at]
        array = np.empty((max(rows, _FEW_ROWS), *array.shape[1:]), array.dtype)
        self._fields[at] = place, field, array
        self._graph.set_input(place, array, rows)
        self._one = None
        return array

    def _widen_results(self, rows: int) -> None:
        self._results = [np.empty((max(rows, _FEW_ROWS), each.shape[1]), np.float32) for each in self._results]
        for place, array in enumerate(self._results):
            self._graph.set_output(place, array)
        self._one = None

    def close(self) -> None:
        """Free the cache. Idempotent."""
        self._cache = None


def open_head(artifact: Artifact, num_threads: int | None = None) -> HeadExecutor | None:
    """The head `artifact` (`Artifact.draft_head`); None where it has what only OpenVINO's runtime runs."""
    began = time.perf_counter()
    native, backend = find_native(), artifact.manifest.backend
    if native is None or OP_TYPE not in backend.plugins:
        return None
    num_threads = num_threads or artifact.manifest.defaults.num_threads or len(os.sched_getaffinity(0))
    engine = OpenVINOEngine(native, backend.properties, own_linear=True)
    try:
        ir = engine.read_ir(artifact.file(backend.engine))
        model = HostModel(ir, native, engine.core, artifact.manifest.limits.max_context_len)
    except (UnknownOperationError, RuntimeError):
        return None
    if len(model.inputs.keys() - STEP_INPUTS.keys()) != 1:  # caches apart, where something else than a block attends
        return None
    return HeadExecutor(artifact, model, num_threads, began)
