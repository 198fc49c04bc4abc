"""A decode step of the shape of Llama-3-8B, out of the Triton kernels and torch's products, with random weights."""

# pyright: reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch

from bench.gpu import make_decode
from plugins.gpu.torch_kernel import gated_mlp, rms_norm
from plugins.paged_attention.torch_kernel import attention, write

HIDDEN, INTERMEDIATE, VOCAB, HEADS, KV_HEADS, HEAD = 4096, 14336, 128256, 32, 8, 128


class LlamaStep:
    """All memory is allocated beforehand, and launches depend on shapes alone: a CUDA graph can hold the step."""

    def __init__(self, device: Any, layers: int, sequences: int, context: int):
        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, dtype=torch.bfloat16, device=device) * columns**-0.5

        self.layers = [
            {
                "qkv": matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN),
                "o": matrix(HIDDEN, HEADS * HEAD),
                "gate_up": matrix(2 * INTERMEDIATE, HIDDEN),
                "down": matrix(HIDDEN, INTERMEDIATE),
                "cache": make_decode(device, "bf16", sequences, context, HEADS, KV_HEADS),
            }
            for _ in range(layers)
        ]
        for layer in self.layers:
            layer["cache"].dense = None
        self.head = matrix(VOCAB, HIDDEN)
        self.norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
        self.x = torch.randn(sequences, HIDDEN, dtype=torch.bfloat16, device=device)
        angles = torch.arange(context, device=device)[:, None] * 5e5 ** -(torch.arange(HEAD // 2, device=device) / 64)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.positions = torch.full((sequences,), context - 1, dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        """What a step must read: every weight and every cell once."""
        weights = self.head.numel() + sum(
            layer[name].numel() for layer in self.layers for name in ("qkv", "o", "gate_up", "down")
        )
        return 2 * weights + sum(layer["cache"].bytes for layer in self.layers)

    def run(self) -> torch.Tensor:
        """Logits [B, vocabulary]."""
        residual = self.x.clone()
        y = torch.zeros_like(residual)
        for layer in self.layers:
            cache = layer["cache"]
            y = rms_norm(y, self.norm, 1e-5, residual)
            query, key, value = (y @ layer["qkv"].T).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], 1)
            turned = write(
                cache.shape, key.contiguous(), value.contiguous(), *cache.caches, *cache.tables,
                query=query.contiguous(), cos=self.cos, sin=self.sin, positions=self.positions, rotary=HEAD,
            )  # fmt: skip
            assert turned is not None
            y = attention(cache.shape, turned, *cache.caches, *cache.tables, cache.context) @ layer["o"].T
            y = rms_norm(y, self.norm, 1e-5, residual)
            y = gated_mlp(y @ layer["gate_up"].T) @ layer["down"].T
        return rms_norm(y, self.norm, 1e-5, residual) @ self.head.T
