"""`plancast plan`: the arithmetic of weights and KV, on configs alone."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer
from tiny_hf import CONFIG, tiny_weights
from typer.testing import CliRunner, Result

from builder.capacity import kv_bytes_per_token, plan_capacity, read_shape
from builder.capacity_cli import register
from runtime.errors import BuildError, PlancastError

SEVENTY_B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 28672, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return CliRunner().invoke(app, ["plan", *arguments])


def test_the_70b_example() -> None:
    full = read_shape(SEVENTY_B, "70b")
    assert kv_bytes_per_token(full, "f16") == 2_621_440  # 2.62 MB
    assert kv_bytes_per_token(full, "f16") * 4096 == pytest.approx(10.7e9, rel=0.01)
    grouped = read_shape({**SEVENTY_B, "num_key_value_heads": 8}, "70b")
    assert kv_bytes_per_token(grouped, "f16") * 8 == kv_bytes_per_token(full, "f16")
    # 2 * 8192^2 + 2 * 8192 * 1024 of attention, 3 * 8192 * 28672 of the MLP, two norms; embedding, head, last norm.
    assert (
        grouped.parameters
        == 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672 + 2 * 8192) + 2 * 32000 * 8192 + 8192
    )


def test_parameters_are_those_of_the_model() -> None:
    shape = read_shape(CONFIG, "tiny")
    assert shape.parameters == sum(weight.size for weight in tiny_weights().values())


def test_every_request_counted_fits_and_one_more_does_not() -> None:
    shape = read_shape(CONFIG, "tiny")
    found = plan_capacity(
        shape, memory=64_000_000, context=100, share=0.5, mean_tokens=33, weights="f32", block_size=16
    )
    assert found.weight_bytes == 4 * shape.parameters
    for fit in found.fits:
        left = 32_000_000 - found.weight_bytes
        for requests, tokens in ((fit.reserved, 100), (fit.paged_full, 112), (fit.paged_mean, 48)):
            # Blocks are whole: the last one's unused share is the only slack.
            assert requests * tokens * fit.bytes_per_token <= left
            assert (requests + 1) * tokens * fit.bytes_per_token > left - 16 * fit.bytes_per_token


def test_layers_without_attention_hold_no_kv() -> None:
    kinds = ["linear_attention", "full_attention"]
    config = {**CONFIG, "model_type": "llama", "layer_types": kinds}
    assert len(read_shape(config, "hybrid").layers) == 1


def test_formats_are_ordered_by_size() -> None:
    shape = read_shape(CONFIG, "tiny")
    sizes = [kv_bytes_per_token(shape, kv) for kv in ("f32", "f16", "int8", "fp8_e4m3", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_command_and_plot(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    plot = tmp_path / "plot.svg"
    result = run(
        str(tmp_path), "--memory", "1GB", "--context", "128", "--kv", "fp8", "--kv", "bf16", "--plot", str(plot)
    )
    assert result.exit_code == 0, result.exception
    assert "fp8_e4m3" in result.stdout
    assert len(ET.fromstring(plot.read_text()).findall(".//{*}polyline[@stroke-width='2']")) == 2
    value = json.loads(run(str(tmp_path / "config.json"), "--memory", "1GB", "--json").stdout)
    assert [fit["kv"] for fit in value["fits"]] == ["f32", "f16", "int8", "fp8_e4m3", "int4"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--kv", "int3"), "int3"),
        (("--weights", "q4"), "q4"),
        (("--memory", "lots"), "lots"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    error = run(str(tmp_path), *arguments).exception
    assert isinstance(error, PlancastError)
    assert text in str(error)


@pytest.mark.parametrize("change", [{"hidden_size": None}, {"num_hidden_layers": "two"}, {"model_type": "nonesuch"}])
def test_bad_configs_are_one_line(change: dict) -> None:
    config = {key: value for key, value in {**CONFIG, **change}.items() if value is not None}
    with pytest.raises(BuildError, match="tiny"):
        read_shape(config, "tiny")
