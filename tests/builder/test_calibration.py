"""GPTQ, AWQ and SmoothQuant: the arithmetic against plain references, and whole models layer by layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_hf import CONTEXT, LAYERS, write_tiny_hf
from transformers import AutoModelForCausalLM

from builder.quantization import calibrate as calibration
from builder.quantization import rounding
from builder.quantization.calibrate import calibrate, calibration_key
from builder.quantization.gptq import best_grid, gptq, output_error, quantize_clipped
from builder.quantization.mixed import Candidate, mean_bits, within_bits, within_kl
from builder.quantization.scheme import Scheme
from builder.quantization.streaming import StreamedModel, run_layer
from builder.quantization.text import TEXT, read_samples
from builder.recipe import CalibrationConfig, MixedConfig, WeightOverride, WeightsConfig
from runtime.errors import BuildError
from zoo.checkpoint import Checkpoint, open_folder
from zoo.progress import Silent
from zoo.quantized import RANGES

SCHEMES = [Scheme("int4", 16, False), Scheme("int4", 16), Scheme("int4"), Scheme("int8"), Scheme("int8", 32, False)]


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A weight, and the second moments of strongly correlated inputs of very different size."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((500, 12)) @ rng.standard_normal((12, 64)) + 0.3 * rng.standard_normal((500, 64))
    inputs *= np.exp(rng.standard_normal(64))
    weight = rng.standard_normal((24, 64)).astype(np.float32)
    return weight, (inputs.T @ inputs / 500).astype(np.float32)


def by_elimination(weight: np.ndarray, hessian: np.ndarray, scheme: Scheme, damping: float) -> np.ndarray:
    """GPTQ as its paper derives it: after each column, the inverse of what is left, by Gaussian elimination, in f64."""
    scale, zero = best_grid(weight, np.diag(hessian), scheme)
    left, moments = weight.astype(np.float64), hessian.astype(np.float64)
    moments = moments + damping * np.diag(moments).mean() * np.eye(len(moments))
    inverse = np.linalg.inv(moments)
    result = np.empty_like(left)
    for column in np.argsort(-np.diag(hessian), kind="stable"):
        at = column // (scheme.group or weight.shape[1])
        zeros = None if zero is None else zero[:, at]
        rounded = rounding.nearest(left[:, column].astype(np.float32), scale[:, at], zeros, scheme)
        result[:, column] = rounding.restored(rounded, scale[:, at], zeros)
        error = (left[:, column] - result[:, column]) / inverse[column, column]
        left -= np.outer(error, inverse[column])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return result


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_is_what_its_paper_derives(scheme: Scheme) -> None:
    weight, hessian = problem()
    found = gptq(weight, hessian, scheme, damping=0.01, refinements=0).dequantize()
    wanted = by_elimination(weight, hessian, scheme, 0.01)
    # f32 against f64: a value on the edge between two steps may fall on either side.
    assert (np.abs(found - wanted) > 1e-4).mean() < 0.02
    assert output_error(weight, found, hessian) == pytest.approx(
        output_error(weight, wanted.astype(np.float32), hessian), rel=0.1
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_disturbs_the_output_less_than_rounding(scheme: Scheme) -> None:
    weight, hessian = problem(1)
    plain = output_error(weight, rounding.quantize(weight, scheme).dequantize(), hessian)
    ours = output_error(weight, gptq(weight, hessian, scheme).dequantize(), hessian)
    assert ours < 0.7 * plain


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_refined_numbers_are_the_best_that_each_can_be(scheme: Scheme) -> None:
    """Nearer than plain GPTQ; and in the end no number's neighbours on its grid are better, tried one by one."""
    weight, hessian = problem(2)
    damped = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian), dtype=np.float32)
    plain, found, final = (gptq(weight, hessian, scheme, refinements=count) for count in (0, 2, 50))
    errors = [output_error(weight, made.dequantize(), damped) for made in (plain, found, final)]
    assert errors[0] > errors[1] >= errors[2]
    low, high = RANGES[final.kind]
    for row in range(0, 24, 6):
        for column in range(64):
            for step in (-1, 1):
                values = final.values.astype(np.int16)
                values[row, column] = np.clip(values[row, column] + step, low, high)
                other = dataclasses.replace(final, values=values.astype(final.values.dtype)).dequantize()
                assert output_error(weight[[row]], other[[row]], damped) >= (1 - 1e-4) * output_error(
                    weight[[row]], final.dequantize()[[row]], damped
                )


def test_independent_inputs_leave_nothing_to_make_up_for() -> None:
    weight, _ = problem()
    scheme = Scheme("int4", 16, False)
    identity = np.eye(64, dtype=np.float32)
    np.testing.assert_array_equal(
        gptq(weight, identity, scheme).values, quantize_clipped(weight, np.ones(64), scheme).values
    )


def test_inputs_that_are_always_zero_and_singular_moments() -> None:
    weight, hessian = problem()
    hessian[:5] = hessian[:, :5] = 0
    found = gptq(weight, hessian, Scheme("int4", 16)).dequantize()
    assert np.isfinite(found).all()
    one = np.outer(np.ones(64), np.ones(64)).astype(np.float32)
    assert np.isfinite(gptq(weight, one, Scheme("int4", 16)).dequantize()).all()
    assert np.isfinite(gptq(weight, np.zeros_like(one), Scheme("int4", 16)).dequantize()).all()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny model with weights as small as a trained one's (with larger ones a small error becomes another model),
    and embeddings that lie near eight directions, so that what flows is as correlated as in a trained one."""
    folder = write_tiny_hf(tmp_path_factory.mktemp("model"))
    path = folder / "model.safetensors"
    weights = {name: weight / 8 if weight.ndim == 2 else 1 + weight / 4 for name, weight in load_file(path).items()}
    table, rng = weights["model.embed_tokens.weight"], np.random.default_rng(3)
    low = rng.standard_normal((len(table), 8)) @ rng.standard_normal((8, table.shape[1])) / 8
    weights["model.embed_tokens.weight"] = (low + table / 4).astype(np.float32)
    save_file(weights, path)
    return open_folder(folder, name="tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()


def tokens(checkpoint: Checkpoint, samples: int = 6) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 400, (samples, 48))


def test_layer_by_layer_is_the_model(checkpoint: Checkpoint, model: torch.nn.Module) -> None:
    ids = torch.from_numpy(tokens(checkpoint))
    streamed = StreamedModel(checkpoint, trust_remote_code=False)
    hidden, arguments = streamed.enter([ids])
    states = hidden[0]
    for index, layer in enumerate(streamed.layers):
        with streamed.loaded(layer, streamed.layer_name(index)):
            states = run_layer(layer, states, arguments[index])
        assert all(parameter.device.type == "meta" for parameter in layer.parameters())
    with torch.no_grad():
        wanted = model(ids).logits
    torch.testing.assert_close(streamed.finish(states), wanted, rtol=1e-4, atol=1e-3)


def replaced(model: torch.nn.Module, found: calibration.Calibrated) -> torch.nn.Module:
    """The model with what calibration made of its weights."""
    import copy

    changed = copy.deepcopy(model)
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, dense in found.dense.items():
            parameters[name].copy_(torch.from_numpy(dense))
        for name, ref in found.quantized.items():
            parameters[name].copy_(torch.from_numpy(ref.load().dequantize()))
    return changed


def distance(one: torch.nn.Module, other: torch.nn.Module, ids: np.ndarray) -> float:
    with torch.no_grad():
        ours, theirs = (torch.log_softmax(m(torch.from_numpy(ids)).logits, -1) for m in (one, other))
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())


@pytest.mark.parametrize("method", ["gptq", "awq", "awq+gptq"])
def test_calibrated_models_are_nearer_than_rounded_ones(
    method: str, checkpoint: Checkpoint, model: torch.nn.Module, tmp_path: Path
) -> None:
    ids = tokens(checkpoint, 24)
    weights = WeightsConfig(dtype="int4", method=method)  # type: ignore[arg-type]
    found = calibrate(checkpoint, weights, ids, tmp_path / "ours", Silent())
    assert len(found.quantized) == 7 * LAYERS
    rounded = {
        name: rounding.quantize(parameter.detach().numpy(), Scheme("int4", 32, False)).dequantize()
        for name, parameter in model.named_parameters()
        if name in found.quantized
    }
    plain = replaced(model, calibration.Calibrated(dense=rounded))
    fresh = np.random.default_rng(9).integers(0, 400, (4, 48))
    assert distance(replaced(model, found), model, fresh) < 0.95 * distance(plain, model, fresh)


def test_folded_scales_change_nothing_but_the_grids(
    checkpoint: Checkpoint, model: torch.nn.Module, tmp_path: Path
) -> None:
    """SmoothQuant's scales are large here: a wrong one would give another model, not one a little less near."""
    weights = WeightsConfig(dtype="int8", smooth=0.5)
    found = calibrate(checkpoint, weights, tokens(checkpoint), tmp_path / "smooth", Silent())
    norm = "model.layers.0.input_layernorm.weight"
    assert np.abs(found.dense[norm] / dict(model.named_parameters())[norm].detach().numpy() - 1).max() > 0.1
    plain = {
        name: rounding.quantize(parameter.detach().numpy(), Scheme("int8")).dequantize()
        for name, parameter in model.named_parameters()
        if name in found.quantized
    }
    rounded = distance(replaced(model, calibration.Calibrated(dense=plain)), model, tokens(checkpoint))
    smoothed = distance(replaced(model, found), model, tokens(checkpoint))
    assert smoothed < 2 * rounded


def test_overrides_and_skipped_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    override = WeightOverride(match="*.down_proj.*", dtype="int8")
    weights = WeightsConfig(dtype="int4", method="awq", overrides=(override,), skip=("*.0.self_attn.v_proj.*",))
    found = calibrate(checkpoint, weights, tokens(checkpoint), tmp_path / "mixed", Silent())
    assert {ref.format.kind for name, ref in found.quantized.items() if "down_proj" in name} == {"int8"}
    # What shares an input with a skipped weight is merged with it, and so is skipped too.
    assert not any(".0.self_attn.q" in name for name in found.quantized)
    assert "model.layers.0.self_attn.v_proj.weight" in found.dense  # its rows may carry o_proj's scales


class Interrupting(Silent):
    """Ends the second layer."""

    def update(self, task: str, done: int, total: int | None) -> None:
        if done == 1:
            raise KeyboardInterrupt


def test_an_interrupted_calibration_goes_on_where_it_was(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, ids = WeightsConfig(dtype="int4", method="gptq"), tokens(checkpoint)
    whole = calibrate(checkpoint, weights, ids, tmp_path / "whole", Silent())
    with pytest.raises(KeyboardInterrupt):
        calibrate(checkpoint, weights, ids, tmp_path / "parts", Interrupting())
    calls: list[int] = []
    monkeypatch.setattr(calibration, "gptq", lambda *a, **k: calls.append(1) or gptq(*a, **k))
    found = calibrate(checkpoint, weights, ids, tmp_path / "parts", Silent())
    assert len(calls) == 7 * (LAYERS - 1)
    for name, ref in whole.quantized.items():
        np.testing.assert_array_equal(ref.load().values, found.quantized[name].load().values)


def test_groups_that_do_not_divide(checkpoint: Checkpoint, tmp_path: Path) -> None:
    weights = WeightsConfig(dtype="int4", method="gptq", group_size=64)
    with pytest.raises(BuildError, match=r"down_proj.weight has 96 columns.*32, channel"):
        calibrate(checkpoint, weights, tokens(checkpoint), tmp_path / "bad", Silent())


def test_samples_cover_the_text(checkpoint: Checkpoint, tmp_path: Path) -> None:
    samples = read_samples(CalibrationConfig(samples=8, tokens=64), checkpoint.folder, max_context_len=CONTEXT)
    assert samples.shape == (8, 64)
    assert len({tuple(row) for row in samples.tolist()}) == 8
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(BuildError, match=r"short.txt holds \d+ tokens"):
        read_samples(CalibrationConfig(text=str(short)), checkpoint.folder, max_context_len=CONTEXT)
    with pytest.raises(BuildError, match="cannot be read"):
        read_samples(CalibrationConfig(text=str(tmp_path / "none")), checkpoint.folder, max_context_len=CONTEXT)


def test_the_key_names_everything_that_matters() -> None:
    base, ids = WeightsConfig(dtype="int4", method="gptq"), np.zeros((1, 8), np.int64)
    keys = {
        calibration_key(base, {"w": "1"}, ids),
        calibration_key(base, {"w": "2"}, ids),
        calibration_key(base, {"w": "1"}, ids + 1),
        calibration_key(WeightsConfig(dtype="int4", method="awq"), {"w": "1"}, ids),
    }
    assert len(keys) == 4


def test_calibration_reads_nothing_that_is_measured_on() -> None:
    from builder.parity import TEXT as MEASURED

    ours = {line for line in TEXT.read_text().splitlines() if len(line) > 30}
    theirs = {line for line in MEASURED.read_text().splitlines() if len(line) > 30}
    assert not ours & theirs


def candidates() -> list[Candidate]:
    gains = (0.1, 0.4, 0.2, 0.3)
    return [Candidate((f"w{i}", f"v{i}"), 100 * (i + 1), 4.5, 8.0, gain) for i, gain in enumerate(gains)]


def test_a_size_bound_buys_what_is_worth_most() -> None:
    widened = within_bits(candidates(), 6.0)
    # Worth by size: 1: 0.002, 0: 0.001, 3: 0.00075, 2: 0.00067; 300 of 1,000 fit beside, then 400 do not.
    assert widened == {"w1", "v1", "w0", "v0"}
    assert 4.5 < mean_bits(candidates(), widened) <= 6.0
    with pytest.raises(BuildError, match=r"max_bits is 4.2, and int4 alone takes 4.50"):
        within_bits(candidates(), 4.2)


def test_a_quality_bound_widens_no_more_than_it_needs() -> None:
    asked: list[int] = []

    def measure(names: set[str]) -> float:
        asked.append(len(names) // 2)
        return 0.5 - 0.1 * (len(names) // 2)

    widened, kl = within_kl(candidates(), 0.31, measure)
    assert widened == {"w1", "v1", "w0", "v0"}
    assert kl == pytest.approx(0.3)
    assert len(asked) <= 4
    with pytest.raises(BuildError, match=r"is 0\.1;"):
        within_kl(candidates(), 0.05, measure)


def test_mixed_precision_on_a_model(checkpoint: Checkpoint, model: torch.nn.Module, tmp_path: Path) -> None:
    ids = tokens(checkpoint)
    plain = calibrate(checkpoint, WeightsConfig(dtype="int4", method="awq"), ids, tmp_path / "plain", Silent())
    bound = 0.5 * distance(replaced(model, plain), model, ids[:4])
    weights = WeightsConfig(dtype="int4", method="awq", mixed=MixedConfig(max_kl=bound))
    found = calibrate(checkpoint, weights, ids, tmp_path / "mixed", Silent())
    kinds = [ref.format.kind for ref in found.quantized.values()]
    assert {"int8", "uint4"} == set(kinds)
    assert distance(replaced(model, found), model, ids[:4]) <= bound * 1.01
    for layer in range(LAYERS):  # what is merged into one product stays together
        names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
        assert len({found.quantized[name].format for name in names}) == 1
