"""A fused graph as a list of steps on torch tensors, with a paged cache. Knows nothing of the runtime around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugins.paged_attention.op import INPUTS, OP_TYPE
from plugins.rope.angles import angle_nodes, cast_uses, used_only_by
from plugins.torch_engine.attention import Layer, Turn, attend_by_kernels, attend_by_reference, splits_of
from plugins.torch_engine.fused import Rotary, Step, fuse
from plugins.torch_engine.ops import HANDLERS, HOST_ARGUMENTS

COMPUTE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
KERNELS = ("reference", "triton")
_CACHES = ("key_cache.", "value_cache.")
_SMALL = 64  # elements: shapes and scalars, which stay on the CPU
_TABLES = INPUTS[5:9]
_ROWS = "plancast.rows"  # among the values that are placed once


class UnsupportedOperatorError(ValueError):
    """The graph has an operator that this engine does not know; the message names it."""


def unsupported(model: ir.Model) -> list[str]:
    """The operators of the graph that this engine does not know, sorted."""
    kinds = {node.op_type for node in model.graph}
    return sorted(kinds - {*HANDLERS, OP_TYPE, "Constant"})


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor without the file that it lies in. onnx-ir reads no file that has several names, as built artifacts' do.

    Raises:
        ValueError: the file is not beside the graph.
    """
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    if Path(tensor.location).name != str(tensor.location):
        raise ValueError(f"{tensor.name} lies in {tensor.location}, which is not beside the graph")
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset or 0)
        data = file.read(-1 if tensor.length is None else tensor.length)
    proto = onnx.TensorProto(name=tensor.name, data_type=tensor.dtype, dims=tensor.shape.numpy(), raw_data=data)
    return ir.serde.deserialize_tensor(proto)


class TorchEngine:
    """Runs the graph in the file `path`, or one in memory, on `device`, computing in `compute` (f32, bf16, f16).

    `kernels`: what attends: the NumPy `reference` (on the CPU alone) or the `triton` kernels. `weights(name, shape)`
    gives those initializers that the graph has no values of.

    Attributes:
        block_bytes: of each cache, keys and values of layer after layer.
        output_names: of the graph.
        vocab_size: columns of the logits (0 where the first output has no fixed width).
    """

    def __init__(
        self,
        path: Path | ir.Model,
        *,
        compute: str = "f32",
        device: str = "cpu",
        kernels: str = "reference",
        weights: Callable[[str, tuple[int, ...]], Tensor] | None = None,
    ):
        """Raises `UnsupportedOperatorError`, and `ValueError` on a combination that cannot run."""
        if compute not in COMPUTE or kernels not in KERNELS:
            raise ValueError(f"compute {compute!r} with {kernels!r} kernels; known: {', '.join((*COMPUTE, *KERNELS))}")
        self.device = torch.device(device)
        if kernels == "reference" and self.device.type != "cpu":
            raise ValueError(f"the reference attends on the CPU alone, not on {device}: take the triton kernels")
        self._compute = COMPUTE[compute]
        self._attend = attend_by_kernels if kernels == "triton" else attend_by_reference
        self._kernels = kernels
        model = path if isinstance(path, ir.Model) else ir.load(path)
        unknown = unsupported(model)
        if unknown:
            raise UnsupportedOperatorError(f"the graph has {', '.join(unknown)}, which the torch engine does not know")
        self.input_names = [value.name or "" for value in model.graph.inputs]
        self._constants: dict[str, Tensor] = {}
        self._placed: dict[str, Tensor] = {}  # small ones once more, on the device
        self._steps: list[Step] = []
        self._layers: list[Layer] = []
        self._read(model, weights)
        self.output_names = [value.name or "" for value in model.graph.outputs]
        shape = model.graph.outputs[0].shape
        width = shape[-1] if shape is not None else 0
        self.vocab_size: int = width if isinstance(width, int) else 0
        self.block_bytes = [size for layer in self._layers for size in layer.block_bytes()]
        self._groups: list[Tensor] = []
        self._caches: list[Tensor] = []
        self.num_blocks = 0

    # Loading ------------------------------------------------------------------------------------------------------

    def _read(self, model: ir.Model, weights: Callable[[str, tuple[int, ...]], Tensor] | None) -> None:
        """Turn the graph into steps; what depends on constants alone is computed now."""
        exact = angle_nodes(model)
        for node in exact:
            for value in node.outputs:
                # To a float means: to what the engine computes in.
                cast_uses(value, ir.DataType.FLOAT, [use for use in value.uses() if use.node not in exact])
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                assert weights is not None, f"{name} has no value"
                assert value.shape is not None
                self._constants[name] = weights(name, value.shape.numpy())
                continue
            wide = used_only_by(value, exact)
            self._constants[name] = self._constant(_in_memory(value.const_value), wide=wide)
        steps = []
        for node in model.graph:
            wide = node in exact
            attributes = {name: self._attribute(attribute, wide) for name, attribute in node.attributes.items()}
            inputs = [None if value is None else value.name for value in node.inputs]
            outputs = [value.name or "" for value in node.outputs]
            if node.op_type == "Constant":
                (value,) = attributes.values()
                self._constants[outputs[0]] = value if isinstance(value, Tensor) else torch.tensor(value)
                continue
            if node.op_type == OP_TYPE:
                attributes = {"layer": Layer.of(attributes)}
                self._layers.append(attributes["layer"])
            else:
                attributes["compute"] = torch.float32 if wide else self._compute
            step = Step(node.op_type, attributes, inputs, outputs, [])
            if node.op_type != OP_TYPE and all(name is None or name in self._constants for name in inputs):
                self._constants.update(zip(outputs, self._apply(step, self._constants, {}), strict=False))
                continue
            steps.append(step)
        self._layers.sort(key=lambda layer: layer.index)
        outputs = {value.name or "" for value in model.graph.outputs}
        if self._kernels == "triton":
            steps = fuse(steps, self._constants, outputs)
        self._keep_needed(steps, outputs)

    def _keep_needed(self, steps: list[Step], outputs: set[str]) -> None:
        """Note where each value is used last, and drop constants that were only needed to compute others."""
        seen = set(outputs)
        used = {name for step in steps for name in step.inputs if name is not None} | outputs
        for step in reversed(steps):
            names = {name for name in (*step.inputs, *step.outputs) if name}
            step.free.extend(sorted(name for name in names - seen if name not in self._constants))
            seen |= names
        self._steps = steps
        self._constants = {name: value for name, value in self._constants.items() if name in used}
        for name in self._constants:  # one by one: what they are views of goes on the way
            self._constants[name] = self._place(self._constants[name])

    def _place(self, value: Tensor) -> Tensor:
        small = value.numel() <= _SMALL and not value.is_floating_point()
        return value.contiguous() if small else value.contiguous().to(self.device)

    def _constant(self, tensor: ir.TensorProtocol, *, wide: bool) -> Tensor:
        array, compute = np.asarray(tensor.numpy()), torch.float32 if wide else self._compute
        if tensor.dtype == ir.DataType.BFLOAT16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(compute)
        if tensor.dtype.is_floating_point():
            return torch.from_numpy(array.astype(np.float32)).to(compute)
        narrow = array.dtype.kind not in "iub"  # int4 and uint4 have dtypes of their own
        return torch.from_numpy(np.array(array.astype(np.int8) if narrow else array))

    def _attribute(self, attribute: ir.Attr, wide: bool) -> Any:
        if attribute.type == ir.AttributeType.TENSOR:
            return self._constant(attribute.as_tensor(), wide=wide)
        return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value

    # Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> None:
        """Allocate zeroed caches of `num_blocks` blocks, in place of earlier ones: caches of one size side by side."""
        groups: list[Tensor] = []
        caches: dict[int, Tensor] = {}
        for size in sorted(set(self.block_bytes)):
            members = [i for i, other in enumerate(self.block_bytes) if other == size]
            group = torch.zeros(len(members), num_blocks, size, dtype=torch.uint8, device=self.device)
            groups.append(group)
            caches |= dict(zip(members, group, strict=True))
        self._groups, self.num_blocks = groups, num_blocks
        self._caches = [caches[i] for i in range(len(self.block_bytes))]

    def free_memory(self) -> int | None:
        """Bytes free on the device; None where that is the host's memory."""
        return None if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]

    @property
    def caches(self) -> list[Tensor]:
        """The memory of each cache u8 [num_blocks, block bytes], in the order of `block_bytes`."""
        return self._caches

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) blocks of every cache, in order."""
        if self._kernels == "triton":
            from plugins.paged_attention.torch_kernel import copy

            copy(self._caches, copies)
            return
        for source, target in copies:
            for group in self._groups:
                group[:, target] = group[:, source]

    def read_block(self, block_id: int) -> bytes:
        """The block's bytes in every cache."""
        return b"".join(group[:, block_id].cpu().numpy().tobytes() for group in self._groups)

    def write_block(self, block_id: int, data: bytes) -> None:
        """Put back what `read_block` returned. Raises `ValueError` where `data` has another length."""
        expected = sum(self.block_bytes)
        if len(data) != expected:
            raise ValueError(f"a block has {expected} bytes, and {len(data)} were given")
        offset = 0
        for group in self._groups:
            count = group.shape[0] * group.shape[2]
            part = torch.frombuffer(bytearray(data[offset : offset + count]), dtype=torch.uint8)
            group[:, block_id] = part.reshape(group.shape[0], -1).to(self.device)
            offset += count

    # Running ------------------------------------------------------------------------------------------------------

    def run(self, feeds: Mapping[str, NDArray]) -> NDArray[np.float32]:
        """Logits f32 [R, vocab_size] for the graph inputs `feeds` (by name, the caches left out)."""
        return self.run_all(feeds)[self.output_names[0]]

    def run_all(self, feeds: Mapping[str, NDArray]) -> dict[str, NDArray]:
        """Every output of the graph by its name, floats as f32."""
        outputs = self.compute(feeds)
        return {n: (v.float() if v.is_floating_point() else v).cpu().numpy() for n, v in outputs.items()}

    @torch.inference_mode()
    def compute(self, feeds: Mapping[str, NDArray]) -> dict[str, Tensor]:
        """The same, where and as the device computes it, which may not be done."""
        values: dict[str, Tensor] = {}
        for name in self.input_names:
            if not name.startswith(_CACHES):
                array = np.asarray(feeds[name])
                tensor = torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)
                if tensor.is_floating_point():
                    tensor = tensor.to(self._compute)
                values[name] = tensor if name == "max_context_len" else tensor.to(self.device)
        return self.evaluate(values, {})

    def evaluate(self, inputs: Mapping[str, Tensor], placed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Every output of the graph by its name, as it lies on the device.

        Args:
            inputs: on the device, but `max_context_len`; the caches left out.
            placed: copies of values that were computed on the CPU (from shapes), which this fills. Given again for
                inputs of the same shapes, it keeps the step from copying: nothing then waits for the device.
        """
        values: dict[str, Tensor] = {**self._constants, **inputs}
        for step in self._steps:
            values.update(zip(step.outputs, self._apply(step, values, placed), strict=False))
            for name in step.free:
                values.pop(name, None)
        return {name: values[name] for name in self.output_names}

    def splits(self, sequences: int, max_context_len: int) -> tuple[int, ...]:
        """In how many pieces each layer's keys are attended to in a decode step, which decides what is launched."""
        if self._kernels != "triton":
            return ()
        return tuple(splits_of(layer, sequences, max_context_len, self.device) for layer in self._layers)

    def operators(self) -> Counter[str]:
        """How many steps of each kind a run takes."""
        return Counter(step.op_type for step in self._steps)

    def _apply(self, step: Step, values: Mapping[str, Tensor], placed: dict[str, Tensor]) -> Sequence[Tensor]:
        if step.op_type == OP_TYPE:
            return [self._attention(step, values, placed)]
        inputs = [None if name is None else values[name] for name in step.inputs]
        device = next((value.device for value in inputs if value is not None and value.device.type != "cpu"), None)
        if device is not None:
            host = HOST_ARGUMENTS.get(step.op_type, ())
            for i, (name, value) in enumerate(zip(step.inputs, inputs, strict=True)):
                if name is not None and value is not None and value.device.type == "cpu" and i not in host:
                    known = self._placed if name in self._constants else placed
                    if name not in known:
                        known[name] = value.to(device)
                    inputs[i] = known[name]
        result = HANDLERS[step.op_type](step.attributes, *inputs)
        return result if isinstance(result, tuple) else [result]

    def _attention(self, step: Step, values: Mapping[str, Tensor], placed: dict[str, Tensor]) -> Tensor:
        layer: Layer = step.attributes["layer"]
        named = dict(zip(INPUTS, step.inputs, strict=False))
        given = {k: values[v] for k, v in named.items() if v is not None and not v.startswith(_CACHES)}
        index = 2 * self._layers.index(layer)
        pages = layer.pages(self._caches[index], self._caches[index + 1])
        rotary: Rotary | None = step.attributes.get("rope")
        turn = {}
        if rotary is not None:
            rows = len(given["query"])
            if _ROWS not in placed:  # the angles are those of the step's own rows
                placed[_ROWS] = torch.arange(rows, device=self.device)
            cos, sin = (values[name].reshape(rows, -1).contiguous() for name in (rotary.cos, rotary.sin))
            turn["turn"] = Turn(cos, sin, placed[_ROWS], rotary.rotary, rotary.interleaved)
        return self._attend(
            layer, given["query"], given["key"], given["value"], pages, [given[name] for name in _TABLES],
            int(given["max_context_len"]), given.get("sinks"), given.get("alibi_slopes"), **turn,
        )  # fmt: skip
