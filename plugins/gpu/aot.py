"""Compiles a Triton kernel ahead of time for a GPU architecture, on a machine that needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Variant:
    """A kernel with everything that compiling it takes.

    Attributes:
        name: what tables call it.
        kernel: a `triton.jit` function.
        types: parameter -> type as Triton spells it (`*bf16`, `i32`); those left out are i32 unless in `constants`.
        constants: parameter -> compile-time constant.
        fp_fusion: whether a product and a sum may be fused, which rounds once in place of twice.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    fp_fusion: bool = True


@dataclass(frozen=True)
class Compiled:
    """The result. `registers` (a thread) and `spills` (bytes a thread, stored and loaded) are None without ptxas."""

    name: str
    cc: int
    entry: str  # name of the kernel in `ptx`
    ptx: str = field(repr=False)
    shared: int  # bytes of shared memory a block
    num_warps: int
    registers: int | None = None
    spills: int | None = None
    cubin_bytes: int | None = None


def compile_variant(variant: Variant, cc: int, *, assemble: bool = True) -> Compiled:
    """Compile `variant` for compute capability `cc` (90 for SM90); assemble it too, which tells registers and spills.

    Raises:
        RuntimeError: Triton interprets its kernels in this process (TRITON_INTERPRET), so it compiles none.
        triton.CompilationError and others of Triton's: the kernel does not compile for this architecture.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    if not isinstance(variant.kernel, JITFunction):
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET to compile them")
    names = variant.kernel.arg_names
    unknown = sorted({*variant.types, *variant.constants} - set(names))
    if unknown:
        raise RuntimeError(f"{variant.name}: the kernel has no parameter {', '.join(unknown)}")
    signature = {n: "constexpr" if n in variant.constants else variant.types.get(n, "i32") for n in names}
    # Pointers come from allocators that align to far more than 16 bytes; lengths may be anything.
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n].startswith("*")}
    source = ASTSource(variant.kernel, signature, {(names.index(n),): v for n, v in variant.constants.items()}, aligned)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        "enable_fp_fusion": variant.fp_fusion,
    }
    triton.knobs.compilation.disable_line_info = True  # half of the PTX
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    ptx = compiled.asm["ptx"]
    figures = _assemble(ptx) if assemble else (None, None, None)
    return Compiled(
        variant.name, cc, compiled.metadata.name, ptx, compiled.metadata.shared, variant.num_warps, *figures
    )


def _assemble(ptx: str) -> tuple[int | None, int | None, int | None]:
    """Registers, spilled bytes and cubin size, by the ptxas that Triton brings (None each where it has none)."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    assert target is not None
    arch = target[1]
    try:
        ptxas = get_ptxas(int(re.sub(r"\D", "", arch))).path
    except (RuntimeError, TypeError):
        return None, None, None
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        told = subprocess.run(
            [ptxas, "-v", "--gpu-name", arch, str(source), "-o", str(cubin)], capture_output=True, text=True, check=True
        ).stderr
        size = cubin.stat().st_size
    registers = re.search(r"Used (\d+) registers", told)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", told)
    return (
        int(registers[1]) if registers else None,
        int(spills[1]) + int(spills[2]) if spills else None,
        size,
    )


def without_scratch(ptx: str, count: int) -> str:
    """`ptx` with the first `count` parameters of its kernel alone.

    Triton gives each kernel two pointers to scratch memory more, which its own launcher fills. Who launches without it
    has none to give, and the driver would read past the arguments.

    Raises:
        RuntimeError: the kernel has fewer parameters, or uses one of those to be left out.
    """
    names = [str(i) for i in range(count)]
    return with_parameters(ptx, names, names, {})


def with_parameters(ptx: str, names: Sequence[str], order: Sequence[str | None], aliases: Mapping[str, str]) -> str:
    """`ptx`, whose kernel takes the parameters `names`, taking those of `order` in its place.

    None stands for an address that is passed and not used. A parameter of `aliases` reads what another takes.

    Raises:
        RuntimeError: the kernel has other parameters, or reads one that nobody gives.
    """
    header = re.search(r"\.entry\s+\S+\(\s*(.*?)\n\)", ptx, re.DOTALL)
    assert header is not None
    lines = [line.strip().rstrip(",") for line in header[1].strip().splitlines()]
    if len(lines) < len(names):
        raise RuntimeError(f"the kernel has {len(lines)} parameters, and {len(names)} are passed")
    body = ptx[header.end() :]
    spelled = {name: line.split()[-1] for name, line in zip(names, lines, strict=False)}
    for name, other in aliases.items():
        body = re.sub(rf"\b{re.escape(spelled[name])}\b", spelled[other], body)
    kept = [*order]
    gone = [line for name, line in zip(names, lines, strict=False) if name not in kept] + lines[len(names) :]
    for line in gone:
        if re.search(rf"\b{re.escape(line.split()[-1])}\b", body):
            what = "scratch memory" if line in lines[len(names) :] else "a parameter that is not passed"
            raise RuntimeError(f"the kernel uses {what} ({line.split()[-1]}), which only Triton's launcher gives")
    declared = dict(zip(names, lines, strict=False))
    parameters = [f".param .u64 unused_{i}" if name is None else declared[name] for i, name in enumerate(kept)]
    return (
        ptx[: header.start(1)] + ",\n\t".join(parameters) + ptx[header.end(1) :][: header.end() - header.end(1)] + body
    )
