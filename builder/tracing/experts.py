"""Mixtures of experts in a trace: every expert for every token, weighted by the router (0 for those not chosen).

Exact, and two plain matrix products: all experts' up-projections side by side, and all their down-projections end to
end, whose contraction sums over the experts. It costs experts / experts-per-token times the arithmetic that is needed;
weights are read once a step, as in any large batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from runtime.errors import BuildError

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

    Raises:
        BuildError: the experts do something between their products that does not fit two products.
    """
    experts, width = self.num_experts, hidden_states.shape[-1]
    weights_TE = torch.zeros_like(top_k_weights[:, :1]).expand(-1, experts).scatter(1, top_k_index, top_k_weights)
    weights_TE = weights_TE.to(hidden_states.dtype)
    if self.has_post_expert_norm:
        raise BuildError(f"{type(self).__name__} normalizes each expert's output, which is not supported")

    name = "gate_up_proj" if self.has_gate else "up_proj"
    up_ENK = getattr(self, name).transpose(1, 2) if self.is_transposed else getattr(self, name)
    up_TEN = linear(hidden_states, up_ENK.reshape(-1, width)).unflatten(-1, (experts, -1))
    if self.has_bias:
        up_TEN = up_TEN + getattr(self, f"{name}_bias")
    inner_TEI = self._apply_gate(up_TEN) if self.has_gate else self.act_fn(up_TEN)
    down_HEI = self.down_proj.permute(2, 0, 1) if self.is_transposed else self.down_proj.permute(1, 0, 2)
    out_TH = linear((inner_TEI * weights_TE[:, :, None]).flatten(1), down_HEI.flatten(1))
    return out_TH + weights_TE @ self.down_proj_bias if self.has_bias else out_TH
