"""Runs an engine that OpenVINO compiled, on this machine's CPU."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from plugins.linear.op import OP_TYPE
from plugins.native import find_native
from plugins.paged_attention.openvino import KV_SCALE_BYTES
from runtime.errors import ArtifactError, PlancastError
from runtime.executors.batch_checks import check_ids
from runtime.executors.kv_cache import CacheOwner
from runtime.executors.manifest_checks import check_block, vocabulary
from runtime.executors.openvino_inputs import StepInputs
from runtime.executors.openvino_model import OpenVINOEngine, reason
from runtime.executors.step_inputs import STEP_INPUTS, one_token
from runtime.manifest import rebuild_hint

if TYPE_CHECKING:
    from pathlib import Path

    from runtime.artifact import Artifact
    from runtime.executor import StepBatch
    from runtime.kv_layout import KvLayout


class OpenVINOExecutor(CacheOwner):
    """An `Executor` over one OpenVINO infer request, to which the KV cache is bound once.

    Attributes:
        load_source: "blob" where the compiled form was loaded, "ir" where the portable form was compiled.
        load_seconds: what loading took.
        hidden_states: f32 [R, H], what the last step's logits were read off, where the engine gives it.
        num_threads: threads that a step uses.
    """

    def __init__(self, artifact: Artifact, num_threads: int | None = None):
        """Load the engine of `artifact`, on `num_threads` threads (default: the manifest's, else one a usable core).

        Raises:
            ArtifactError: the CPU lacks what the engine computes in, or the engine's files do not load.
        """
        begin = time.perf_counter()
        manifest = artifact.manifest
        self.kv_layout: KvLayout = manifest.kv
        self.num_threads = num_threads or manifest.defaults.num_threads or len(os.sched_getaffinity(0))
        properties = {**manifest.backend.properties, "INFERENCE_NUM_THREADS": str(self.num_threads)}
        native = find_native()
        engine = OpenVINOEngine(native, properties, own_linear=OP_TYPE in manifest.backend.plugins)
        _check_compute(engine, artifact)
        compiled, self.load_source = _load(engine, artifact, artifact.blob if native else None)
        if engine.attention_replaced:
            self.kv_layout = _openvinos_cells(self.kv_layout)
        self._engine: OpenVINOEngine | None = engine
        self._request: ov.InferRequest | None = compiled.create_infer_request()
        self._cells = {
            port.any_name: (index, port.element_type, [dim.get_length() for dim in list(port.partial_shape)[1:]])
            for index, port in enumerate(compiled.inputs)
            if port.any_name not in STEP_INPUTS
        }
        step_inputs = [
            (index, *STEP_INPUTS[port.any_name])
            for index, port in enumerate(compiled.inputs)
            if port.any_name in STEP_INPUTS
        ]
        self._inputs = StepInputs(step_inputs)
        block = sum(int(np.prod(shape)) * dtype.bitwidth // 8 for _, dtype, shape in self._cells.values())
        check_block(artifact, self.kv_layout, block)
        self.vocab_size = vocabulary(artifact, compiled.output(0).partial_shape[1].get_length())
        # A head reads every token of its target, and says only some.
        self._reads_hidden = any(field == "hidden_states" for _, field, _ in step_inputs)
        self._known_tokens = manifest.model.vocab_size if self._reads_hidden else self.vocab_size
        self._gives_hidden = len(compiled.outputs) > 1
        self.hidden_states: NDArray[np.float32] | None = None
        self.load_seconds = time.perf_counter() - begin

    def allocate(self, num_blocks: int) -> None:
        """Allocate the KV cache and bind it, in place of what an earlier call allocated.

        Raises:
            PlancastError: fewer than one block, or more than the free memory holds; with the numbers.
        """
        request = self._open_request()
        sizes = [int(np.prod(shape)) * dtype.bitwidth // 8 for _, dtype, shape in self._cells.values()]
        cache = self._new_cache(num_blocks, sizes)
        for array, (index, dtype, shape) in zip(cache.arrays, self._cells.values(), strict=True):
            request.set_input_tensor(index, ov.Tensor(array, ov.Shape([num_blocks, *shape]), dtype))
        self._cache = cache

    def warm_up(self) -> None:
        """Run one token into block 0, which must hold nothing yet, so that the first request does not wait for what a
        first pass prepares (SmolLM2-135M: 130 ms of processor time). A head's engine, fed by its target's, stays cold.

        Raises:
            PlancastError: nothing is allocated.
        """
        if not self._reads_hidden:
            self.run(one_token())

    def run(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step; see `Executor.run`. The logits are OpenVINO's own memory, overwritten by the next step.

        Raises:
            PlancastError: nothing is allocated.
            ValueError: a block or token id out of range, which OpenVINO would not notice before it crashes.
        """
        request, cache = self._open_request(), self._allocated()
        check_ids(batch, cache.num_blocks, self._known_tokens)
        if batch.copies:
            cache.copy_blocks(batch.copies)
        self._inputs.bind(request, batch)
        request.infer(share_outputs=True)
        if self._gives_hidden:
            self.hidden_states = request.get_output_tensor(1).data
        return request.get_output_tensor(0).data

    def close(self) -> None:
        """Free the engine and the cache. Idempotent; views of the last logits become invalid."""
        # In this order: the request points into the memory of the cache and of the engine's blob.
        self._request = self._cache = self._engine = None

    def _open_request(self) -> ov.InferRequest:
        if self._request is None:
            raise PlancastError("the executor is closed")
        return self._request


def _openvinos_cells(layout: KvLayout) -> KvLayout:
    """The layout of an engine whose attention nodes became OpenVINO's: the same cells with other scales beside them."""
    layers = tuple(
        msgspec.structs.replace(
            layer,
            key_scale_bytes=KV_SCALE_BYTES[layer.key_dtype],
            value_scale_bytes=KV_SCALE_BYTES[layer.value_dtype],
        )
        for layer in layout.layers
    )
    return msgspec.structs.replace(layout, layers=layers)


def _load(engine: OpenVINOEngine, artifact: Artifact, blob: Path | None) -> tuple[ov.CompiledModel, str]:
    """The compiled model and where it came from: "blob" or "ir"."""
    if blob:
        try:
            return engine.import_blob(blob), "blob"
        except RuntimeError:
            pass  # made by another build of OpenVINO, or for another CPU: the portable form still serves
    try:
        return engine.compile_ir(artifact.file(artifact.manifest.backend.engine)), "ir"
    except RuntimeError as error:
        hint = rebuild_hint(artifact.manifest.name)
        raise ArtifactError(f"{artifact.path}: OpenVINO does not load the engine ({reason(error)}); {hint}") from error


def _check_compute(engine: OpenVINOEngine, artifact: Artifact) -> None:
    """OpenVINO computes in f32, silently, where the CPU has no bf16; the KV cache then has the wrong type."""
    if engine.properties.get("INFERENCE_PRECISION_HINT") == "bf16":
        offered = engine.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "BF16" not in offered:
            raise ArtifactError(
                f"{artifact.path}: computes in bf16, which this CPU does not (it has {', '.join(offered)}); "
                "rebuild it: plancast build RECIPE --set backend.compute=f32 --set kv=f16"
            )
