"""Which tensor of the checkpoint is which weight of the traced graph, and what if one is missing."""

from __future__ import annotations

import copy
import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from builder.weights import FLOAT_DTYPES, cast, external, lazy, static_shape
from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from zoo.checkpoint import Checkpoint, TensorRef

log = logging.getLogger(__name__)

# Tensors that older checkpoints carry and no model reads: precomputed frequencies and causal masks. And the head, which
# an engine that embeds goes without.
_LEFTOVERS = re.compile(r"rotary_emb\.inv_freq$|\.attn(ention)?\.(masked_)?bias$|^(lm_head|embed_out)\.")
_SHOWN = 8  # names that an error lists


def attach_weights(traced: ir.Model, model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Turn the graph inputs that stand for weights into initializers whose values stay in the checkpoint's files.

    A weight is f32 in the graph; one that the file holds in bf16 or f16 is cast when it is read. A tied weight is one
    initializer. Checkpoints of another layout (renamed weights, one tensor for each expert) are read through the
    conversions that transformers itself uses to load them.

    Raises:
        BuildError: a weight is missing, has another shape, or is stored in a dtype that is not a float.
    """
    import onnx_ir as ir

    sources = find_sources(model, checkpoint)
    buffers = dict(model.named_buffers())
    aliases = find_aliases(model)
    missing, misshapen = [], []
    for value in [v for v in traced.graph.inputs if v.name in aliases]:
        assert value.name is not None
        expected = static_shape(value)
        name = next((alias for alias in aliases[value.name] if alias in sources), None)
        if name is None and value.name in buffers:
            tensor: Any = ir.tensor(buffers[value.name].numpy(), name=value.name)
        elif name is None:
            missing.append(aliases[value.name][0])
            continue
        else:
            tensor = sources[name]
            value.name = name
        shape = static_shape(tensor)
        if shape != expected:
            misshapen.append(f"{value.name} is {list(shape)}, expected {list(expected)}")
            continue
        tensor = cast(tensor, value.dtype or ir.DataType.FLOAT)
        tensor.name = value.name
        value.const_value = tensor
        traced.graph.inputs.remove(value)
        traced.graph.initializers[value.name] = value
    if missing:
        raise BuildError(
            f"{checkpoint.name}: {len(missing)} weights that its config asks for are not in its safetensors files: "
            f"{_some(missing)}; the files are incomplete or belong to another config"
        )
    if misshapen:
        raise BuildError(
            f"{checkpoint.name}: {len(misshapen)} weights do not have the shape that its config asks for: "
            f"{_some(misshapen)}"
        )


def find_aliases(model: torch.nn.Module) -> dict[str, list[str]]:
    """Every name of a weight -> all names of that weight (tied weights have several), itself first."""
    by_identity: dict[int, list[str]] = {}
    for name, weight in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        by_identity.setdefault(id(weight), []).append(name)
    return {name: [name, *(n for n in names if n != name)] for names in by_identity.values() for name in names}


def find_sources(model: torch.nn.Module, checkpoint: Checkpoint) -> dict[str, ir.TensorProtocol]:
    """The checkpoint's tensors by the name of the model's weight that each is, converted where layouts differ."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    refs = checkpoint.tensors()
    weights = model.state_dict(keep_vars=True)
    conversions = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}

    sources: dict[str, ir.TensorProtocol] = {}
    groups: dict[str, list[tuple[str, str, TensorRef]]] = {}
    unread = []
    for key in sorted(refs, key=_natural):
        name, pattern = rename_source_key(
            key,
            renamings,
            converters,
            getattr(model, "base_model_prefix", None),
            weights,  # type: ignore[arg-type]
        )
        if key in weights and name not in weights:
            name, pattern = key, None
        if name not in weights:
            if not _LEFTOVERS.search(key):
                unread.append(key)
        elif refs[key].dtype.upper() not in FLOAT_DTYPES:
            raise BuildError(
                f"{checkpoint.name}: {key} is stored as {refs[key].dtype}; only F32, F16, BF16 weights can be read. "
                "Take the checkpoint before quantization, and quantize with the recipe's `weights`"
            )
        elif pattern is None:
            sources[name] = external(name, refs[key])
        else:
            groups.setdefault(name, []).append((key, pattern, refs[key]))
    for name, members in groups.items():
        converter = by_pattern[members[0][1]]
        sources.update(_converted(name, members, converter, model))
    if unread:
        log.warning(
            "%s: %d tensors of its files are not part of the model: %s", checkpoint.name, len(unread), _some(unread)
        )
    return sources


def _converted(
    name: str, members: list[tuple[str, str, TensorRef]], converter: Any, model: Any
) -> dict[str, ir.TensorProtocol]:
    """The weights that a `WeightConverter` makes of several tensors, lazily: names and shapes come from a dry run."""
    import onnx_ir as ir
    import torch

    def run(load: Any) -> dict[str, torch.Tensor]:
        conversion = copy.deepcopy(converter)
        for key, pattern, ref in members:
            conversion.add_tensor(name, key, pattern, load(key, ref))
        made = conversion.convert(name, model=model, config=model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def compute(target: str) -> np.ndarray:
        def load(key: str, ref: TensorRef) -> torch.Tensor:
            return torch.from_numpy(external(key, ref).numpy().astype(np.float32))

        return run(load)[target].numpy()

    shapes = run(lambda _, ref: torch.empty(tuple(ref.shape), device="meta"))
    return {
        target: lazy(target, ir.DataType.FLOAT, tuple(tensor.shape), lambda target=target: compute(target))
        for target, tensor in shapes.items()
    }


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
