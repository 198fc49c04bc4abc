"""From a config to an ONNX graph without weights: model on no memory, `torch.export`, `torch.onnx.export`."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from builder.tracing import attention
from runtime.errors import BuildError, PlancastError

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

OPSET = 23  # the fusions to RMSNormalization and RotaryEmbedding exist for this opset exactly


def instantiate(config: Any, *, trust_remote_code: bool) -> torch.nn.Module:
    """The model of `config` in f32, its parameters on the meta device, its buffers (rotary frequencies) real.

    Raises:
        BuildError: transformers has no causal language model for this config, or cannot make it.
    """
    import accelerate
    import torch
    from transformers import AutoModelForCausalLM

    from builder.tracing import experts

    attention.register()
    experts.register()
    config = copy.deepcopy(config)  # from_config does not copy: two models would share one attention setting
    config.use_cache = False
    try:
        with accelerate.init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention.IMPLEMENTATION,
                experts_implementation=experts.IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
            )
    except (ValueError, ImportError, AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise BuildError(
            f"transformers cannot make a causal language model of type {config.model_type!r}: {_first_line(error)}"
        ) from error
    model.eval()
    model.tie_weights()
    return model


def capture(model: torch.nn.Module) -> ir.Model:
    """Trace `model` over flat tokens: input_ids, position_ids `i64[T]`, logits_rows `i64[R]` -> logits `f32[R, V]`.

    The weights become graph inputs that bear their names: they have no value, and so an optimizer cannot fold them.

    Raises:
        BuildError: the model cannot be traced.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from plugins.paged_attention.torch_op import translation_table

    fake_mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=True))
    _replace_parameters(model, fake_mode)
    with fake_mode:
        example = (
            torch.zeros(7, dtype=torch.int64),
            torch.zeros(7, dtype=torch.int64),
            torch.zeros(3, dtype=torch.int64),
        )
    tokens, rows = torch.export.Dim("T", min=2), torch.export.Dim("R", min=2)
    try:
        with attention.mask_tags(model), torch.no_grad(), _quiet():
            program = torch.export.export(
                _flat_model(model), example, dynamic_shapes=({0: tokens}, {0: tokens}, {0: rows}), strict=False
            )
            onnx_program = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                custom_translation_table=translation_table(),
            )
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, PlancastError):
                raise cause from error
        raise BuildError(
            f"{type(model).__name__} cannot be traced: {_first_line(error)}; "
            "see docs/families.md for the models that can be built"
        ) from error
    assert onnx_program is not None
    traced = onnx_program.model
    _expose_weights(traced)
    return traced


def _flat_model(model: torch.nn.Module) -> torch.nn.Module:
    """`model` over flat tokens: one sequence, as far as it can tell; attention alone knows where sequences end."""
    import torch

    class FlatModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_rows: torch.Tensor
        ) -> torch.Tensor:
            output = self.model(
                input_ids=input_ids[None], position_ids=position_ids[None], logits_to_keep=logits_rows, use_cache=False
            )
            return output.logits[0]

    return FlatModel()


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
