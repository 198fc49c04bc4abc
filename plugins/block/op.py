"""`plancast::Block`: the work on rows as one operation of a graph: a stack of decoder layers, or what can be one of it.

OpenVINO spends 10 us and more a node of ours on shapes and dispatch; all layers in one node pay that once, join their
threads no more often than they must, and keep what passes between their steps in the cache.

A block takes rows `[rows, width]` f32 (trailing axes are one width), then, where it attends, `TABLES` i32 and caches u8
(`plugins.paged_attention.native`; one input may hold all of them), then constants (one input holds them all, where they
can be one). It is a program over *values*: the inputs, and what steps make. A step reads columns of values and makes a
value:

- `linear`: a product with a packed weight (`plugins.linear.op`), of the rows as they are, of their norm, or of their
  gate; then a bias and a residual are added, where there are any.
- `norm`: `x / sqrt(mean(x^2) + epsilon) * gain`; `head_norm`: the same for each head of a row by itself.
- `gate`: `silu(gate) * up`; `gelu_gate`: `gelu(gate) * up`, GELU with tanh.
- `add`: `a + b`.
- `rope`: `x * cos + rotate_half(x) * sin`, head by head; cos and sin `[rows, head size]`.
- `attend`: paged attention (`plugins.paged_attention.op`), which writes the caches. Rows go through the steps between
  two of these a part at a time; what crosses one is kept for all rows.
- `copy`: columns, as they are.

Sums run in one order whatever the instruction set, the threads and the batch.
"""

from __future__ import annotations

from typing import NamedTuple

DOMAIN = "plancast"
OP_TYPE = "Block"
VERSION = 1
TABLES = ("past_lens", "query_starts", "block_ids", "block_starts")


class Columns(NamedTuple):
    """Columns `[first, first + width)` of a value."""

    value: int
    first: int
    width: int


class Program:
    """A block's steps, as text: what the operation carries as its attribute.

    Inputs are the values 0, 1, ... in their order, made by `input`; caches are counted among themselves; constants are
    ports, counted from the first input of all.
    """

    def __init__(self, inputs: list[int]):
        """`inputs`: the width of each."""
        self._lines = [f"input {width}" for width in inputs]
        self._values = len(inputs)

    def value(self, width: int, output: int | None = None) -> int:
        """A new value; `output`: which of the operation's outputs it is, if any."""
        self._lines.append(f"value {width} {-1 if output is None else output}")
        self._values += 1
        return self._values - 1

    def step(self, name: str, target: int, *operands: Columns | int | float | str) -> None:
        """A step that makes `target`; what each takes stands in program.cpp."""
        words = [name, str(target)]
        for operand in operands:
            words += [str(part) for part in operand] if isinstance(operand, tuple) else [repr(operand).strip("'")]
        self._lines.append(" ".join(words))

    def constants(self, begins: list[int]) -> None:
        """The constants lie in one input, u8, after the rows: where each begins, in bytes."""
        self._lines.append(" ".join(["constants", str(len(begins)), *map(str, begins)]))

    def pool(self, block_bytes: int, begins: list[int]) -> None:
        """All caches lie in one input, u8 [num_blocks, block_bytes]: where each begins in a block, in bytes."""
        self._lines.append(" ".join(["pool", str(len(begins)), str(block_bytes), *map(str, begins)]))

    @property
    def text(self) -> str:
        return ";".join(self._lines)
