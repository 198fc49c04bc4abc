"""Calibrated quantization of a checkpoint: layer after layer, each on what the quantized layers before it give.

A layer's result is kept on disk as soon as it is there, so a build that was interrupted goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from builder.quantization.folding import awq_scales, find_folds, proved, smooth_scales
from builder.quantization.gptq import gptq, output_error, quantize_clipped
from builder.quantization.mixed import Candidate, mean_bits, within_bits, within_kl
from builder.quantization.observe import InputGroup, find_flow, observe
from builder.quantization.scheme import Scheme, scheme_of
from builder.quantization.streaming import StreamedModel, run_layer
from builder.recipe import MixedConfig
from zoo.formats.side_file import SideFileWriter, read_side_file
from zoo.progress import Progress
from zoo.quantized import QuantizedRef, QuantizedWeight

if TYPE_CHECKING:
    from builder.recipe import WeightsConfig
    from zoo.checkpoint import Checkpoint

_BATCH = 8  # samples that run through a layer together
_DENSE = "dense.npz"
_DONE = "done.json"
_WIDE = "wide"
_MEASURED = 4  # samples over which the divergence of mixed weights is measured


@dataclass(slots=True)
class Calibrated:
    """What calibration made: quantized weights, and float weights that scales were folded into, by checkpoint name.

    `errors`: the relative squared error of each weight's output on the calibration text.
    """

    quantized: dict[str, QuantizedRef] = field(default_factory=dict)
    dense: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    wide: dict[str, QuantizedRef] = field(default_factory=dict)  # the same weights in 8 bits, for mixed precision
    candidates: list[Candidate] = field(default_factory=list)
    detail: str = ""

    def add(self, other: Calibrated) -> None:
        """Take over the weights of another part of the model."""
        for name in ("quantized", "dense", "errors", "wide"):
            getattr(self, name).update(getattr(other, name))
        self.candidates += other.candidates


def calibrate(
    checkpoint: Checkpoint,
    weights: WeightsConfig,
    samples: NDArray[np.int64],
    folder: Path,
    progress: Progress,
    *,
    trust_remote_code: bool = False,
) -> Calibrated:
    """Quantize the linear weights of the decoder layers of `checkpoint` as `weights` says.

    Args:
        samples: token ids `[samples, tokens]`.
        folder: keeps the layers' results; what lies there from an interrupted run is used.

    Raises:
        BuildError: the model has no decoder layers that can be run one by one, or groups do not divide a weight.
    """
    model = StreamedModel(checkpoint, trust_remote_code=trust_remote_code)
    # Batches of one size: the layers' masks and positions are made for it.
    size = next(size for size in range(min(_BATCH, len(samples)), 0, -1) if len(samples) % size == 0)
    batches = torch.from_numpy(samples).split(size)
    hidden, arguments = model.enter(batches)
    found = Calibrated()
    for index, layer in enumerate(model.layers):
        progress.update("calibrating layers", index, len(model.layers))
        prefix, place = model.layer_name(index), folder / f"layer-{index}"
        with model.loaded(layer, prefix):
            worker = _Layer(model, layer, prefix, weights, hidden, arguments[index])
            if not (place / _DONE).is_file():
                _save(worker.quantize(), place)
            result = _load(place)
            put_weights(model, layer, prefix, result.quantized, result.dense)
            hidden = [run_layer(layer, states, arguments[index]) for states in hidden]
        found.add(result)
    if weights.mixed != MixedConfig():
        _mix(found, weights.mixed, model, batches[0][:_MEASURED], progress)
    return found


def _mix(found: Calibrated, bounds: MixedConfig, model: StreamedModel, ids: torch.Tensor, progress: Progress) -> None:
    """Widen what the bounds ask for."""
    if bounds.max_bits is not None:
        widened, note = within_bits(found.candidates, bounds.max_bits), ""
    else:
        assert bounds.max_kl is not None
        progress.update("reading the reference", 0, None)
        reference = torch.log_softmax(_logits(model, ids, {}), -1)

        def measure(names: set[str]) -> float:
            progress.update(f"measuring with {len(names)} weights in 8 bits", 0, None)
            refs = found.quantized | {name: found.wide[name] for name in names}
            ours = torch.log_softmax(_logits(model, ids, refs, found.dense), -1)
            return float((reference.exp() * (reference - ours)).sum(-1).mean())

        widened, kl = within_kl(found.candidates, bounds.max_kl, measure)
        note = f", KL {kl:.2e} on the calibration text"
    found.quantized |= {name: found.wide[name] for name in widened}
    bits = mean_bits(found.candidates, widened)
    found.detail = f"{len(widened)} weights in 8 bits, {bits:.2f} bits on average{note}"


def _logits(
    model: StreamedModel,
    ids: torch.Tensor,
    refs: Mapping[str, QuantizedRef],
    dense: Mapping[str, NDArray[np.float32]] | None = None,
) -> torch.Tensor:
    """Logits `[B, T, V]` of the model with other weights in its layers."""
    hidden, arguments = model.enter([ids])
    (states,) = hidden
    for index, layer in enumerate(model.layers):
        prefix = model.layer_name(index)
        with model.loaded(layer, prefix):
            put_weights(model, layer, prefix, refs, dense or {})
            states = run_layer(layer, states, arguments[index])
    return model.finish(states)


def put_weights(
    model: StreamedModel,
    layer: torch.nn.Module,
    prefix: str,
    refs: Mapping[str, QuantizedRef],
    dense: Mapping[str, NDArray[np.float32]],
) -> None:
    """Give the layer's parameters the values that quantized and folded weights have."""
    with torch.no_grad():
        for path, parameter in layer.named_parameters():
            name = model.weight_name(f"{prefix}.{path}")
            if name in refs:
                parameter.copy_(torch.from_numpy(refs[name].load().dequantize()))
            elif name in dense:
                parameter.copy_(torch.from_numpy(dense[name]))


def calibration_key(weights: WeightsConfig, content: dict[str, str], samples: NDArray[np.int64]) -> str:
    """Names the results of one calibration: SHA-256 (hex) over everything that changes them."""
    sources = [(path.name, path.read_text()) for path in sorted(Path(__file__).parent.glob("*.py"))]
    text = hashlib.sha256(samples.tobytes()).hexdigest()
    facts = [msgspec.to_builtins(weights), content, text, sources, torch.__version__]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class _Result:
    """One layer's weights as they are made, before they are on disk."""

    made: dict[str, QuantizedWeight] = field(default_factory=dict)
    wide: dict[str, QuantizedWeight] = field(default_factory=dict)
    dense: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)


class _Layer:
    """One decoder layer, loaded, with what flows into it."""

    def __init__(
        self,
        model: StreamedModel,
        layer: torch.nn.Module,
        prefix: str,
        weights: WeightsConfig,
        hidden: list[torch.Tensor],
        arguments: dict[str, Any],
    ):
        self.model, self.layer, self.prefix, self.weights = model, layer, prefix, weights
        self.hidden, self.arguments = hidden, arguments

    def name(self, module: str, parameter: str = "weight") -> str:
        """The checkpoint's name of a module's parameter."""
        return self.model.weight_name(f"{self.prefix}.{module}.{parameter}")

    def run(self, states: torch.Tensor) -> torch.Tensor:
        return run_layer(self.layer, states, self.arguments)

    def run_first(self) -> torch.Tensor:
        return run_layer(self.layer, self.hidden[0][:1], self._one())

    def quantize(self) -> _Result:
        """Fold, then quantize group after group, each on what the groups before it give by now."""
        flow = find_flow(self.layer, self.run_first)
        schemes = {id(group): self._scheme(group) for group in flow.groups}
        result = _Result()
        if self.weights.method.startswith("awq") or self.weights.smooth is not None:
            observe(flow.groups, self.hidden, self.run)
            self._fold(flow, schemes, result)
        for group in flow.groups:
            scheme = schemes[id(group)]
            if scheme is None:
                continue
            observe([group], self.hidden, self.run)
            hessian = group.moments.hessian
            result.groups.append([self.name(name) for name in group.names])
            for name, module in zip(group.names, group.modules, strict=True):
                weight = module.weight.detach().numpy().copy()
                scheme.check(self.name(name), weight.shape[1])
                made = self._quantize(weight, hessian, scheme)
                approximation = made.dequantize()
                result.made[self.name(name)] = made
                result.errors[self.name(name)] = output_error(weight, approximation, hessian)
                if self.weights.mixed != MixedConfig() and scheme.dtype == "int4":
                    wide = quantize_clipped(weight, np.diag(hessian), Scheme("int8"))
                    result.wide[self.name(name)] = wide
                    result.gains[self.name(name)] = result.errors[self.name(name)] - output_error(
                        weight, wide.dequantize(), hessian
                    )
                module.weight.data.copy_(torch.from_numpy(approximation))
        return result

    def _scheme(self, group: InputGroup) -> Scheme | None:
        scheme = scheme_of(self.weights, [self.name(name) for name in group.names])
        return None if scheme.is_float else scheme

    def _quantize(self, weight: NDArray[np.float32], hessian: NDArray[np.float32], scheme: Scheme) -> QuantizedWeight:
        if self.weights.method.endswith("gptq") and scheme.dtype != "fp8":
            return gptq(weight, hessian, scheme, damping=self.weights.damping)
        return quantize_clipped(weight, np.diag(hessian), scheme)

    def _fold(self, flow: Any, schemes: dict[int, Scheme | None], result: _Result) -> None:
        """Move scales from the inputs into the weights, from the layer's end to its beginning: a weight that makes
        another's input is scaled by rows before its own columns are looked at."""
        pairs = [(tuple(group.modules), tensor) for group, tensor in zip(flow.groups, flow.inputs, strict=True)]
        by_modules = {tuple(group.modules): group for group in flow.groups}
        for fold in reversed(find_folds(self.layer, pairs, flow.outputs)):
            group = by_modules[tuple(fold.consumers)]
            scheme, moments = schemes[id(group)], group.moments
            if scheme is None or not proved(fold, self.run_first):
                continue
            if self.weights.smooth is not None:
                scales: NDArray[np.float32] | None = smooth_scales(fold, moments.peak, self.weights.smooth)
            else:
                scales = awq_scales(fold, moments.magnitude, moments.hessian, [scheme] * len(fold.consumers))
            if scales is None:
                continue
            fold.apply(scales)
            factor = torch.from_numpy(1 / scales)
            assert moments.product is not None
            moments.product.mul_(torch.outer(factor, factor))
        quantized = {f"{n}.weight" for group in flow.groups if schemes[id(group)] is not None for n in group.names}
        for name, parameter in self.layer.named_parameters():
            if name not in quantized:
                result.dense[self.model.weight_name(f"{self.prefix}.{name}")] = parameter.detach().numpy().copy()

    def _one(self) -> dict[str, Any]:
        """The layer's arguments for a single sample."""
        size = self.hidden[0].shape[0]

        def first(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == size and size > 1:
                return value[:1]
            return tuple(first(item) for item in value) if isinstance(value, tuple) else value

        return {name: first(value) for name, value in self.arguments.items()}


def _save(result: _Result, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    for folder, weights in ((place, result.made), (place / _WIDE, result.wide)):
        folder.mkdir(parents=True)
        writer = SideFileWriter(folder)
        for name, weight in weights.items():
            writer.add(name, weight)
        writer.close()
    np.savez(place / _DENSE, **result.dense)  # type: ignore[arg-type]
    (place / _DONE).write_text(json.dumps({"errors": result.errors, "gains": result.gains, "groups": result.groups}))


def _load(place: Path) -> Calibrated:
    done = json.loads((place / _DONE).read_text())
    narrow, wide = read_side_file(place), read_side_file(place / _WIDE)
    candidates = [
        Candidate(
            names=tuple(names),
            size=sum(narrow[name].shape[0] * narrow[name].shape[1] for name in names),
            narrow_bits=narrow[names[0]].format.bits,
            wide_bits=wide[names[0]].format.bits,
            gain=sum(done["gains"][name] for name in names),
        )
        for names in done["groups"]
        if all(name in wide for name in names)
    ]
    with np.load(place / _DENSE) as dense:
        return Calibrated(narrow, dict(dense), done["errors"], wide, candidates)


def keep_recent(root: Path, current: Path, count: int = 4) -> None:
    """Drop all but the `count` last used results under `root`; `current` stays."""
    others = sorted((p for p in root.iterdir() if p.is_dir() and p != current), key=lambda p: p.stat().st_mtime)
    for place in others[: max(0, len(others) - count + 1)]:
        shutil.rmtree(place, ignore_errors=True)
