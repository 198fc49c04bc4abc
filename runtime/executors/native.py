"""Runs an engine by the C++ library alone, without OpenVINO's runtime: its stored plan, or its portable form's."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plugins.block.native import NativeGraph
from plugins.block.plan import PlanError, read_plan
from plugins.linear.op import OP_TYPE
from plugins.native import find_native
from runtime.errors import PlancastError
from runtime.executors.batch_checks import check_ids
from runtime.executors.kv_cache import CacheOwner
from runtime.executors.manifest_checks import check_block, vocabulary
from runtime.executors.one_sequence import OneSequence
from runtime.executors.step_inputs import SCALAR, STEP_INPUTS, one_token
from runtime.manifest import rebuild_hint

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.artifact import Artifact
    from runtime.executor import StepBatch

_FEW_ROWS = 32  # room for so many at first


class NativeExecutor(CacheOwner):
    """An `Executor` over one graph of the C++ library, of a target or of a draft head. `open_native` makes one.

    Attributes:
        load_source: "plan" where a stored plan was loaded, "ir" where the portable form was made one.
        load_seconds: what loading took.
        hidden_states: f32 [R, H], what the last step's logits were read off, where the engine gives it.
        num_threads: threads that a step uses.
        notes: lines for a person about what went less well.
    """

    def __init__(self, artifact: Artifact, graph: NativeGraph, num_threads: int | None = None):
        """
        Raises:
            ArtifactError: the graph is not what the manifest says.
        """
        manifest, plan = artifact.manifest, graph.plan
        self.load_source, self.load_seconds = "plan", 0.0
        self.notes: tuple[str, ...] = ()
        self.kv_layout = manifest.kv
        self.num_threads = num_threads or manifest.defaults.num_threads or len(os.sched_getaffinity(0))
        self.hidden_states: NDArray[np.float32] | None = None
        self._graph: NativeGraph | None = graph
        check_block(artifact, self.kv_layout, sum(each.width for each in plan.inputs if each.is_cache))
        (self._cache_place,) = (place for place, each in enumerate(plan.inputs) if each.is_cache)
        # Of each input that is read, its place, the batch's field, and an array that stays, with room for all rows: to
        # copy a decode's few numbers takes less time than to ask an array where it lies.
        self._fields: list[tuple[int, str, NDArray[Any]]] = []
        for place, each in enumerate(plan.inputs):
            if each.name in STEP_INPUTS and each.name != SCALAR:
                field, dtype = STEP_INPUTS[each.name]
                self._fields.append((place, field, np.empty((0, each.width) if each.width else 0, dtype)))
        self._results = [np.empty((0, output.width), np.float32) for output in plan.outputs]
        self._one: OneSequence | None = None
        self.vocab_size = vocabulary(artifact, plan.outputs[0].width)
        # A head reads every token of its target, and says only some.
        self._reads_hidden = "hidden_states" in plan.places()
        self._known_tokens = manifest.model.vocab_size if self._reads_hidden else self.vocab_size

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache and bind it, in place of what an earlier call allocated.

        Raises:
            PlancastError: fewer than one block, or more than the free memory holds; with the numbers.
        """
        graph, cache = self._open_graph(), self._new_cache(num_blocks, [self.kv_layout.bytes_per_block])
        graph.set_input(self._cache_place, cache.arrays[0], num_blocks)
        self._cache = cache

    def warm_up(self) -> None:
        """Run one token into block 0, which must hold nothing yet, so that the first request does not wait for what a
        first pass prepares. A head's engine, fed by its target's, stays cold.

        Raises:
            PlancastError: nothing is allocated.
        """
        if not self._reads_hidden:
            self.run(one_token())

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step; see `Executor.run`. Logits and hidden states are overwritten by the next step.

        Raises:
            PlancastError: nothing is allocated.
            ValueError: a block or token id out of range.
        """
        graph, cache = self._open_graph(), self._allocated()
        check_ids(batch, cache.num_blocks, self._known_tokens)
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
        if len(self._results) > 1:
            self.hidden_states = self._results[1][:rows]
        return self._results[0][:rows]

    def close(self) -> None:
        """Free the engine and the cache. Idempotent."""
        self._graph = self._cache = self._one = None

    def one_sequence(self, num_tokens: int, num_blocks: int) -> OneSequence | None:
        """Of a head: what runs a pass over so many tokens of one sequence with so many blocks; None where only `run`
        has room."""
        if self._one is None:
            for at, (_, _, array) in enumerate(self._fields):
                if not len(array):
                    self._widen(at, _FEW_ROWS)
            if not len(self._results[0]):
                self._widen_results(_FEW_ROWS)
            fields = {field: (place, array) for place, field, array in self._fields}
            results = self._results[0], self._results[1]
            self._one = OneSequence(self._open_graph(), self.num_threads, fields, results)
        return self._one if self._one.fits(num_tokens, num_blocks) else None

    def _widen(self, at: int, rows: int) -> NDArray[Any]:
        """Room for more rows in an input's array."""
        place, field, array = self._fields[at]
        array = np.empty((max(rows, _FEW_ROWS), *array.shape[1:]), array.dtype)
        self._fields[at] = place, field, array
        self._open_graph().set_input(place, array, rows)
        self._one = None
        return array

    def _widen_results(self, rows: int) -> None:
        self._results = [np.empty((max(rows, _FEW_ROWS), each.shape[1]), np.float32) for each in self._results]
        for place, array in enumerate(self._results):
            self._open_graph().set_output(place, array)
        self._one = None

    def _open_graph(self) -> NativeGraph:
        if self._graph is None:
            raise PlancastError("the executor is closed")
        return self._graph


def open_native(artifact: Artifact, num_threads: int | None = None) -> NativeExecutor | None:
    """The engine of `artifact`, on `num_threads` threads (default: the manifest's, else one a usable core).

    A plan that is not there, or does not fit, is made of the portable form, where that is known to become one.

    Returns:
        None where OpenVINO must run it: it has operations of OpenVINO's own, or the library is not built here.

    Raises:
        ArtifactError: the engine is not what the manifest says.
    """
    began = time.perf_counter()
    native, backend, notes = find_native(), artifact.manifest.backend, []
    if native is None or OP_TYPE not in backend.plugins:
        return None
    graph = None
    if artifact.plan is not None:
        try:
            graph = NativeGraph(native, read_plan(artifact.plan))
        except PlanError as error:
            notes.append(
                f"{error}; {backend.engine} is compiled at load instead ({rebuild_hint(artifact.manifest.name)})"
            )
    source = "ir" if graph is None else "plan"
    if graph is None and (artifact.is_head or artifact.plan is not None):
        graph = _from_ir(native, artifact)
    if graph is None:
        return None
    executor = NativeExecutor(artifact, graph, num_threads)
    executor.load_source, executor.notes = source, tuple(notes)
    executor.load_seconds = time.perf_counter() - began
    return executor


def _from_ir(native: Path, artifact: Artifact) -> NativeGraph | None:
    """The portable form's graph; None where it has what only OpenVINO's runtime runs, or does not load."""
    from plugins.block.plan_openvino import ModelPlan, UnknownOperationError
    from runtime.executors.openvino_model import OpenVINOEngine

    backend = artifact.manifest.backend
    engine = OpenVINOEngine(native, backend.properties, own_linear=True)
    try:
        model = engine.read_ir(artifact.file(backend.engine))
        made = ModelPlan(model)
    except (UnknownOperationError, RuntimeError):
        return None
    return NativeGraph(native, made.maker.planned(made.plan))
