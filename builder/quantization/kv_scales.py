"""Static scales of fp8 KV caches: one for a layer's keys and one for its values, from a calibration text.

A scale a layer costs no byte a token, and saturates what is larger than anything that the text showed; the default, a
scale a token and head, needs no text and cannot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from builder.quantization.calibrate import put_weights
from builder.quantization.streaming import StreamedModel, run_layer
from plugins.paged_attention.kv_formats import LARGEST, rotate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from builder.recipe import KvConfig
    from zoo.checkpoint import Checkpoint
    from zoo.progress import Progress
    from zoo.quantized import QuantizedRef

# What is served may be larger than what was read. fp8 floats: a binade more above costs one of denormals below.
_ROOM = 2.0
_BATCH = 4
_IMPLEMENTATION = "plancast_observed"


class StaticScales(NamedTuple):
    """What a layer's stored keys and values are multiplied by; 0: a scale a cell (the format is not fp8)."""

    key: float
    value: float


def kv_scales(
    checkpoint: Checkpoint,
    kv: KvConfig,
    samples: NDArray[np.int64],
    quantized: Mapping[str, QuantizedRef],
    dense: Mapping[str, NDArray[np.float32]],
    progress: Progress,
    *,
    trust_remote_code: bool = False,
) -> dict[int, StaticScales]:
    """Scales by layer: twice the largest magnitude that the layer stores while it reads `samples`, over fp8's largest.

    Args:
        samples: token ids `[samples, tokens]`.
        quantized, dense: the weights that the engine will have in place of the checkpoint's, by name.

    Raises:
        BuildError: the model has no decoder layers that can be run one by one.
    """
    with _observing(kv) as largest:
        model = StreamedModel(checkpoint, trust_remote_code=trust_remote_code, attention=_IMPLEMENTATION)
        size = next(size for size in range(min(_BATCH, len(samples)), 0, -1) if len(samples) % size == 0)
        hidden, arguments = model.enter(torch.from_numpy(samples).split(size))
        for index, layer in enumerate(model.layers):
            progress.update("reading KV scales", index, len(model.layers))
            prefix = model.layer_name(index)
            with model.loaded(layer, prefix):
                put_weights(model, layer, prefix, quantized, dense)
                hidden = [run_layer(layer, states, arguments[index]) for states in hidden]
    return {
        layer: StaticScales(_scale(kv.key, key), _scale(kv.value, value)) for layer, (key, value) in largest.items()
    }


def _scale(dtype: str, largest: float) -> float:
    if not dtype.startswith("fp8"):
        return 0.0
    return _ROOM * largest / LARGEST[dtype] if largest else 1.0


@contextlib.contextmanager
def _observing(kv: KvConfig) -> Iterator[dict[int, tuple[float, float]]]:
    """Let transformers know an attention that is sdpa and notes the largest |key| and |value| that a layer stores."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    found: dict[int, tuple[float, float]] = {}

    def attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any):
        before = found.get(module.layer_idx, (0.0, 0.0))
        now = (_largest(key, kv.rotate in ("key", "both")), _largest(value, kv.rotate in ("value", "both")))
        found[module.layer_idx] = max(before[0], now[0]), max(before[1], now[1])
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register(_IMPLEMENTATION, attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, sdpa_mask)
    yield found


def _largest(x: torch.Tensor, rotated: bool) -> float:
    values = x.detach().numpy()
    return float(np.abs(rotate(values) if rotated else values).max())
