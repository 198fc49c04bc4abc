"""An EAGLE-style head: a decoder layer or few over the target's last hidden states and the tokens that followed them.

Li et al. 2024, EAGLE (feature-level autoregression); Zhang et al. 2024, HASS, and Li et al. 2025, EAGLE-3 (training on
the head's own outputs). The slot of position i holds the target's hidden state h_i and the token t_{i+1}; its output
stands for h_{i+1}, and the target's own head over its most frequent tokens reads t_{i+2} off it. A draft goes on with
the outputs in the place of hidden states. Embedding and reading head are the target's, frozen.

Shapes: B sequences of T slots, hidden size H, D tokens that the head may draft, V that the target knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from runtime.errors import PlancastError

# q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, T, Hq, D].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# The target's weights that a head reads and never stores.
FROZEN = ("embed_tokens.weight", "lm_head.weight")


class HeadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a head: Llama layers of the target's width, whatever the target's family is."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int  # D
    target_vocab_size: int  # V
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    num_layers: int = 1

    @classmethod
    def of(cls, config: Any, vocab_size: int, num_layers: int = 1) -> HeadConfig:
        """For a target with this transformers config. Raises `PlancastError` where it names no sizes."""
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        try:
            hidden, heads, target_vocab_size = (
                int(getattr(text, name)) for name in ("hidden_size", "num_attention_heads", "vocab_size")
            )
        except AttributeError as error:
            raise PlancastError(
                f"a head cannot be made for {config.model_type}: its config has no {error.name}"
            ) from None
        return cls(
            hidden_size=hidden,
            intermediate_size=int(getattr(text, "intermediate_size", 0) or 4 * hidden),
            num_heads=heads,
            num_kv_heads=int(getattr(text, "num_key_value_heads", 0) or heads),
            head_size=int(getattr(text, "head_dim", 0) or hidden // heads),
            vocab_size=vocab_size,
            target_vocab_size=target_vocab_size,
            num_layers=num_layers,
        )


class HeadLayer(nn.Module):
    """A Llama layer. `layer_idx`: its place, for the tracer."""

    is_causal = True

    def __init__(self, config: HeadConfig, layer_idx: int):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.layer_idx, self._head_size = layer_idx, config.head_size
        h, mid, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        heads, kv = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(h, eps), LlamaRMSNorm(h, eps)
        self.q_proj, self.o_proj = nn.Linear(h, heads, bias=False), nn.Linear(heads, h, bias=False)
        self.k_proj, self.v_proj = nn.Linear(h, kv, bias=False), nn.Linear(h, kv, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(h, mid, bias=False), nn.Linear(h, mid, bias=False)
        self.down_proj = nn.Linear(mid, h, bias=False)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """The residual stream [B, T, H] after the layer."""
        x = x + self.o_proj(self.attended(x, rope, attend))
        return x + self.down_proj(self.gated(x))

    def attended(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """What `o_proj` reads [B, T, heads * head size]."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        normed = self.input_layernorm(x)
        heads = (*normed.shape[:-1], -1, self._head_size)
        q, k, v = (proj(normed).view(heads).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *rope)
        return attend(q, k, v).reshape(*normed.shape[:-1], -1)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """What `down_proj` reads [B, T, intermediate size]."""
        normed = self.post_attention_layernorm(x)
        return nn.functional.silu(self.gate_proj(normed)) * self.up_proj(normed)

    def begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take those of a transformers layer's weights that are like its own."""
        own = self.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                short = name.removeprefix("self_attn.").removeprefix("mlp.")
                if short in own and own[short].shape == value.shape:
                    own[short].copy_(value)

    def let_through(self) -> None:
        """Let the residual stream pass as it is, until training has it otherwise."""
        with torch.no_grad():
            self.o_proj.weight.zero_()
            self.down_proj.weight.zero_()


class EagleHead(nn.Module):
    """The head. Parameters of `FROZEN` come from the target (`adopt`)."""

    inv_freq: torch.Tensor
    layers: Sequence[HeadLayer]  # type: ignore[assignment]

    def __init__(self, config: HeadConfig):
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        self.config = config
        h, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.target_vocab_size, h)
        self.embed_norm, self.hidden_norm = LlamaRMSNorm(h, eps), LlamaRMSNorm(h, eps)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList(HeadLayer(config, index) for index in range(config.num_layers))  # type: ignore[assignment]
        self.norm = LlamaRMSNorm(h, eps)
        self.lm_head = nn.Linear(h, config.vocab_size, bias=False)
        inv_freq = config.rope_theta ** (-torch.arange(0, config.head_size, 2).float() / config.head_size)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def adopt(self, embeddings: torch.Tensor, head_rows: torch.Tensor) -> None:
        """Take the target's embedding [V, H] and the rows [D, H] of its head, and keep them as they are."""
        with torch.no_grad():
            self.embed_tokens.weight = nn.Parameter(embeddings, requires_grad=False)
            self.lm_head.weight = nn.Parameter(head_rows, requires_grad=False)

    def own_weights(self) -> dict[str, torch.Tensor]:
        """What training makes: all but the target's."""
        return {name: value for name, value in self.state_dict().items() if name not in FROZEN}

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [B, T, head_size] of positions i64 [B, T]."""
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attends: Sequence[Attend],
    ) -> torch.Tensor:
        """Outputs [B, T, H], normed for `lm_head`, of slots with tokens i64 [B, T] and hidden states [B, T, H].

        `attends`: the attention of each layer.
        """
        x = self.fc(self.slots(token_ids, hidden))
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, rope, attend)
        return self.norm(x)

    def slots(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What `fc` reads [B, T, 2 H]."""
        return torch.cat((self.embed_norm(self.embed_tokens(token_ids)), self.hidden_norm(hidden)), dim=-1)


class UnrolledAttention:
    """A layer's attention of the s-th pass over a text, in which slot j has had s tokens of its draft before it (HASS).

    Slots up to j - s were computed from the target's hidden states in the first pass; the s after them from the head's
    own outputs, each in the pass of its place in the draft.
    """

    def __init__(self) -> None:
        self._passes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
        self._passes.append((k, v))
        depth, length = len(self._passes) - 1, q.shape[2]
        first_k, first_v = self._passes[0]
        scale = q.shape[-1] ** -0.5
        scores = (q @ first_k.transpose(2, 3)).float() * scale
        seen = torch.ones(length, length, dtype=torch.bool).tril(-depth)
        scores = scores.masked_fill(~seen, -1e9)
        own, values = [], []
        for back, (pass_k, pass_v) in enumerate(reversed(self._passes[1:])):  # this pass's own slot, then those before
            shifted = [torch.roll(part, back, 2) if back else part for part in (pass_k, pass_v)]
            own.append((q * shifted[0]).sum(-1).float() * scale)
            values.append(shifted[1])
        if own:
            scores = torch.cat((scores, torch.stack(own, -1)), -1)
        weights = scores.softmax(-1).to(v.dtype)
        out = weights[..., :length] @ first_v
        for at, value in enumerate(values):
            out = out + weights[..., length + at : length + at + 1] * value
        return out.transpose(1, 2)


def unroll(head: EagleHead, token_ids: torch.Tensor, hidden: torch.Tensor, passes: int) -> list[torch.Tensor]:
    """Outputs [B, T, H] of each pass: in the s-th, slot j is the s-th slot of a draft, reached along the text's tokens.

    `token_ids` i64 [B, T] and `hidden` [B, T, H]: of every slot. The first `s` slots of pass `s` mean nothing.
    """
    attends = [UnrolledAttention() for _ in head.layers]
    rope = head.rope(torch.arange(token_ids.shape[1])[None])
    outputs: list[torch.Tensor] = []
    for _ in range(passes):
        outputs.append(head(token_ids, hidden, rope, attends))
        hidden = torch.roll(outputs[-1], 1, 1)  # the slot before stands for this one's hidden state
    return outputs


def make_head(target: Any, token_ids: list[int], num_layers: int = 1) -> EagleHead:
    """A head for the transformers model `target` that drafts the tokens `token_ids`, before any training.

    Its layers are the target's last ones, where those are like its own, and what goes in is the hidden state alone.
    """
    embeddings: Any = target.get_input_embeddings()
    reading: Any = target.get_output_embeddings()
    config = HeadConfig.of(target.config, len(token_ids), num_layers)
    head = EagleHead(config)
    rows = reading.weight.detach()[torch.tensor(token_ids)]
    head.adopt(embeddings.weight.detach().float(), rows.float())
    base = getattr(target, "model", None)
    for own, layer in zip(reversed(head.layers), reversed(getattr(base, "layers", None) or ()), strict=False):
        own.begin(layer.state_dict())
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, config.hidden_size :] = torch.eye(config.hidden_size)
        norm = getattr(base, "norm", None)
        if norm is not None and getattr(norm, "weight", None) is not None:
            head.norm.weight.copy_(norm.weight)
    return head
