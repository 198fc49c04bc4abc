"""What an artifact of segments holds, as its engine file says it (JSON)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from runtime.versioned_file import read_versioned

FORMAT = 1
SIZES = {"f16": 2, "bf16": 2, "f32": 4, "i32": 4, "i64": 8}  # bytes of an element
TOKENS, ROWS = "T", "R"  # symbolic dimensions: tokens of the step, rows that want logits


class Value(msgspec.Struct, frozen=True):
    """A tensor between two parts. `shape`: numbers, or T and R."""

    dtype: str
    shape: tuple[int | str, ...]

    def dims(self, tokens: int, rows: int) -> tuple[int, ...]:
        """The shape in numbers."""
        sizes = {TOKENS: tokens, ROWS: rows}
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)

    def nbytes(self, tokens: int, rows: int) -> int:
        """Bytes of the tensor."""
        count = SIZES[self.dtype]
        for dim in self.dims(tokens, rows):
            count *= dim
        return count


class Segment(msgspec.Struct, frozen=True):
    """One engine: its file, and its tensors by the names of values and step inputs."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    layers: int = 0
    bytes: int = 0
    seconds: float = 0.0


class Image(msgspec.Struct, frozen=True):
    """A kernel compiled for one architecture: a file of PTX, the kernel's name in it, and shared memory in bytes."""

    file: str
    entry: str
    shared: int


class Kernel(msgspec.Struct, frozen=True):
    """One compiled variant of a Triton kernel.

    Attributes:
        parameters: (name, Triton's type) in order: pointers (`*fp16`) and `i32`.
        constants: compile-time constants that a launch depends on.
        images: by architecture, such as SM89.
    """

    parameters: tuple[tuple[str, str], ...]
    num_warps: int
    constants: dict[str, int] = {}
    images: dict[str, Image] = {}


class Attention(msgspec.Struct, frozen=True):
    """The attention node after a segment: the values it takes and makes, and the kernels that compute it."""

    layer: int
    num_heads: int
    num_kv_heads: int
    query: str
    key: str
    value: str
    output: str
    write: str
    whole: str  # few tokens a sequence, keys in one piece
    splits: str  # the same, keys in several pieces
    merge: str
    prefill: str  # many tokens a sequence
    sinks: str | None = None
    alibi_slopes: str | None = None


class SegmentPlan(msgspec.Struct, frozen=True):
    """segments.json. `attentions[i]` comes after `segments[i]`; the last segment makes `logits`."""

    format: int
    values: dict[str, Value]
    segments: tuple[Segment, ...]
    attentions: tuple[Attention, ...]
    kernels: dict[str, Kernel]
    copies: dict[str, str]  # bytes of a word -> the kernel that copies blocks in such words
    # Kernels that sample, tell log probabilities, and verify drafts that were drawn at random; None in an artifact of
    # before there were such.
    sample: str | None = None
    score: str | None = None
    verify: str | None = None
    # Of an engine that attends itself: the caches it takes by name, layer by layer, with a block's shape; and how many
    # blocks they may have. A plan has these or `attentions`.
    caches: dict[str, tuple[int, ...]] = {}
    max_blocks: int = 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers with caches, in order."""
        found = [layer.layer for layer in self.attentions]
        found += [int(name.partition(".")[2]) for name in self.caches if name.startswith("key_cache.")]
        return tuple(found)

    @property
    def split_elements(self) -> tuple[int, int]:
        """f32 elements a token that partial results of the widest layer take: sums, and their statistics."""
        sums = stats = 0
        for layer in self.attentions:
            splits = self.kernels[layer.splits].constants["SPLITS"]
            width = self.kernels[layer.merge].constants["V_HEAD_SIZE"]
            sums = max(sums, splits * layer.num_heads * width)
            stats = max(stats, splits * layer.num_heads * 2)
        return sums, stats


def read_plan(path: Path, hint: str) -> SegmentPlan:
    """The plan in the file `path`. Raises `ArtifactError` where it is damaged or of another format."""
    return read_versioned(path, SegmentPlan, FORMAT, hint)
