"""The Triton kernels that run between engines and beside them: which ones a graph needs, and their compilation ahead
of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plugins.paged_attention.grids import BLOCK_N, COPY_WORDS, merge_constants, power_of_two
from plugins.paged_attention.op import INPUTS
from runtime.errors import BuildError
from runtime.executors.sampling_blocks import kernel_variants
from runtime.executors.segments.calls import copy_word
from runtime.executors.segments.plan import Attention, Image, Kernel

if TYPE_CHECKING:
    import onnx_ir as ir

    from plugins.gpu.aot import Variant

SPLITS = 8  # of the keys, where a decode would leave multiprocessors idle
_TABLES = ("past_lens", "query_starts", "block_ids", "block_starts")
_CELLS = {"f32": "*fp32", "f16": "*fp16", "bf16": "*bf16", "int8": "*i8"}
_SHARED = ("SPLITS", "BLOCK_M", "BLOCK_N", "V_HEAD_SIZE", "MOST")  # constants that launches depend on


@dataclass(frozen=True)
class Kernels:
    """What a graph's attention nodes run on: `variants(architecture)` compile to `kernels`, by the same names."""

    layers: tuple[Attention, ...]
    copies: dict[str, str]
    make: Mapping[str, Any]  # name -> function of an architecture's number that returns the variant

    def variants(self, cc: int) -> dict[str, Variant]:
        """The kernels for compute capability `cc` (89 for SM89), by name."""
        return {name: make(cc) for name, make in self.make.items()}

    def described(self, cc: int) -> dict[str, Kernel]:
        """The same as the artifact says it, without images."""
        return {name: describe(variant) for name, variant in self.variants(cc).items()}


def describe(variant: Variant) -> Kernel:
    """What a launcher must know of a kernel."""
    parameters = tuple(
        (name, variant.types.get(name, "i32")) for name in variant.kernel.arg_names if name not in variant.constants
    )
    constants = {name: value for name, value in variant.constants.items() if name in _SHARED}
    return Kernel(parameters, variant.num_warps, constants)


def side_kernels(attentions: Sequence[ir.Node]) -> Kernels:
    """The kernels beside an engine that attends itself at these nodes: those that sample, and that copy blocks."""
    make: dict[str, Any] = {name: lambda cc, v=variant: v for name, variant in kernel_variants().items()}
    copies: dict[str, str] = {}
    for node in attentions:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        for size in _Layer(attributes).block_bytes:
            word = copy_word(size)
            name = copies.setdefault(str(word), f"copy-{len(copies)}")
            make.setdefault(name, lambda cc, word=word: _copy(word))
    return Kernels((), copies, make)


def plan_kernels(attentions: Sequence[ir.Node], *, activation: str = "*fp16") -> Kernels:
    """The kernels of attention nodes whose queries, keys and values are of the pointer type `activation`, and
    `side_kernels`.

    Raises:
        BuildError: an attribute that the kernels do not compute here.
    """
    side = side_kernels(attentions)
    make = dict(side.make)
    names: dict[tuple, str] = {}
    layers = []

    def kernel(kind: str, key: tuple, function: Any) -> str:
        known = names.setdefault((kind, *key), f"{kind}-{sum(k[0] == kind for k in names)}")
        make.setdefault(known, function)
        return known

    for node in attentions:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        if attributes.get("rotate", "none") != "none":
            raise BuildError(
                f"layer {attributes['layer']}: kv.rotate {attributes['rotate']} is not computed between segments; set "
                "kv.rotate to none"
            )
        given = {name: value.name or "" for name, value in zip(INPUTS, node.inputs, strict=False) if value is not None}
        optional = {name: given.get(name) for name in INPUTS[10:]}
        key = tuple(sorted((k, v) for k, v in attributes.items() if k != "layer"))
        plan = _Layer(attributes, activation, **{f"has_{name}": value is not None for name, value in optional.items()})
        key = (*key, plan.has_sinks, plan.has_alibi_slopes)
        layers.append(
            Attention(
                layer=attributes["layer"], num_heads=attributes["num_heads"], num_kv_heads=attributes["num_kv_heads"],
                query=given["query"], key=given["key"], value=given["value"], output=node.outputs[0].name or "",
                **optional,
                write=kernel("write", key, plan.write),
                whole=kernel("attend", (*key, "whole"), lambda cc, p=plan: p.attend(cc, 1, 16)),
                splits=kernel("attend", (*key, "splits"), lambda cc, p=plan: p.attend(cc, SPLITS, 16)),
                merge=kernel("merge", key, plan.merge),
                prefill=kernel("attend", (*key, "prefill"), lambda cc, p=plan: p.attend(cc, 1, 64)),
            )
        )  # fmt: skip
    return Kernels(tuple(layers), side.copies, make)


@dataclass(frozen=True)
class _Layer:
    attributes: dict[str, Any]
    activation: str = "*fp16"
    has_sinks: bool = False
    has_alibi_slopes: bool = False

    @property
    def block_bytes(self) -> tuple[int, int]:
        from plugins.torch_engine.attention import Layer

        return Layer.of(self.attributes).block_bytes()

    def shape(self, cc: int) -> Any:
        from plugins.paged_attention.native import formats
        from plugins.paged_attention.torch_kernel import AttentionShape

        names = ("num_heads", "num_kv_heads", "head_size", "v_head_size", "scale", "block_size", "sliding_window")
        key, value = formats(self.attributes)
        return AttentionShape(
            **{name: self.attributes[name] for name in names}, softcap=self.attributes.get("softcap", 0.0),
            key_format=key, value_format=value, native_fp8=cc >= 89,
        )  # fmt: skip

    def types(self) -> dict[str, str]:
        shape = self.shape(0)
        types = dict.fromkeys(_TABLES, "*i32")
        for part, form in (("key", shape.key_format), ("value", shape.value_format)):
            cells = _CELLS.get(form.dtype, "*u8")
            types |= {f"{part}_cache": cells, f"{part}_scales": "*bf16" if form.packed else cells}
        return types

    def write(self, cc: int) -> Variant:
        from plugins.gpu.aot import Variant
        from plugins.paged_attention.kernel_write import rope_and_write

        rows = dict.fromkeys(("query", "query_out", "key", "value", "cos", "sin", "positions"), self.activation)
        constants = self.shape(cc).write_constants(rotary=0, interleaved=False)
        return Variant("write", rope_and_write, rows | self.types(), constants, num_warps=1, fp_fusion=False)

    def attend(self, cc: int, splits: int, block_m: int) -> Variant:
        from plugins.gpu.aot import Variant
        from plugins.paged_attention.kernel import attend

        rows = dict.fromkeys(("query", "output", "sinks", "alibi_slopes"), self.activation)
        parts = dict.fromkeys(("partial", "partial_stats"), "*fp32" if splits > 1 else self.activation)
        shape = self.shape(cc)
        constants = shape.attend_constants(
            sinks=self.has_sinks, alibi=self.has_alibi_slopes, splits=splits,
            block_m=power_of_two(shape.num_heads // shape.num_kv_heads, block_m), block_n=BLOCK_N,
        )  # fmt: skip
        return Variant("attend", attend, rows | parts | self.types(), constants)

    def merge(self, cc: int) -> Variant:
        from plugins.gpu.aot import Variant
        from plugins.paged_attention.kernel import reduce_splits

        types = {"partial": "*fp32", "partial_stats": "*fp32", "output": self.activation}
        return Variant("merge", reduce_splits, types, merge_constants(self.attributes["v_head_size"], SPLITS))


def _copy(word: int) -> Variant:
    import triton.language as tl

    from plugins.gpu.aot import Variant
    from plugins.paged_attention.kernel_write import copy_blocks

    kind = {8: tl.int64, 4: tl.int32, 1: tl.int8}[word]
    return Variant("copy", copy_blocks, {"bases": "*i64", "pairs": "*i32"}, {"WORD": kind, "BLOCK": COPY_WORDS})


def compile_kernels(kernels: Kernels, folder: Path, capabilities: Sequence[str]) -> dict[str, Kernel]:
    """Compile every kernel for every architecture into `folder` (PTX), and describe them.

    Raises:
        BuildError: Triton is missing, or a kernel does not compile.
    """
    from plugins.gpu.aot import compile_variant, without_scratch

    done: dict[str, Kernel] = {}
    for capability in capabilities:
        cc = int(capability.removeprefix("SM"))
        for name, variant in kernels.variants(cc).items():
            known = done.setdefault(name, describe(variant))
            try:
                compiled = compile_variant(variant, cc, assemble=False)
                ptx = without_scratch(compiled.ptx, len(known.parameters))
            except Exception as error:  # Triton raises many kinds
                reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                raise BuildError(f"the kernel {name} does not compile for {capability}: {reason[0]}") from error
            file = f"kernel-{name}.{capability.lower()}.ptx"
            (folder / file).write_text(ptx)
            images = known.images | {capability: Image(file, compiled.entry, compiled.shared)}
            done[name] = msgspec.structs.replace(known, images=images)
    return done
