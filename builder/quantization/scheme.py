"""Which scheme each weight gets: the recipe's `weights`, its overrides by pattern, and what is safe for tables."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from runtime.errors import BuildError
from zoo.quantized import WeightFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from builder.recipe import WeightsConfig

FLOATS = ("f32", "f16", "bf16")
# Columns that share a scale where the recipe does not say; None: all of them.
_GROUPS: dict[str, int | None] = {"int8": None, "int4": 32, "fp8": None}


@dataclass(frozen=True, slots=True)
class Scheme:
    """One weight's storage. `group`: columns that share a scale, None for a scale a channel."""

    dtype: str
    group: int | None = None
    symmetric: bool = True

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    @property
    def kind(self) -> str:
        """How the values are stored (`zoo.quantized.KINDS`)."""
        return self.dtype if self.symmetric else f"u{self.dtype}"

    def format(self, columns: int) -> WeightFormat:
        """The format of a weight of `columns` columns."""
        return WeightFormat(self.kind, self.group or columns, zero=not self.symmetric)

    def check(self, name: str, columns: int) -> None:
        """Raise `BuildError` unless the groups divide the columns."""
        if self.group and columns % self.group:
            fitting = [str(size) for size in (32, 64, 128) if columns % size == 0] + ["channel"]
            raise BuildError(
                f"{name} has {columns} columns, which groups of {self.group} do not divide; set weights.group_size, or "
                f"an override for it, to one of: {', '.join(fitting)}"
            )


def scheme_of(weights: WeightsConfig, names: Sequence[str], *, wide: bool = False) -> Scheme:
    """The scheme of the weight that `names` names (its own, and those of the weights merged into it).

    Args:
        wide: an embedding or a head, which 4 bits hurt far more than the rest: int8 a channel unless an override
            says otherwise.
    """
    if any(fnmatchcase(name, pattern) for name in names for pattern in weights.skip):
        return Scheme("f32")
    for override in weights.overrides:
        if any(fnmatchcase(name, override.match) for name in names):
            same = override.dtype is None or override.dtype == weights.dtype
            return _scheme(
                override.dtype or weights.dtype,
                override.group_size or (weights.group_size if same else None),
                override.symmetric if override.symmetric is not None else (weights.symmetric if same else None),
            )
    if wide and weights.dtype in ("int4", "fp8"):
        return Scheme("int8" if weights.dtype == "int4" else "fp8")
    return _scheme(weights.dtype, weights.group_size, weights.symmetric)


def _scheme(dtype: str, group: int | str | None, symmetric: bool | None) -> Scheme:
    if dtype in (*FLOATS, "checkpoint"):
        return Scheme("f32" if dtype == "checkpoint" else dtype)
    size = _GROUPS[dtype] if group is None else None if group == "channel" else int(group)
    return Scheme(dtype, size, symmetric if symmetric is not None else dtype != "int4")
