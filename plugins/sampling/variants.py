"""The sampling kernels as they are compiled ahead of time."""

from __future__ import annotations

from plugins.gpu.aot import Variant

_BLOCK = 1024  # logits a tile


def sample_variant(most: int, stream: int = 0) -> Variant:
    """`kernel.sample` over f32 logits, which leaves rows with more than `most` candidates to others; `stream` of random
    numbers as `runtime/philox.py` counts them."""
    from plugins.sampling.kernel import sample

    types = {"logits": "*fp32", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32"}
    types |= {"seeds": "*i64", "sequences": "*i32", "positions": "*i32", "tokens": "*i32"}
    return Variant("sample", sample, types, {"STREAM": stream, "MOST": most, "BLOCK": _BLOCK}, num_warps=8)


def score_variant() -> Variant:
    """`kernel_score.score` over f32 logits."""
    from plugins.sampling.kernel_score import score

    types = {"logits": "*fp32", "tokens": "*i32", "num_tops": "*i32", "stats": "*fp32", "ranks": "*i32"}
    types |= {"top_ids": "*i32", "top_values": "*fp32"}
    return Variant("score", score, types, {"BLOCK": _BLOCK}, num_warps=8)


def verify_variant(accept_stream: int = 1, residual_stream: int = 2) -> Variant:
    """`kernel_verify.verify` over f32 logits; streams of random numbers as `runtime/philox.py` counts them."""
    from plugins.sampling.kernel_verify import verify

    types = {"logits": "*fp32", "drafted_rows": "*i32", "drafted_tokens": "*i32", "drafted_temperatures": "*fp32"}
    types |= {"draft_starts": "*i32", "draft_ids": "*i32", "draft_probs": "*fp32", "top_ks": "*i32", "top_ps": "*fp32"}
    types |= {"min_ps": "*fp32", "seeds": "*i64", "sequences": "*i32", "positions": "*i32", "tokens": "*i32"}
    constants = {"ACCEPT_STREAM": accept_stream, "RESIDUAL_STREAM": residual_stream, "BLOCK": _BLOCK}
    return Variant("verify", verify, types, constants, num_warps=8)
