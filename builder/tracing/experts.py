"""Mixtures of experts in a trace: every expert for every token, weighted by the router (0 for those not chosen).

Exact, and plain matrix products, where the implementations of transformers sort or gather weights by token. It costs
experts / experts-per-token times the arithmetic; weights are read once a step, as in any large batch.
"""

from __future__ import annotations

from typing import Any

import torch

IMPLEMENTATION = "plancast_dense"


def register() -> None:
    """Make `experts_implementation="plancast_dense"` known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, dense_experts)


def dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The forward of an experts module of transformers (`use_experts_implementation`).

    Args:
        self: the module: gate_up_proj (or up_proj) and down_proj `[E, out, in]`, transposed if `is_transposed`.
        hidden_states: [T, hidden].
        top_k_index: [T, K] experts chosen for each token.
        top_k_weights: [T, K] their weights.

    Returns:
        [T, hidden].
    """
    tokens, experts = hidden_states.shape[0], self.num_experts

    def linear(x_ETK: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self, name)
        out = torch.matmul(x_ETK, weight if self.is_transposed else weight.transpose(1, 2))
        return out + getattr(self, f"{name}_bias")[:, None] if self.has_bias else out

    up = linear(hidden_states[None], "gate_up_proj" if self.has_gate else "up_proj")
    out_ETH = linear(self._apply_gate(up) if self.has_gate else self.act_fn(up), "down_proj")
    if self.has_post_expert_norm:
        out_ETH = self.post_expert_norm(out_ETH)
    weights_TE = torch.zeros(tokens, experts, dtype=out_ETH.dtype).scatter(
        1, top_k_index, top_k_weights.to(out_ETH.dtype)
    )
    return (out_ETH * weights_TE.transpose(0, 1)[:, :, None]).sum(dim=0)
