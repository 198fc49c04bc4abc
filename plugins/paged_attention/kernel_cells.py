"""The cells of the paged cache as Triton reads them; what they hold stands in `kv_formats.py`.

A format is three compile-time constants: FORMAT ("float": the cells hold values; "int8", "fp8_e4m3", "fp8_e5m2",
"int4", "int4z" (with a minimum a group); "_native" behind an fp8 format: converted by the hardware, from SM89 on),
GROUP (int4: elements that share a scale) and STATIC (fp8: the one scale of all cells, or 0). `data` points to a
block's page of one head in the cells' type, `scales` to the bf16 numbers of the same page. Int4 cells come in halves:
byte `j` holds element `j` and, in its high nibble, element `j + SIZE / 2`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def nibbles(stored, scale, minimum, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """The values of four-bit codes (the low nibbles of `stored`), in the dtype that the products run in."""
    codes = (stored & 0xF).to(tl.int32)
    if FORMAT == "int4z":
        return (codes.to(tl.float32) * scale + minimum).to(dtype)
    return (((codes ^ 8) - 8).to(tl.float32) * scale).to(dtype)


@triton.jit
def cell_scale(scales_N, cell_N, inside_N, BLOCK_SIZE: tl.constexpr, SIZE: tl.constexpr, STATIC: tl.constexpr):
    """The scale f32 [N] of each of N 8-bit cells."""
    if STATIC > 0:
        return tl.full(cell_N.shape, STATIC, tl.float32)
    return tl.load(scales_N + cell_N, mask=inside_N, other=0.0).to(tl.float32)


@triton.jit
def spread(
    scales_N,  # pointers to the first number of each cell's page
    cell_N,
    inside_N,
    FIRST: tl.constexpr,  # element
    BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The number of the group that elements FIRST to FIRST + BLOCK_H of each cell belong to: f32 [N, BLOCK_H]."""
    if BLOCK_H % GROUP == 0 and FIRST % GROUP == 0 and FIRST + BLOCK_H <= SIZE:
        g = tl.arange(0, BLOCK_H // GROUP) + FIRST // GROUP  # each is loaded once
        number_NG = scales_N[:, None] + g[None, :] * BLOCK_SIZE + cell_N[:, None]
        number_NG = tl.load(number_NG, mask=inside_N[:, None], other=0.0)
        wide = tl.broadcast_to(number_NG[:, :, None], [cell_N.shape[0], BLOCK_H // GROUP, GROUP])
        return tl.reshape(wide, [cell_N.shape[0], BLOCK_H]).to(tl.float32)
    d = FIRST + tl.arange(0, BLOCK_H)
    inside = inside_N[:, None] & (d < SIZE)[None, :]
    return tl.load(scales_N[:, None] + (d // GROUP)[None, :] * BLOCK_SIZE + cell_N[:, None], mask=inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def load_half(
    stored_NH,
    scales_N,
    cell_N,
    inside_N,
    HIGH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    dtype: tl.constexpr,
):
    """The lower or the higher half of int4 cells' elements: [N, BLOCK_H]."""
    GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
    FIRST: tl.constexpr = HIGH * (SIZE // 2)
    scale_NH = spread(scales_N, cell_N, inside_N, FIRST, BLOCK_H, BLOCK_SIZE, SIZE, GROUP)
    minimum_NH = scale_NH
    if FORMAT == "int4z":
        minima_N = scales_N + GROUPS * BLOCK_SIZE
        minimum_NH = spread(minima_N, cell_N, inside_N, FIRST, BLOCK_H, BLOCK_SIZE, SIZE, GROUP)
    if HIGH:
        stored_NH = stored_NH >> 4
    value_NH = nibbles(stored_NH, scale_NH, minimum_NH, FORMAT, dtype)
    # Past the half lie other elements' scales: they must not reach the products.
    h = tl.arange(0, BLOCK_H)
    return tl.where((h < SIZE // 2)[None, :], value_NH, 0.0)
