"""The kernels as models use them: what is compiled ahead of time, for the tables and for continuous integration."""

from __future__ import annotations

from collections.abc import Iterator

from plugins.gpu.aot import Variant


def variants(cc: int) -> Iterator[Variant]:
    """Each kernel in Llama-3-8B's shapes (GQA 4:1, head size 128), in bf16, as `cc` gets it; and each KV format."""
    yield from _attention(cc)
    yield from _small()
    yield from _products(cc)
    yield from _sampling()


def _attention(cc: int) -> Iterator[Variant]:
    from plugins.paged_attention.grids import COPY_WORDS
    from plugins.paged_attention.kernel import attend, reduce_splits
    from plugins.paged_attention.kernel_write import copy_blocks, rope_and_write, swap_blocks
    from plugins.paged_attention.kv_formats import KvFormat
    from plugins.paged_attention.torch_kernel import AttentionShape

    cells = {"bf16": "*bf16", "f16": "*fp16", "int8": "*i8"}
    tables = dict.fromkeys(("past_lens", "query_starts", "block_ids", "block_starts"), "*i32")
    for name, form in {
        "bf16": KvFormat("bf16"),
        "int8": KvFormat("int8"),
        "fp8_e4m3": KvFormat("fp8_e4m3"),
        "int4": KvFormat("int4"),
    }.items():
        shape = AttentionShape(32, 8, 128, 128, 128**-0.5, 32, form, form, native_fp8=cc >= 89)
        pages = dict.fromkeys(("key_cache", "value_cache"), cells.get(form.dtype, "*u8"))
        pages |= dict.fromkeys(("key_scales", "value_scales"), "*bf16")
        activations = dict.fromkeys(("query", "key", "value", "query_out"), "*bf16")
        common = {"query": "*bf16", "sinks": "*bf16", "alibi_slopes": "*bf16", "output": "*bf16"}
        common |= {"partial": "*fp32", "partial_stats": "*fp32"} | pages | tables
        for kind, splits, block_m in (("decode", 8, 16), ("prefill", 1, 64)):
            constants = shape.attend_constants(sinks=False, alibi=False, splits=splits, block_m=block_m, block_n=64)
            yield Variant(f"attend {kind} {name}", attend, common, constants)
        rope = {"cos": "*fp32", "sin": "*fp32", "positions": "*i64"}
        yield Variant(
            f"rope_and_write {name}",
            rope_and_write,
            activations | rope | pages | tables,
            shape.write_constants(rotary=128, interleaved=False),
            num_warps=1,
            fp_fusion=False,
        )
    types = {"partial": "*fp32", "partial_stats": "*fp32", "output": "*bf16"}
    constants = {"V_HEAD_SIZE": 128, "SPLITS": 8, "BLOCK_S": 8, "BLOCK_DV": 128}
    yield Variant("reduce_splits", reduce_splits, types, constants)
    import triton.language as tl

    words = {"WORD": tl.int64, "BLOCK": COPY_WORDS}
    yield Variant("copy_blocks", copy_blocks, {"bases": "*i64", "pairs": "*i32"}, words)
    types = {"bases": "*i64", "ids": "*i32", "staging": "*i64"}
    for name, out in (("out", True), ("in", False)):
        yield Variant(f"swap_blocks {name}", swap_blocks, types, words | {"TO_STAGING": out})


def _small() -> Iterator[Variant]:
    from plugins.gated_mlp.kernel import gated
    from plugins.norm.kernel import rms_norm
    from plugins.rope.kernel import rope

    rows: dict[str, str] = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "y": "*bf16", "summed": "*bf16"}
    norm = {"EPSILON": 1e-5, "WIDTH": 4096, "RESIDUAL": True, "BLOCK": 4096}
    yield Variant("rms_norm + residual", rms_norm, rows, norm)
    types = {"x": "*bf16", "y": "*bf16", "cos": "*fp32", "sin": "*fp32", "positions": "*i64"}
    for kind, interleaved in (("halves", False), ("pairs", True)):
        constants = {"SIZE": 128, "ROTARY": 128, "INTERLEAVED": interleaved, "BLOCK": 128}
        yield Variant(f"rope {kind}", rope, types, constants, num_warps=1)
    yield Variant("gated silu", gated, {"gate_up": "*bf16", "y": "*bf16"}, {"ACTIVATION": "silu", "BLOCK": 1024})


def _products(cc: int) -> Iterator[Variant]:
    from plugins.weight_only.kernel import matmul, sum_splits

    fp8 = "fp8_e4m3_native" if cc >= 89 else "fp8_e4m3"
    types = {"x": "*bf16", "scales": "*fp16", "zeros": "*i8", "bias": "*bf16", "y": "*bf16"}
    for name, kind, stored, group in (
        ("int4", "int4", "*u8", 128), ("uint4 zeros", "uint4", "*u8", 32), ("int8", "int8", "*i8", 0),
        ("fp8", fp8, "*u8", 0),
    ):  # fmt: skip
        constants = {"FORMAT": kind, "GROUP": group, "ZEROS": kind == "uint4", "BIAS": False, "SPLITS": 1}
        constants |= {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": group or 128}
        yield Variant(f"{name} product", matmul, types | {"weight": stored}, constants, num_stages=3)
    constants = {"BIAS": False, "SPLITS": 4, "BLOCK": 256}
    yield Variant("sum_splits", sum_splits, {"partial": "*fp32", "bias": "*bf16", "y": "*bf16"}, constants)


def _sampling() -> Iterator[Variant]:
    from plugins.sampling.variants import sample_variant, score_variant, verify_variant

    yield sample_variant(most=128)
    yield score_variant()
    yield verify_variant()
