"""The GPU benchmark on a machine without a GPU: its arguments, its refusal, its inputs and its table."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the benchmark needs triton (pip install 'plancast[triton]')")

from bench import gpu  # noqa: E402


def test_list_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(gpu.MEASUREMENTS)
    assert all(len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(("arguments", "said"), [(["--only", "decod"], "decod"), (["--runs", "0"], "--runs is 0")])
def test_bad_arguments_are_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(arguments) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "measurements: decode" in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_one_line_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.gpu needs an NVIDIA GPU: ")


def test_the_decode_inputs_are_sound() -> None:
    """The pages that are timed hold the keys and values that the check computes with (kernels interpreted)."""
    # In f16: the interpreter multiplies the bits of bf16.
    cpu = torch.device("cpu")
    decode = gpu.make_decode(cpu, "int8", sequences=2, context=33, heads=2, kv_heads=1, dtype=torch.float16)
    exact = gpu.exact_attention(decode)
    error = (decode.run().float() - exact).abs().max() / exact.std()
    assert error < gpu._BOUNDS["int8"]
    assert decode.bytes == 2 * 33 * 2 * (128 + 2)


def test_the_table_marks_what_was_missed() -> None:
    rows = [gpu.Row("a", "1 x", ">= 2", False), gpu.Row("long name", "3", ok=True, note="why")]
    assert gpu.table(rows).splitlines() == [
        "measurement  value  goal          note",
        "a            1 x    >= 2  MISSED",
        "long name    3            met     why",
    ]
