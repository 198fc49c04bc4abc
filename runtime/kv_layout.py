"""The layout of the paged KV cache, as the artifact states it and the block pool is sized from it."""

from __future__ import annotations

import msgspec

# Bits a stored element takes, without the scales that lie beside it.
KV_DTYPE_BITS = {"f32": 32, "f16": 16, "bf16": 16, "int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8}


class KvLayer(msgspec.Struct, frozen=True):
    """One attention layer's cells: heads, head sizes (elements), dtypes, and scale bytes per token and head."""

    num_kv_heads: int
    key_head_size: int
    value_head_size: int
    key_dtype: str
    value_dtype: str
    key_scale_bytes: int = 0
    value_scale_bytes: int = 0
    sliding_window: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer, scales included."""
        key_bits = self.key_head_size * KV_DTYPE_BITS[self.key_dtype]
        value_bits = self.value_head_size * KV_DTYPE_BITS[self.value_dtype]
        payload = (key_bits + value_bits + 7) // 8
        return self.num_kv_heads * (payload + self.key_scale_bytes + self.value_scale_bytes)


class KvLayout(msgspec.Struct, frozen=True):
    """All layers' cells and the block size (tokens a block). A block spans every layer: one id, one table."""

    block_size: int
    layers: tuple[KvLayer, ...]

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size
