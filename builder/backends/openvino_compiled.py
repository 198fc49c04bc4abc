"""The compiled form of an engine, beside its IR: a plan that our C++ library runs alone, or else OpenVINO's blob."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO, TYPE_CHECKING

import openvino as ov

from builder.backends.openvino_probe import agree, probe, probe_plan
from plugins.block.native import NativeGraph
from plugins.block.plan import PlanError, read_plan
from plugins.block.plan_openvino import ModelPlan, UnknownOperationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from runtime.executors.openvino_model import OpenVINOEngine
    from zoo.progress import Progress

PLAN = "engine.plan"
BLOB = "engine.blob"


def write_compiled_form(engine: OpenVINOEngine, ir: Path, native: Path, progress: Progress | None) -> str | None:
    """Write the compiled form of `ir` beside it.

    Args:
        engine: which has `native`, the library of our C++ operators.
        progress: is told where there is none, and why.

    Returns:
        `PLAN`, or `BLOB` where the engine has operations that only OpenVINO runs; None where what was written does not
        compute what the IR does, and is gone again.

    Raises:
        RuntimeError: OpenVINO does not compile the IR.
    """
    model = engine.read_ir(ir)
    name = PLAN if _write_plan(model, ir.with_name(PLAN)) else BLOB
    form = ir.with_name(name)
    compiled = engine.compile(model)
    del model
    if name == BLOB:
        with form.open("wb") as file:
            compiled.export_model(_ToFile(file))
    expected = probe(compiled)
    del compiled  # so that its weights are not held twice
    if _loads_right(engine, native, form, expected):
        return name
    form.unlink()
    if progress:
        progress.note(
            "no compiled form: the one that was written does not compute what the portable form does; each load "
            "compiles the portable form"
        )
    return None


def _write_plan(model: ov.Model, path: Path) -> bool:
    """Write the plan of a lowered model; False where it has none."""
    try:
        made = ModelPlan(model)
    except UnknownOperationError:
        return False
    made.maker.write(made.plan, path)
    return True


def _loads_right(engine: OpenVINOEngine, native: Path, form: Path, expected: NDArray[np.float32]) -> bool:
    try:
        if form.name == PLAN:
            return agree(probe_plan(NativeGraph(native, read_plan(form))), expected)
        return agree(probe(engine.import_blob(form)), expected)
    except (RuntimeError, PlanError):
        return False


class _ToFile(io.BytesIO):
    """What `export_model` takes for a stream, with the file behind it: the blob is never whole in memory."""

    def __init__(self, file: IO[bytes]):
        super().__init__()
        self._file = file

    def write(self, data, /) -> int:
        return self._file.write(data)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()
