"""`python -m plugins.gpu`: compile every Triton kernel for every architecture, without a GPU; print what came of it."""

from __future__ import annotations

import argparse
import os
import sys
import time


def main(arguments: list[str] | None = None) -> int:
    """Print a table of registers, spills, shared memory and sizes. Returns 1 where something did not compile."""
    os.environ.pop("TRITON_INTERPRET", None)
    from plugins.gpu.aot import compile_variant
    from plugins.gpu.architectures import ARCHITECTURES

    parser = argparse.ArgumentParser(prog="python -m plugins.gpu", description=__doc__)
    parser.add_argument("--cc", default=",".join(map(str, ARCHITECTURES)), help="compute capabilities, e.g. 80,90")
    parser.add_argument("--only", default="", help="kernels whose name holds one of these texts, comma between")
    parser.add_argument("--ptx-only", action="store_true", help="do not assemble: no registers and spills")
    options = parser.parse_args(arguments)
    try:
        from plugins.gpu.catalog import variants

        architectures = [int(cc) for cc in options.cc.split(",")]
    except ImportError as error:
        print(
            f"compiling kernels needs triton and torch ({error}): pip install 'plancast[build,triton]'", file=sys.stderr
        )
        return 1
    except ValueError:
        print(f"--cc takes numbers such as {','.join(map(str, ARCHITECTURES))}, not {options.cc}", file=sys.stderr)
        return 1
    row = "{:<28} {:>5} {:>10} {:>8} {:>10} {:>9} {:>9} {:>7}"
    print(row.format("kernel", "SM", "registers", "spills B", "shared B", "PTX B", "cubin B", "s"))
    failed = 0
    for cc in architectures:
        for variant in variants(cc):
            if not any(text in variant.name for text in options.only.split(",")):
                continue
            start = time.perf_counter()
            try:
                done = compile_variant(variant, cc, assemble=not options.ptx_only)
            except Exception as error:  # Triton raises many kinds
                failed += 1
                print(f"{variant.name:<28} {cc:>5} does not compile: {str(error).strip().splitlines()[-1]}")
                continue
            seconds = f"{time.perf_counter() - start:.1f}"
            figures = (done.registers, done.spills, done.shared, len(done.ptx), done.cubin_bytes)
            print(row.format(variant.name, cc, *("-" if f is None else f for f in figures), seconds), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
