"""Operators of a graph that the Triton kernels compute together: which steps become one, and what runs them.

The graph stays as it is: its list of steps is shortened when it is loaded. Norms take the residual sum along; the gate
of an MLP is one kernel; rotary embedding goes with the writing of new keys. Steps of other forms run on torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from plugins.paged_attention.op import INPUTS, OP_TYPE
from plugins.torch_engine.ops import HANDLERS, handles

NORM, ADD_NORM, GATE = "FusedRMSNorm", "FusedAddRMSNorm", "FusedGate"


class Step(NamedTuple):
    """One operator: its attributes, the names of its inputs and outputs."""

    op_type: str
    attributes: dict[str, Any]
    inputs: list[str | None]
    outputs: list[str]
    free: list[str]  # values that nobody needs afterwards


class Rotary(NamedTuple):
    """Of an attention step: its query and key are turned by the values `cos` and `sin` [T, 1, R / 2] before."""

    cos: str
    sin: str
    rotary: int  # elements of a head that turn
    interleaved: bool


def fuse(steps: list[Step], constants: Mapping[str, Tensor], outputs: set[str]) -> list[Step]:
    """`steps` with what the kernels compute together in one step each. `outputs`: of the graph, which stay."""
    return _Fusion(steps, constants, outputs).run()


class _Fusion:
    def __init__(self, steps: list[Step], constants: Mapping[str, Tensor], outputs: set[str]):
        self._steps, self._constants = steps, constants
        self._maker = {name: step for step in steps for name in step.outputs}
        self._uses = Counter(name for step in steps for name in step.inputs if name is not None)
        self._uses.update(outputs)
        self._at = {id(step): i for i, step in enumerate(steps)}
        self._gone: set[int] = set()

    def run(self) -> list[Step]:
        made = []
        for step in self._steps:
            if step.op_type == "RMSNormalization" and step.attributes.get("axis", -1) == -1:
                step = self._norm(step)
            elif step.op_type == "Mul":
                step = self._gate(step)
            elif step.op_type == OP_TYPE:
                step = self._rotary(step)
            made.append(step)
        return [step for step, old in zip(made, self._steps, strict=True) if id(old) not in self._gone]

    def _only(self, name: str | None, op_type: str, uses: int = 1) -> Step | None:
        """The step that makes `name`, should it be of this type, and `name` be used so often."""
        step = self._maker.get(name or "")
        return step if step is not None and step.op_type == op_type and self._uses[name or ""] == uses else None

    def _norm(self, step: Step) -> Step:
        x, weight = step.inputs[:2]
        summed = self._maker.get(x or "")
        if summed is None or summed.op_type != "Add" or any(name in self._constants for name in summed.inputs):
            return Step(NORM, step.attributes, step.inputs, step.outputs, [])
        # The sum is made with the norm, which must therefore be the first to read it: in a decoder it always is.
        between = self._steps[self._at[id(summed)] + 1 : self._at[id(step)]]
        if any(summed.outputs[0] in other.inputs for other in between):
            return Step(NORM, step.attributes, step.inputs, step.outputs, [])
        self._gone.add(id(summed))
        inputs = [*summed.inputs, weight]
        return Step(ADD_NORM, step.attributes, inputs, [step.outputs[0], summed.outputs[0]], [])

    def _gate(self, step: Step) -> Step:
        """Split -> x * sigmoid(x) or Swish, or Gelu of the first half -> times the second half."""
        for active, up in (step.inputs, step.inputs[::-1]):
            halves = self._only(up, "Split")
            if halves is None or len(halves.outputs) != 2 or up != halves.outputs[1]:
                continue
            gate = halves.outputs[0]
            found = self._activation(active, gate)
            if found is None or halves.attributes.get("axis", 0) != -1 or not self._equal(halves):
                continue
            name, steps = found
            self._gone.update(map(id, (halves, *steps)))
            return Step(GATE, {"activation": name}, [halves.inputs[0]], step.outputs, [])
        return step

    def _activation(self, active: str | None, gate: str) -> tuple[str, list[Step]] | None:
        for kind, name in (("Swish", "silu"), ("Gelu", "gelu_tanh")):
            step = self._only(active, kind)
            if step is not None and step.inputs == [gate] and self._uses[gate] == 1:
                exact = step.attributes.get("approximate", "none") != "tanh"
                plain = step.attributes.get("alpha", 1.0) == 1.0
                return (name, [step]) if (plain if kind == "Swish" else not exact) else None
        product = self._only(active, "Mul")
        if product is None or self._uses[gate] != 2 or gate not in product.inputs:
            return None
        (other,) = [name for name in product.inputs if name != gate] or [None]
        sigmoid = self._only(other, "Sigmoid")
        return ("silu", [product, sigmoid]) if sigmoid is not None and sigmoid.inputs == [gate] else None

    def _equal(self, split: Step) -> bool:
        if len(split.inputs) == 1 or split.inputs[1] is None:
            return split.attributes.get("num_outputs") == 2
        sizes = self._constants.get(split.inputs[1])
        return sizes is not None and len(set(sizes.tolist())) == 1

    def _rotary(self, step: Step) -> Step:
        if step.attributes["layer"].rotate != "none":  # turned by another matrix in between
            return step
        chains = [self._chain(step.inputs[INPUTS.index(part)], part, step) for part in ("query", "key")]
        if chains[0] is None or chains[1] is None or chains[0][2] != chains[1][2]:
            return step
        inputs = [*step.inputs, *(None,) * (len(INPUTS) - len(step.inputs))]
        for part, (source, steps, _) in zip(("query", "key"), chains, strict=True):  # type: ignore[misc]
            inputs[INPUTS.index(part)] = source
            self._gone.update(map(id, steps))
        rotary = chains[0][2]
        # Named as inputs too, so that they are kept until then.
        return Step(OP_TYPE, {**step.attributes, "rope": rotary}, [*inputs, rotary.cos, rotary.sin], step.outputs, [])

    def _chain(self, name: str | None, part: str, step: Step) -> tuple[str, list[Step], Rotary] | None:
        """[T, heads * D] -> [T, heads, 1, D] -> turned -> [T, heads * D]: the first, the steps, and by what."""
        last = self._only(name, "Reshape")
        turned = self._only(last.inputs[0], "RotaryEmbedding") if last is not None else None
        first = self._only(turned.inputs[0], "Reshape") if turned is not None else None
        if last is None or turned is None or first is None or len([n for n in turned.inputs if n]) != 3:
            return None
        attributes = step.attributes["layer"].attributes
        heads, size = attributes["num_heads" if part == "query" else "num_kv_heads"], attributes["head_size"]
        shape = self._constants.get(first.inputs[1] or "")
        if shape is None or shape.tolist() != [-1, heads, 1, size] or first.inputs[0] is None:
            return None
        a = turned.attributes
        by = Rotary(
            turned.inputs[1] or "", turned.inputs[2] or "", a.get("rotary_embedding_dim", 0) or size,
            bool(a.get("interleaved", 0)),
        )  # fmt: skip
        return first.inputs[0], [first, turned, last], by


# What runs them ---------------------------------------------------------------------------------------------------


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


@handles(NORM)
def _norm(attributes: dict[str, Any], x: Tensor, scale: Tensor) -> Tensor:
    from plugins.gpu.torch_kernel import rms_norm

    return rms_norm(_flat(x), scale, attributes.get("epsilon", 1e-5)).view(x.shape)


@handles(ADD_NORM)
def _add_norm(attributes: dict[str, Any], a: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    from plugins.gpu.torch_kernel import rms_norm

    if a.shape != b.shape:
        both = a + b
        return _norm(attributes, both, scale), both
    summed = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    y = rms_norm(_flat(a), scale, attributes.get("epsilon", 1e-5), _flat(b), summed=summed.view(-1, a.shape[-1]))
    return y.view(a.shape), summed


@handles(GATE)
def _gate(attributes: dict[str, Any], x: Tensor) -> Tensor:
    from plugins.gpu.torch_kernel import gated_mlp

    return gated_mlp(_flat(x), attributes["activation"]).view(*x.shape[:-1], -1)


assert {NORM, ADD_NORM, GATE} <= set(HANDLERS)
