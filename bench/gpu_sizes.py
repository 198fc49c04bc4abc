"""How large the things are that `bench.gpu` measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama; the defaults are Llama-3-8B's."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    vocab: int = 128256
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    block_size: int = 32
    kv: str = "bf16"
    theta: float = 5e5
    epsilon: float = 1e-5

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices that each token is multiplied with."""
        projections = (self.heads + 2 * self.kv_heads) * self.head * self.hidden + self.heads * self.head * self.hidden
        return self.layers * (projections + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden


@dataclass(frozen=True)
class Sizes:
    """`measures_speed`: large enough that times compare with the goals."""

    measures_speed: bool
    copied: int  # bytes, for the copy bandwidth
    heads: tuple[int, int]  # of queries, and of keys and values; each of 128
    checked: tuple[int, int]  # sequences, tokens each: of attention whose error is told
    decode: tuple[int, int]  # of attention that is timed
    prefill: tuple[int, int]
    product: tuple[int, int, int]  # N, K, group
    model: LlamaShape
    step: tuple[int, int]


FULL = Sizes(
    True, 1 << 31, (64, 8), (4, 1000), (64, 8192), (4, 8192), (28672, 4096, 128), LlamaShape(), (64, 1024)
)  # fmt: skip
QUICK = Sizes(
    False, 1 << 28, (64, 8), (4, 1000), (4, 512), (2, 256), (1024, 1024, 128), LlamaShape(layers=2), (4, 256)
)  # fmt: skip
