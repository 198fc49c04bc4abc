"""A Hugging Face model run one decoder layer at a time: its weights are read when it runs, and dropped after.

Memory holds one layer, the embedding, and the hidden states of the calibration text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from builder.tracing.config import load_config
from builder.tracing.weights import find_aliases, find_sources
from runtime.errors import BuildError

if TYPE_CHECKING:
    import onnx_ir as ir

    from zoo.checkpoint import Checkpoint


class StreamedModel:
    """The model of `checkpoint` in f32, on no memory but for what was asked for; `attention`: by transformers' name."""

    def __init__(self, checkpoint: Checkpoint, *, trust_remote_code: bool, attention: str = "sdpa"):
        import accelerate
        from transformers import AutoModelForCausalLM

        config = load_config(checkpoint, trust_remote_code=trust_remote_code)
        config.use_cache = False
        with accelerate.init_empty_weights(include_buffers=False):
            self.model: Any = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention, trust_remote_code=trust_remote_code
            )
        self.model.eval()
        self.model.tie_weights()
        self.name = checkpoint.name
        self._sources = find_sources(self.model, checkpoint)
        self._aliases = find_aliases(self.model)
        self.prefix, self.layers = _decoder_layers(self.model, checkpoint.name)

    def weight_name(self, name: str) -> str:
        """The checkpoint's name of the model's parameter `name`: that under which the graph has it."""
        return next((alias for alias in self._aliases[name] if alias in self._sources), name)

    def layer_name(self, index: int) -> str:
        return f"{self.prefix}.{index}"

    @contextlib.contextmanager
    def loaded(self, module: torch.nn.Module, prefix: str) -> Iterator[torch.nn.Module]:
        """`module` (called `prefix`) with its weights in memory, until the context ends."""
        self.load(module, prefix)
        try:
            yield module
        finally:
            module.to("meta")

    def load(self, module: torch.nn.Module, prefix: str) -> None:
        """Read the weights of `module`. Its buffers are there already."""
        for path, owner in module.named_modules():
            for name, parameter in owner.named_parameters(recurse=False):
                full = ".".join(part for part in (prefix, path, name) if part)
                if parameter.device.type == "meta":
                    value = torch.from_numpy(self._read(full).numpy().astype("float32"))
                    owner.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def _read(self, name: str) -> ir.TensorProtocol:
        source = self._sources.get(self.weight_name(name))
        if source is None:
            raise BuildError(f"{self.name}: the weight {name} is not in its files")
        return source

    def enter(self, batches: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """What the first layer takes for each batch of token ids `[B, T]`, and each layer's other arguments.

        The arguments are the same for all batches: positions, rotary tables and masks depend on the shape alone.
        """
        head = self.model.get_output_embeddings()
        for name, module in self.model.named_modules():
            if module is not head and not f"{name}.".startswith(f"{self.prefix}."):
                self._load_own(module, name)
        hidden: list[torch.Tensor] = []
        arguments: list[dict[str, Any]] = []
        with _recording(self.layers, hidden, arguments), torch.no_grad():
            for ids in batches:
                # The backbone alone: nothing wants logits of a model whose layers do nothing.
                self.model.base_model(input_ids=ids, use_cache=False)
        return hidden, arguments[: len(self.layers)]

    def _load_own(self, module: torch.nn.Module, prefix: str) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                value = torch.from_numpy(self._read(f"{prefix}.{name}" if prefix else name).numpy().astype("float32"))
                module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V]` of what the last layer gives."""
        head, norm = self.model.get_output_embeddings(), _final_norm(self.model, self.prefix)
        for module in (norm, head):
            if module is not None:
                self._load_own(module, next(name for name, other in self.model.named_modules() if other is module))
        with torch.no_grad():
            return head(norm(hidden) if norm is not None else hidden)


def run_layer(layer: torch.nn.Module, hidden: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
    """The layer's output for `hidden` `[B, T, H]`."""
    with torch.no_grad():
        result = layer(hidden, **arguments)
    return result[0] if isinstance(result, tuple) else result


@contextlib.contextmanager
def _recording(
    layers: torch.nn.ModuleList, hidden: list[torch.Tensor], arguments: list[dict[str, Any]]
) -> Iterator[None]:
    """Let every layer pass its input on and note its arguments; the first notes its input as well."""

    def make(index: int):
        def forward(*given: Any, **named: Any) -> Any:
            states = given[0] if given else named["hidden_states"]
            if index == 0:
                hidden.append(states)
            arguments.append({k: v for k, v in named.items() if k not in ("hidden_states", "past_key_values")})
            return states

        return forward

    kept = [layer.forward for layer in layers]
    for index, layer in enumerate(layers):
        layer.forward = make(index)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer, forward in zip(layers, kept, strict=True):
            layer.forward = forward  # type: ignore[method-assign]


def _decoder_layers(model: Any, name: str) -> tuple[str, torch.nn.ModuleList]:
    count = model.config.get_text_config().num_hidden_layers
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return path, module
    raise BuildError(
        f"{name}: no list of {count} decoder layers was found, so it cannot be calibrated; use method: rtn"
    )


def _final_norm(model: Any, prefix: str) -> torch.nn.Module | None:
    """The module right after the layers, in the backbone that holds them."""
    backbone = model.get_submodule(prefix.rpartition(".")[0]) if "." in prefix else model
    names = [name for name, _ in backbone.named_children()]
    later = names[names.index(prefix.rpartition(".")[2]) + 1 :]
    norms = [getattr(backbone, name) for name in later if "norm" in name or name.startswith("ln")]
    return norms[0] if norms else None
