"""`torch.ops.plancast.paged_attention`: what a model's attention calls while it is traced.

One call stands for one `plancast::PagedAttention` node. It takes what the model computes (query, key, value, sinks,
ALiBi slopes); the cache and the batch's tables are inputs of the engine, which the tracer wires up afterwards. Run
eagerly, it attends over one unpadded sequence with nothing cached, through the NumPy reference.
"""

from __future__ import annotations

import numpy as np
import torch

from plugins.paged_attention.op import DOMAIN, OP_TYPE, VERSION, register_onnx_schema
from plugins.paged_attention.reference import reference

_BLOCK_SIZE = 32


@torch.library.custom_op("plancast::paged_attention", mutates_args=())
def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    scale: float,
    sliding_window: int,
    softcap: float,
    layer: int,
) -> torch.Tensor:
    """Attend causally over one sequence: query `[T, num_heads * head_size]` -> `[T, num_heads * v_head_size]`.

    key is `[T, num_kv_heads * head_size]`, value `[T, num_kv_heads * v_head_size]`, sinks and alibi_slopes
    `[num_heads]`; the attributes are those of the ONNX operator.
    """
    tokens = query.shape[0]
    blocks = -(-tokens // _BLOCK_SIZE)

    def numpy(tensor: torch.Tensor | None) -> np.ndarray | None:
        return None if tensor is None else tensor.detach().float().numpy()

    attention = reference(
        *(tensor.detach().float().numpy() for tensor in (query, key, value)),
        key_cache=np.zeros((blocks, num_kv_heads, _BLOCK_SIZE, head_size), np.float32),
        value_cache=np.zeros((blocks, num_kv_heads, _BLOCK_SIZE, v_head_size), np.float32),
        past_lens=np.zeros(1, np.int32),
        query_starts=np.array([0, tokens], np.int32),
        block_ids=np.arange(blocks, dtype=np.int32),
        block_starts=np.array([0, blocks], np.int32),
        max_context_len=tokens,
        sinks=numpy(sinks),
        alibi_slopes=numpy(alibi_slopes),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        v_head_size=v_head_size,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        block_size=_BLOCK_SIZE,
    )
    return torch.from_numpy(attention).to(query.dtype)


@paged_attention.register_fake
def _(query, key, value, sinks, alibi_slopes, num_heads, num_kv_heads, head_size, v_head_size, *_attributes):
    return query.new_empty(query.shape[0], num_heads * v_head_size)


def translation_table() -> dict:
    """The `custom_translation_table` that makes `torch.onnx.export` emit `plancast::PagedAttention` nodes.

    The nodes come without caches and tables (inputs 3 to 9 absent).
    """
    from onnxscript import values

    register_onnx_schema()
    opset = values.Opset(DOMAIN, VERSION)

    def translate(query, key, value, sinks, alibi_slopes, *attributes):
        names = (
            "num_heads",
            "num_kv_heads",
            "head_size",
            "v_head_size",
            "scale",
            "sliding_window",
            "softcap",
            "layer",
        )
        node = getattr(opset, OP_TYPE)
        absent = (None,) * 7
        return node(query, key, value, *absent, sinks, alibi_slopes, **dict(zip(names, attributes, strict=True)))

    return {torch.ops.plancast.paged_attention.default: translate}
