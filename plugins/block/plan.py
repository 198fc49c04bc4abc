"""A model's graph as the C++ library runs it alone, and the file that stores one: a *plan*.

    b"PLANCAST", u32 format, u32 bytes of the header, u64 bytes of the file (little endian)
    the header: a `Plan` as MessagePack
    the constants, from the next multiple of `ALIGNMENT` on, each on a cache line

Weights lie in it as every instruction set of ours reads them, so a plan holds for any CPU of the architecture, and for
any version of OpenVINO.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from plugins.block.op import VERSION
from plugins.paged_attention.memory import zeroed

FORMAT = 1
ALIGNMENT = 4096  # bytes: of the constants in the file
_LINE = 64  # bytes of a cache line
_MAGIC = b"PLANCAST"
_START = struct.Struct("<8sIIQ")
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "i8": np.dtype(np.int8), "u8": np.dtype(np.uint8)}


class PlanError(Exception):
    """A file is no plan, or none that this plancast runs; says why."""


class Constant(msgspec.Struct, frozen=True):
    """An array among the constants, which begins after `begin` bytes of them."""

    begin: int
    dtype: str  # of `DTYPES`
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Input(msgspec.Struct, frozen=True):
    """`width`: floats a row; bytes a block of the cache; 0 of ids and tables, which are no rows."""

    name: str
    width: int
    is_cache: bool = False


class Output(msgspec.Struct, frozen=True):
    """A value that is a result, `width` floats a row."""

    value: int
    width: int


class LookUp(msgspec.Struct, frozen=True, tag="look_up"):
    """Rows of `table` [N, width]; `ids`: an input. Numbers are multiplied by `scales` [N, groups], where given."""

    ids: int
    table: Constant
    scales: Constant | None = None


class Angles(msgspec.Struct, frozen=True, tag="angles"):
    """Cosines, or sines, of positions, an input, times each of `frequencies` [width]."""

    positions: int
    frequencies: Constant
    sine: bool


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Rows of a value; `ids`: an input."""

    value: int
    ids: int


class Norm(msgspec.Struct, frozen=True, tag="norm"):
    """x / sqrt(mean(x^2) + epsilon) * gain."""

    value: int
    gain: Constant
    epsilon: float


class Scale(msgspec.Struct, frozen=True, tag="scale"):
    """A value times `factor`."""

    value: int
    factor: float


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Values side by side."""

    values: tuple[int, ...]


class Block(msgspec.Struct, frozen=True, tag="block"):
    """The operation of `op.py`: its program, its inputs but for the constants, and those, u8."""

    program: str
    values: tuple[int, ...]
    constants: Constant | None
    outputs: int


Step = LookUp | Angles | Take | Norm | Scale | Join | Block


class Plan(msgspec.Struct, frozen=True):
    """Inputs, then what the steps make, are values, numbered in order; a block makes `outputs` of them."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Output, ...]
    constants: int  # bytes of all of them
    block_version: int = VERSION

    def places(self) -> dict[str, int]:
        """Which of the inputs each is, by name."""
        return {each.name: place for place, each in enumerate(self.inputs)}


class Planned(NamedTuple):
    """A plan and its constants u8 [plan.constants], in memory from which the library reads them."""

    plan: Plan
    constants: NDArray[np.uint8]


class PlanMaker:
    """Collects constants while a plan is made. They are not copied before `write` or `planned`."""

    def __init__(self) -> None:
        self._arrays: list[tuple[Constant, NDArray[Any]]] = []
        self._end = 0

    def constant(self, array: NDArray[Any], dtype: str) -> Constant:
        """`array`, contiguous and of `DTYPES[dtype]`, which must stay as it is."""
        array = np.ascontiguousarray(array, DTYPES[dtype])
        constant = Constant(-(-self._end // _LINE) * _LINE, dtype, array.shape)
        self._arrays.append((constant, array))
        self._end = constant.end
        return constant

    def plan(self, inputs: list[Input], steps: list[Step], outputs: list[Output]) -> Plan:
        return Plan(tuple(inputs), tuple(steps), tuple(outputs), self._end)

    def planned(self, plan: Plan) -> Planned:
        """The constants in memory of their own, on huge pages."""
        memory = zeroed(self._end)
        for constant, array in self._arrays:
            memory[constant.begin : constant.end] = array.reshape(-1).view(np.uint8)
        return Planned(plan, memory)

    def write(self, plan: Plan, path: Path) -> None:
        """Write the file `path`. Raises `OSError`, and then leaves no file."""
        header = msgspec.msgpack.encode(plan)
        begin = _begin(len(header))
        try:
            with path.open("wb") as file:
                file.write(_START.pack(_MAGIC, FORMAT, len(header), begin + self._end) + header)
                for constant, array in self._arrays:
                    file.seek(begin + constant.begin)
                    file.write(array.reshape(-1).view(np.uint8).data)
                file.truncate(begin + self._end)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def read_plan(path: Path) -> Planned:
    """The plan in the file `path`, its constants on huge pages, where a step waits less for page walks.

    Raises:
        PlanError: the file cannot be read, is not whole, or another version wrote it.
    """
    try:
        with path.open("rb") as file:
            magic, format_, header_bytes, file_bytes = _START.unpack(file.read(_START.size).ljust(_START.size, b"\0"))
            if magic != _MAGIC:
                raise PlanError(f"{path}: not a plan")
            if format_ != FORMAT:
                raise PlanError(f"{path}: a plan of format {format_}, and this plancast reads format {FORMAT}")
            if (there := path.stat().st_size) != file_bytes:
                raise PlanError(f"{path}: has {there} bytes, and {file_bytes} were written")
            plan = msgspec.msgpack.decode(file.read(header_bytes), type=Plan)
            if plan.block_version != VERSION:
                raise PlanError(
                    f"{path}: made for version {plan.block_version} of the C++ blocks, and this plancast has {VERSION}"
                )
            begin = _begin(header_bytes)
            if begin + plan.constants != file_bytes:
                raise PlanError(f"{path}: {file_bytes - begin} bytes of constants, and its steps take {plan.constants}")
            _check(plan, path)
            memory = zeroed(plan.constants)
            file.seek(begin)
            if file.readinto(memory.data) != memory.nbytes:
                raise PlanError(f"{path}: has become shorter while it was read")
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise PlanError(f"{path}: its header is damaged ({error})") from None
    return Planned(plan, memory)


def _begin(header_bytes: int) -> int:
    return -(-(_START.size + header_bytes) // ALIGNMENT) * ALIGNMENT


def _check(plan: Plan, path: Path) -> None:
    """Raise `PlanError` where a step reads what is not there: the library does not look."""
    values = len(plan.inputs)
    for step in plan.steps:
        read, constants = _uses(step)
        if not all(0 <= value < values for value in read):
            raise PlanError(f"{path}: a step reads a value that no step before it makes")
        for constant in constants:
            if constant.dtype not in DTYPES or not 0 <= constant.begin <= constant.end <= plan.constants:
                raise PlanError(f"{path}: a step reads constants that are not there")
        values += step.outputs if isinstance(step, Block) else 1
    if not all(0 <= output.value < values for output in plan.outputs):
        raise PlanError(f"{path}: a result is a value that no step makes")


def _uses(step: Step) -> tuple[tuple[int, ...], list[Constant]]:
    """The values and the constants that a step reads."""
    fields = [getattr(step, name) for name in step.__struct_fields__]
    constants = [field for field in fields if isinstance(field, Constant)]
    match step:
        case LookUp():
            return (step.ids,), constants
        case Angles():
            return (step.positions,), constants
        case Take():
            return (step.value, step.ids), constants
        case Norm() | Scale():
            return (step.value,), constants
        case Join() | Block():
            return step.values, constants
