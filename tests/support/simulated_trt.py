"""TensorRT's module as far as the executor calls it, on a simulated GPU.

Engines are ONNX files with our plugins' nodes, which torch and Triton's interpreter run. It asks for the order of calls
that the library's manual asks for. A test holds its names against the real modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_steps import self_contained
from plugin_graph import PluginGraph

from runtime.executors.segments.memory import ALIGNMENT

if TYPE_CHECKING:
    from simulated_gpu import SimulatedGpu

STREAM = 7
SCRATCH = 1000  # bytes that a run takes beside its tensors
_NUMPY = {
    ir.DataType.FLOAT: np.float32, ir.DataType.FLOAT16: np.float16, ir.DataType.INT8: np.int8,
    ir.DataType.INT32: np.int32, ir.DataType.INT64: np.int64,
}  # fmt: skip


def engine_bytes(graph: ir.Model, profiles: Sequence[Mapping[str, Any]], streamable: int = 0) -> bytes:
    """What stands for an engine of `graph`. `streamable`: bytes of weights that may stay in host memory."""
    proto = self_contained(graph)
    for key, value in (("profiles", json.dumps(profiles)), ("streamable", str(streamable))):
        proto.metadata_props.add(key=key, value=value)
    return proto.SerializeToString()


class _ILogger:
    INTERNAL_ERROR, ERROR = 0, 1

    def log(self, severity: int, message: str) -> None:
        raise NotImplementedError


class _Strategy:
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class SimulatedTrt:
    __version__ = "11.4.0.106"
    ILogger = _ILogger
    ExecutionContextAllocationStrategy = _Strategy

    def __init__(self, gpu: SimulatedGpu):
        self.gpu = gpu
        self.engines: list[SimulatedEngine] = []

    def Runtime(self, logger: _ILogger) -> SimulatedRuntime:  # noqa: N802
        return SimulatedRuntime(self, logger)


class SimulatedRuntime:
    def __init__(self, trt: SimulatedTrt, logger: _ILogger):
        self.trt, self.logger = trt, logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> SimulatedEngine | None:
        try:
            proto = onnx.load_from_string(serialized_engine)
        except Exception as error:  # protobuf raises its own kind
            self.logger.log(_ILogger.ERROR, f"Serialization assertion failed.\n{type(error).__name__}")
            return None
        self.trt.engines.append(SimulatedEngine(self.trt.gpu, proto, self.logger))
        return self.trt.engines[-1]


class SimulatedEngine:
    def __init__(self, gpu: SimulatedGpu, proto: onnx.ModelProto, logger: _ILogger):
        told = {entry.key: json.loads(entry.value) for entry in proto.metadata_props}
        model = ir.serde.deserialize_model(proto)
        self.gpu, self.logger, self.profiles = gpu, logger, told["profiles"]
        self.streamable_weights_size = told["streamable"]
        self.inputs = {value.name or "": value.dtype for value in model.graph.inputs}
        self.outputs = {value.name or "": value.dtype for value in model.graph.outputs}
        self.graph = PluginGraph(model)
        self.contexts: list[SimulatedContext] = []
        self.budget = self.streamable_weights_size

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH + (100 if self.budget < self.streamable_weights_size else 0)

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        assert not self.contexts, "the budget is set before there is a context"
        assert self.streamable_weights_size, "the engine was not built to stream weights"
        self.budget = budget

    def create_execution_context(self, strategy: int) -> SimulatedContext:
        assert strategy == _Strategy.USER_MANAGED
        self.contexts.append(SimulatedContext(self))
        return self.contexts[-1]


class SimulatedContext:
    def __init__(self, engine: SimulatedEngine):
        self.engine = engine
        self.profile: int | None = 0 if len(engine.profiles) == 1 else None
        self.scratch = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.prepared: dict[str, tuple[int, ...]] = {}  # of the last run that was not captured
        self.runs = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        self.profile, self.shapes = profile_index, {}
        return profile_index < len(self.engine.profiles)

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        assert size >= self.engine.device_memory_size_v2
        self.engine.gpu.view(memory, size)  # is allocated
        self.scratch = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None, "shapes are those of a profile"
        least, _, most = self.engine.profiles[self.profile][name]
        if len(shape) != len(least) or not all(a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
            self.engine.logger.log(_ILogger.ERROR, f"{name} {shape} is not in {least} to {most}")
            return False
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert name in self.engine.inputs or name in self.engine.outputs
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        assert self.scratch
        assert self.shapes.keys() == self.engine.inputs.keys()
        assert self.addresses.keys() == self.engine.inputs.keys() | self.engine.outputs.keys()
        shapes, addresses = dict(self.shapes), dict(self.addresses)
        if self.engine.gpu.recording is None:
            self.prepared = shapes
        assert shapes == self.prepared, "captured with shapes that no run has had before"
        self.engine.gpu.do(lambda: self._run(shapes, addresses))
        return True

    def _run(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        self.runs += 1
        gpu, feeds = self.engine.gpu, {}
        for name, dtype in self.engine.inputs.items():
            assert dtype is not None
            kind = np.dtype(_NUMPY[dtype])
            data = gpu.view(addresses[name], int(np.prod(shapes[name])) * kind.itemsize)
            feeds[name] = torch.from_numpy(data.view(kind).reshape(shapes[name]))
        for name, tensor in self.engine.graph.run(feeds).items():
            dtype = self.engine.outputs[name]
            assert dtype is not None
            data = np.ascontiguousarray(tensor.numpy(), _NUMPY[dtype]).reshape(-1).view(np.uint8)
            gpu.view(addresses[name], data.size)[:] = data


def lacking(trt: Any) -> list[str]:
    """What is simulated here, and is not in the real module `trt` or is not called so there."""
    pairs = {SimulatedRuntime: trt.Runtime, SimulatedEngine: trt.ICudaEngine, SimulatedContext: trt.IExecutionContext}
    found = [] if isinstance(trt.ICudaEngine.streamable_weights_size, property) else ["streamable_weights_size"]
    found += [n for n in ("STATIC", "USER_MANAGED") if not hasattr(trt.ExecutionContextAllocationStrategy, n)]
    found += [n for n in ("ERROR", "INTERNAL_ERROR") if not hasattr(trt.ILogger, n)]
    for simulated, real in pairs.items():
        for name, member in vars(simulated).items():
            if name.startswith("_"):
                continue
            theirs = getattr(real, name, None)
            if isinstance(member, property):
                good = isinstance(theirs, property) and (member.fset is None or theirs.fset is not None)
            else:
                arguments = member.__code__.co_varnames[1 : member.__code__.co_argcount]
                good = theirs is not None and all(f"{argument}: " in theirs.__doc__ for argument in arguments)
            if not good:
                found.append(f"{real.__name__}.{name}")
    return found
