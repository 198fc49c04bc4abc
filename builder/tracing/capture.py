"""From a config to an ONNX graph without weights: model on no memory, `torch.export`, `torch.onnx.export`."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from builder.tracing import attention
from builder.tracing.translate import to_onnx
from runtime.errors import BuildError, PlancastError

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

    from builder.drafts.head import EagleHead, HeadLayer
    from builder.recipe import Task


def instantiate(config: Any, *, trust_remote_code: bool, task: Task = "generate") -> torch.nn.Module:
    """The model of `config` in f32, its parameters on the meta device, its buffers (rotary frequencies) real.

    With the task "embed" it is the base model, which ends in the last hidden state and has no head.

    Raises:
        BuildError: transformers has no such model for this config, or cannot make it.
    """
    import accelerate
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from builder.tracing import experts

    attention.register()
    experts.register()
    config = copy.deepcopy(config)  # from_config does not copy: two models would share one attention setting
    config.use_cache = False
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            model = (AutoModel if task == "embed" else AutoModelForCausalLM).from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention.IMPLEMENTATION,
                experts_implementation=experts.IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, ImportError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise BuildError(
            f"transformers cannot make a {'base' if task == 'embed' else 'causal language'} model of type "
            f"{config.model_type!r}: {_first_line(error)}"
        ) from error
    model.eval()
    model.tie_weights()
    return model


def capture(model: torch.nn.Module, task: Task = "generate") -> ir.Model:
    """Trace `model` over flat tokens: input_ids, position_ids `i64[T]`, logits_rows `i64[R]` -> logits `f32[R, V]`.

    With the task "embed": -> the last hidden states `f32[R, H]`.

    The weights become graph inputs that bear their names: they have no value, and so an optimizer cannot fold them.

    Raises:
        BuildError: the model cannot be traced.
    """
    return _export(model, _flat_model(model, task), None)


def capture_head(head: EagleHead) -> ir.Model:
    """Trace a head over flat slots: input_ids, position_ids `i64[T]`, logits_rows `i64[R]`, hidden_states `f32[T, H]`
    -> logits `f32[R, D]` and the outputs `f32[R, H]` that they were read off. See `capture`."""
    return _export(head, _flat_head(head), head.config.hidden_size)


def _export(model: torch.nn.Module, flat: torch.nn.Module, hidden_size: int | None) -> ir.Model:
    """Trace `flat`, which runs `model` over flat tokens; `hidden_size`: of the hidden states that it takes, if any."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fake_mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True))
    _replace_parameters(model, fake_mode)
    with fake_mode:
        example = [torch.zeros(length, dtype=torch.int64) for length in (7, 7, 3)]
        if hidden_size is not None:
            example.append(torch.zeros(7, hidden_size))
    tokens, rows = torch.export.Dim("T", min=2), torch.export.Dim("R", min=2)
    shapes = ({0: tokens}, {0: tokens}, {0: rows}, {0: tokens})[: len(example)]
    try:
        with attention.mask_tags(model), torch.no_grad(), _quiet(), _no_garbage_collection():
            program = torch.export.export(flat, tuple(example), dynamic_shapes=shapes, strict=False)
            traced = to_onnx(program).model
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, PlancastError):
                raise cause from error
        raise BuildError(
            f"{type(model).__name__} cannot be traced: {_first_line(error)}; "
            "see docs/families.md for the models that can be built"
        ) from error
    _expose_weights(traced)
    return traced


def _flat_model(model: torch.nn.Module, task: Task) -> torch.nn.Module:
    """`model` over flat tokens: one sequence, as far as it can tell; attention alone knows where sequences end."""
    import torch

    class FlatModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_rows: torch.Tensor
        ) -> torch.Tensor:
            batch = {"input_ids": input_ids[None], "position_ids": position_ids[None], "use_cache": False}
            if task == "embed":
                return self.model(**batch).last_hidden_state[:, logits_rows, :][0]
            return self.model(**batch, logits_to_keep=logits_rows).logits[0]

    return FlatModel()


def _flat_head(head: EagleHead) -> torch.nn.Module:
    """`head` over flat slots, attending through our operator."""
    import torch

    def attend(layer: HeadLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scaling = head.config.head_size**-0.5
        return attention.attention(layer, q, k, v, attention.MaskTag(0), scaling=scaling)[0]

    attends = [functools.partial(attend, layer) for layer in head.layers]

    class FlatHead(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = head

        def forward(
            self,
            input_ids: torch.Tensor,
            position_ids: torch.Tensor,
            logits_rows: torch.Tensor,
            hidden_states: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = self.model(input_ids[None], hidden_states[None], head.rope(position_ids[None]), attends)
            picked = outputs[:, logits_rows, :][0]
            return head.lm_head(picked), picked

    return FlatHead()


def _replace_parameters(model: torch.nn.Module, fake_mode: Any) -> None:
    """Meta parameters become fake CPU tensors (a meta weight beside a CPU buffer is an error). Ties stay tied."""
    import torch

    fakes: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in fakes:
                with fake_mode:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                    fakes[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
            module._parameters[name] = fakes[id(parameter)]
    # Old parameters must outlive the loop above: an id is reused once its object is gone.


def _expose_weights(traced: ir.Model) -> None:
    """Fake initializers become valueless graph inputs, named without the wrapper's `model.`."""
    from torch._subclasses.fake_tensor import FakeTensor

    graph = traced.graph
    for name, value in list(graph.initializers.items()):
        if isinstance(getattr(value.const_value, "raw", None), FakeTensor):
            del graph.initializers[name]
            value.const_value = None
            value.name = name.removeprefix("model.")
            graph.inputs.append(value)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A capture makes millions of small objects that live to its end: looking for garbage among them is idle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what the exporter says about itself: it is not for the person who builds."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
