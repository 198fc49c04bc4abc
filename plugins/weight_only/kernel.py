"""Matrix products of a few rows with weights in int4, int8 or fp8, dequantized in registers.

A decode reads every weight once for a handful of rows, so its time is the bytes of the weights: they are read as they
are stored. K is cut into splits where there are too few columns to fill a device; `sum_splits` adds them up in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from plugins.gpu.kernel_numbers import dequantized


@triton.jit
def matmul(
    x,  # [M, K]
    weight,  # [N, K]: i8, u8 (fp8 bits), or int4 as u8 [N, K / 2]: element 2 j in the low nibble of byte j
    scales,  # [N, K / GROUP], or [N] where GROUP is 0
    zeros,  # i8 [N, K / GROUP], where ZEROS
    bias,  # [N], where BIAS
    y,  # [M, N]; f32 [splits, M, N] where there are several splits
    M,
    N,
    K,
    FORMAT: tl.constexpr,  # int4 (signed), uint4, int8, or as in `dequantized`
    GROUP: tl.constexpr,  # columns that share a scale; a multiple of BLOCK_K; 0: all
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (part of N, part of M, split of K): `y = x W^T (+ bias)`, sums in f32."""
    INT4: tl.constexpr = FORMAT == "int4" or FORMAT == "uint4"
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    in_n, in_m = n < N, m < M
    share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    x_M = x + m.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(split * share, tl.minimum((split + 1) * share, K), BLOCK_K):
        if INT4:
            byte = k0 // 2 + tl.arange(0, BLOCK_K // 2)
            in_k = 2 * byte < K
            w = tl.load(
                weight + n.to(tl.int64)[:, None] * (K // 2) + byte[None, :], mask=in_n[:, None] & in_k[None, :], other=0
            )
            low, high = (w & 0xF).to(tl.int32), (w >> 4).to(tl.int32)
            if FORMAT == "int4":
                low, high = (low ^ 8) - 8, (high ^ 8) - 8
            if ZEROS:
                zero = tl.load(zeros + n * (K // GROUP) + k0 // GROUP, mask=in_n, other=0).to(tl.int32)
                low, high = low - zero[:, None], high - zero[:, None]
            inside = in_m[:, None] & in_k[None, :]
            even = tl.load(x_M + 2 * byte[None, :], mask=inside, other=0.0)
            odd = tl.load(x_M + 2 * byte[None, :] + 1, mask=inside, other=0.0)
            part = tl.dot(even, low.to(even.dtype).trans(), input_precision="ieee")
            part = tl.dot(odd, high.to(odd.dtype).trans(), part, input_precision="ieee")
        else:
            k = k0 + tl.arange(0, BLOCK_K)
            in_k = k < K
            w = tl.load(weight + n.to(tl.int64)[:, None] * K + k[None, :], mask=in_n[:, None] & in_k[None, :], other=0)
            row = tl.load(x_M + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0)
            part = tl.dot(row, dequantized(w, FORMAT, row.dtype).trans(), input_precision="ieee")
        if GROUP > 0:
            part *= tl.load(scales + n * (K // GROUP) + k0 // GROUP, mask=in_n, other=0.0).to(tl.float32)[None, :]
        acc += part
    if GROUP == 0:
        acc *= tl.load(scales + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if BIAS and SPLITS == 1:
        acc += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = (split.to(tl.int64) * M + m)[:, None] * N + n[None, :]
    tl.store(y + at, acc, mask=in_m[:, None] & in_n[None, :])


@triton.jit
def sum_splits(partial, bias, y, M, N, BIAS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (part of N, row): add the splits f32 [SPLITS, M, N] up in order, and the bias."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = n < N
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * M + row) * N + n, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + n, total, mask=inside)
