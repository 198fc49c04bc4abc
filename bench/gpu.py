"""`python -m bench.gpu`: the Triton kernels on an NVIDIA GPU, against its bandwidth and against torch; a table, last.

Kernels are checked before they are timed: errors against a computation in f32, or NumPy's, on random inputs, within the
format's bound. Times are medians of CUDA events after a warm-up, with the L2 cache flushed before each.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.gpu_sizes import FULL, QUICK, Sizes

if TYPE_CHECKING:
    import torch

    from plugins.torch_engine.graphs import Capture

_FLUSH_BYTES = 256 << 20  # more than any L2 cache


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok`: whether the goal was reached; None: there is none, or sizes are too small to say."""

    name: str
    value: str
    goal: str = ""
    ok: bool | None = None
    note: str = ""


@dataclass
class Machine:
    """What is measured on, at which sizes; first of all its copy bandwidth in bytes a second (read and written)."""

    device: Any
    bandwidth: float
    runs: int
    sizes: Sizes
    dense: str = "bf16"  # what is computed in, and the format of KV caches that are not quantized

    @property
    def dtype(self) -> torch.dtype:
        from plugins.torch_engine.engine import COMPUTE

        return COMPUTE[self.dense]

    def capture(self) -> Capture:
        """What records a step to replay it: CUDA graphs."""
        from plugins.torch_engine.graphs import CudaCapture

        return CudaCapture()

    def reached(self, good: bool) -> bool | None:
        """Whether a goal of speed was reached; None at sizes that say nothing of it."""
        return good if self.sizes.measures_speed else None

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of `call` in seconds, its L2 cache cold."""
        import torch

        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(3):
            call()
        times = []
        for _ in range(self.runs):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return statistics.median(times)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen measurements and print the table. Returns 1 where there is no GPU, or a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--only", default="", help="measurements to run, comma between (see --list)")
    parser.add_argument("--list", action="store_true", help="name the measurements and stop")
    parser.add_argument("--quick", action="store_true", help="small shapes: a check that everything runs")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each kernel")
    parser.add_argument("--json", default="", help="write the rows to this file, too")
    options = parser.parse_args(arguments)
    if options.list:
        for name, measure in MEASUREMENTS.items():
            print(f"{name:<12} {(measure.__doc__ or '').splitlines()[0]}")
        return 0
    chosen = [name for name in options.only.split(",") if name] or list(MEASUREMENTS)
    unknown = sorted(set(chosen) - set(MEASUREMENTS))
    if unknown or options.runs < 1:
        what = (
            f"no measurement is called {', '.join(unknown)}" if unknown else f"--runs is {options.runs}, not 1 or more"
        )
        print(f"{what}; measurements: {', '.join(MEASUREMENTS)}", file=sys.stderr)
        return 1
    reason = missing_gpu()
    if reason:
        print(f"bench.gpu needs an NVIDIA GPU: {reason}", file=sys.stderr)
        return 1
    rows = list(_run(chosen, options))
    print(table(rows))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump([row.__dict__ for row in rows], file, indent=2)
    return 1 if any(row.ok is False for row in rows) else 0


def missing_gpu() -> str | None:
    """Why nothing can be measured here; None where it can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed; pip install 'plancast[build,triton]'"
    from plugins.torch_engine.device import missing

    reason = missing("CUDA")
    if reason is None:
        try:
            import triton  # noqa: F401
        except ImportError:
            reason = f"triton is not installed (torch {torch.__version__} is); pip install 'plancast[triton]'"
    return reason


def table(rows: list[Row]) -> str:
    """The rows as text, columns aligned."""
    lines = [("measurement", "value", "goal", "reached", "note")]
    lines += [(r.name, r.value, r.goal, {True: "yes", False: "NO", None: ""}[r.ok], r.note) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _run(chosen: list[str], options: argparse.Namespace) -> Iterator[Row]:
    import torch
    import triton

    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    machine = Machine(device, 0.0, options.runs, QUICK if options.quick else FULL)
    machine.bandwidth = copy_bandwidth(machine, machine.sizes.copied)
    versions = f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}"
    yield Row("device", properties.name, note=f"{versions}, {time.strftime('%Y-%m-%d')}")
    note = f"read + write of {machine.sizes.copied >> 20} MiB"
    yield Row("copy bandwidth", f"{machine.bandwidth / 1e9:.0f} GB/s", note=note)
    for name in chosen:
        print(f"{name} ...", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        try:
            yield from MEASUREMENTS[name](machine)
        except Exception as error:  # one broken kernel must not hide the others
            yield Row(name, "FAILED", ok=False, note=f"{type(error).__name__}: {str(error).splitlines()[0][:120]}")
        torch.cuda.empty_cache()


def copy_bandwidth(machine: Machine, nbytes: int) -> float:
    """Bytes a second, read and written, of a device copy."""
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * nbytes / machine.seconds(lambda: target.copy_(source))


# Attention --------------------------------------------------------------------------------------------------------


@dataclass
class Decode:
    """A decode step's inputs: `sequences` of `context` tokens each, one new token, pages of one format."""

    shape: Any
    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    tables: list[torch.Tensor]
    dense: tuple[torch.Tensor, torch.Tensor] | None  # keys and values [B, S, Hkv, D] before they were quantized
    context: int

    @property
    def bytes(self) -> int:
        """What a kernel must read: each sequence's cells, with their scales."""
        shape = self.shape
        cell = shape.key_format.cell_bytes(shape.head_size) + shape.value_format.cell_bytes(shape.v_head_size)
        return len(self.tables[0]) * self.context * shape.num_kv_heads * cell

    def run(self) -> torch.Tensor:
        from plugins.paged_attention.torch_kernel import attention

        return attention(self.shape, self.query, *self.caches, *self.tables, self.context)


def make_decode(
    device: Any, kind: str, sequences: int, context: int, heads: int = 64, kv_heads: int = 8, dtype: Any = None
) -> Decode:
    """Random keys and values in `dtype` (default bf16), written by the writing kernel into scattered blocks."""
    import torch

    from plugins.paged_attention import torch_kernel
    from plugins.paged_attention.kv_formats import KvFormat

    size, block = 128, 32
    dtype = dtype or torch.bfloat16
    form = KvFormat(kind)
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    shape = torch_kernel.AttentionShape(heads, kv_heads, size, size, size**-0.5, block, form, form, native_fp8=native)
    blocks = -(-context // block)
    page = block * form.cell_bytes(size)
    caches = tuple(torch.zeros(sequences * blocks, kv_heads, page, dtype=torch.uint8, device=device) for _ in range(2))
    i32 = {"dtype": torch.int32, "device": device}
    ids = torch.randperm(sequences * blocks, device=device).to(torch.int32)
    starts = torch.arange(sequences + 1, **i32) * blocks
    dense = []
    for index in range(sequences):  # one sequence at a time: the keys and values in bf16 are large
        mine = [
            torch.zeros(1, **i32),
            torch.tensor([0, context], **i32),
            ids[index * blocks : (index + 1) * blocks].contiguous(),
            torch.tensor([0, blocks], **i32),
        ]
        new = [torch.randn(context, kv_heads * size, dtype=dtype, device=device) for _ in range(2)]
        torch_kernel.write(shape, *new, *caches, *mine)
        dense.append(torch.stack(new).unflatten(-1, (kv_heads, size)))
    keys, values = torch.stack(dense, 1)
    tables = [torch.full((sequences,), context - 1, **i32), torch.arange(sequences + 1, **i32), ids, starts]
    query = torch.randn(sequences, heads * size, dtype=dtype, device=device)
    return Decode(shape, query, (caches[0], caches[1]), tables, (keys, values), context)


def exact_attention(decode: Decode, sequences: int = 4) -> torch.Tensor:
    """Attention in f32 over the dense keys and values of the first `sequences` (in f32 all would be large):
    [sequences, Hq * D]."""
    import torch

    assert decode.dense is not None
    keys, values = (x[:sequences].float().transpose(1, 2) for x in decode.dense)
    query = decode.query[:sequences].float().unflatten(-1, (decode.shape.num_heads, -1))[:, :, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, scale=decode.shape.scale, enable_gqa=True
    )
    return out.flatten(1)


# Largest error over the exact result's standard deviation, on random inputs.
_BOUNDS = {"bf16": 0.03, "int8": 0.05, "fp8_e4m3": 0.2, "int4": 0.6}


def measure_decode(machine: Machine) -> Iterator[Row]:
    """decode attention by KV format: share of the bandwidth, speed against bf16, errors"""
    sizes = machine.sizes
    times: dict[str, float] = {}
    for kind, goal in ((machine.dense, 0.85), ("int8", 1.6), ("fp8_e4m3", 1.8), ("int4", 3.0)):
        check = make_decode(machine.device, kind, *sizes.checked, *sizes.heads, machine.dtype)
        exact = exact_attention(check)
        error = float((check.run().float() - exact).abs().max() / exact.std())
        bound = _BOUNDS.get(kind, _BOUNDS["bf16"])
        yield Row(f"decode {kind} error", f"{error:.4f}", f"<= {bound}", error <= bound, "of a deviation")
        decode = make_decode(machine.device, kind, *sizes.decode, *sizes.heads, machine.dtype)
        decode.dense = None
        times[kind] = machine.seconds(decode.run)
        share = decode.bytes / times[kind] / machine.bandwidth
        what = "{} x {}".format(*sizes.decode) + f", {times[kind] * 1e6:.0f} us, {share:.0%} of the copy bandwidth"
        if kind == machine.dense:
            yield Row(f"decode {kind}", f"{share:.1%}", f">= {goal:.0%}", machine.reached(share >= goal), what)
        else:
            ratio = times[machine.dense] / times[kind]
            good = machine.reached(ratio >= goal)
            yield Row(f"decode {kind}", f"{ratio:.2f} x {machine.dense}", f">= {goal}", good, what)


def measure_torch(machine: Machine) -> Iterator[Row]:
    """decode attention against torch's SDPA and FlexAttention over gathered keys and values"""
    import torch
    from torch.nn.attention.flex_attention import flex_attention
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    decode = make_decode(machine.device, machine.dense, *machine.sizes.decode, *machine.sizes.heads, machine.dtype)
    exact = exact_attention(decode)
    decode.dense = None
    shape = decode.shape
    pages = [cache.view(machine.dtype).unflatten(-1, (shape.block_size, -1)) for cache in decode.caches]
    ids = decode.tables[2].long().reshape(len(decode.query), -1)
    query = decode.query.unflatten(-1, (shape.num_heads, -1))[:, :, None]
    flex = torch.compile(flex_attention, dynamic=False) if machine.device.type == "cuda" else flex_attention

    def gathered(attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        # The last block is not full unless the context is a multiple of the block.
        keys, values = (page[ids].transpose(1, 2).flatten(2, 3)[:, :, : decode.context] for page in pages)
        return attend(query, keys, values, scale=shape.scale, enable_gqa=True)

    ours = machine.seconds(decode.run)
    for name, attend in (("SDPA", sdpa), ("FlexAttention", flex)):
        error = float((gathered(attend).flatten(1)[: len(exact)].float() - exact).abs().max() / exact.std())
        theirs = machine.seconds(lambda attend=attend: gathered(attend))
        ratio = theirs / ours
        good = machine.reached(ratio >= 1.5) if error <= _BOUNDS["bf16"] else False
        note = f"{ours * 1e6:.0f} us against {theirs * 1e6:.0f} us, whose error is {error:.4f} of a deviation"
        yield Row(f"decode against {name}", f"{ratio:.2f} x", ">= 1.5", good, note)


def measure_prefill(machine: Machine) -> Iterator[Row]:
    """prefill of long prompts: TFLOP/s of causal attention"""
    import torch

    from plugins.paged_attention.torch_kernel import attention

    decode = make_decode(machine.device, machine.dense, *machine.sizes.prefill, *machine.sizes.heads, machine.dtype)
    shape, B, S = decode.shape, len(decode.query), decode.context
    query = torch.randn(B * S, shape.num_heads * shape.head_size, dtype=machine.dtype, device=machine.device)
    starts = torch.arange(B + 1, dtype=torch.int32, device=machine.device) * S
    tables = [torch.zeros_like(decode.tables[0]), starts, *decode.tables[2:]]
    seconds = machine.seconds(lambda: attention(shape, query, *decode.caches, *tables, S, splits=1))
    rate = 2 * 2 * B * shape.num_heads * shape.head_size * S * S / 2 / seconds
    yield Row(
        f"prefill {machine.dense}", f"{rate / 1e12:.0f} TFLOP/s", note=f"{B} x {S} tokens, {seconds * 1e3:.2f} ms"
    )


# Products ---------------------------------------------------------------------------------------------------------


def measure_products(machine: Machine) -> Iterator[Row]:
    """weight-only products of 1 to 16 rows: share of the bandwidth, errors"""
    import torch

    from plugins.gpu.torch_kernel import weight_only

    N, K, group = machine.sizes.product
    new: Any = {"device": machine.device}
    codes = torch.randint(-8, 8, (N, K), **new)
    packed = ((codes[:, ::2] & 15) | ((codes[:, 1::2] & 15) << 4)).to(torch.uint8)
    scales = torch.rand(N, K // group, dtype=torch.float16, **new) * 0.01 + 0.001
    weight = codes.float() * scales.float().repeat_interleave(group, 1)
    for rows in (1, 4, 16):
        x = torch.randn(rows, K, dtype=machine.dtype, **new)
        exact = x.float() @ weight.T
        error = float((weight_only(x, packed, scales, "int4").float() - exact).abs().max() / exact.std())
        seconds = machine.seconds(lambda x=x: weight_only(x, packed, scales, "int4"))
        share = (packed.numel() + 2 * scales.numel()) / seconds / machine.bandwidth
        good = machine.reached(share >= 0.75) if error < 0.05 else False
        note = f"{N} x {K}, groups of {group}, {seconds * 1e6:.0f} us, error {error:.4f} of a deviation"
        yield Row(f"int4 product, {rows} rows", f"{share:.1%}", ">= 75%", good, note)


# A whole decode step ------------------------------------------------------------------------------------------------


def measure_step(machine: Machine) -> Iterator[Row]:
    """a Llama-8B-shaped decode step of 64 sequences by the torch engine and its CUDA graphs: share of the roofline"""
    import torch

    from bench.gpu_step import LlamaStep, kernels_in

    shape, (sequences, context) = machine.sizes.model, machine.sizes.step
    step = LlamaStep(machine.device, machine.dense, shape, sequences, context, machine.capture())
    plain = step.run().float().clone()  # launch by launch; then it is captured
    error = float((step.run().float() - plain).abs().max() / plain.std())
    seconds = machine.seconds(step.run)
    share = step.bytes / seconds / machine.bandwidth
    right = bool(torch.isfinite(plain).all()) and error <= 0.05 and bool(step.graphs.captured)
    note = (
        f"{shape.layers} layers, {sequences} x {context}, {seconds * 1e3:.2f} ms, {sequences / seconds:.0f} tokens/s, "
        f"{step.graphs.replays} replays, {error:.4f} of a deviation from launches one by one; "
        f"{', '.join(kernels_in(step))}"
    )
    goal = machine.reached(share >= 0.7) if right else False
    yield Row(f"decode step, {machine.dense}", f"{share:.1%}", ">= 70%", goal, note)


def measure_checks(machine: Machine) -> Iterator[Row]:
    """every kernel and attribute against its reference in NumPy or f32, on random inputs"""
    from bench.gpu_checks import checks

    for name, error, bound in checks(machine.device, machine.dtype, machine.dense):
        yield Row(name, f"{error:.4f}", f"<= {bound}", error <= bound)


MEASUREMENTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "checks": measure_checks,
    "decode": measure_decode,
    "torch": measure_torch,
    "prefill": measure_prefill,
    "products": measure_products,
    "step": measure_step,
}

if __name__ == "__main__":
    sys.exit(main())
