"""The torch backend as a device that samples: the kernels, interpreted, give the host sampler's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from core_driver import Answer, Driver, make_request
from drafters import ANY_DRAFTS, DrawnFromTable
from tiny_artifact import tiny_manifest
from tiny_families import VOCAB_SIZE, open_tiny_checkpoint, write_tiny_checkpoint

pytest.importorskip("triton", reason="the kernels need triton (pip install 'plancast[triton]')")

from simulated_graph import SimulatedCapture

import plugins.torch_engine.sampling as torch_sampling
from builder.backends.torch import compile_engine, kv_layout
from builder.passes import run_passes
from builder.recipe import BackendConfig, KvConfig, Recipe, WeightsConfig
from builder.trace import trace
from runtime.artifact import Artifact
from runtime.artifact_writer import ArtifactWriter
from runtime.config import EngineConfig
from runtime.engine_core import EngineCore
from runtime.errors import PlancastError
from runtime.executor import DeviceExecutor
from runtime.executors import open_executor
from runtime.executors.torch import TorchDeviceExecutor, TorchExecutor
from runtime.manifest import Limits

LIMITS = Limits(max_context_len=64, max_num_seqs=6, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_tiny_checkpoint("llama-tied-bias", folder)
    ir.save(trace(open_tiny_checkpoint(folder), max_context_len=64), folder / "traced.onnx")
    return folder / "traced.onnx"


class _Poisoned(TorchExecutor):
    def poison(self, blocks: list[int]) -> None:
        """The driver's: NaNs into blocks that nobody owns."""
        for block in blocks:
            self.write_block(block, b"\xff" * self.kv_layout.bytes_per_block)


class _Host(_Poisoned):
    pass


class _Device(_Poisoned, TorchDeviceExecutor):
    pass


def build(traced: Path, folder: Path, kernels: str) -> Artifact:
    recipe = Recipe(
        name="tiny", model="tiny", backend=BackendConfig(name="torch"), weights=WeightsConfig(dtype="f32"),
        kv=KvConfig(key="f32", value="f32", block_size=16),
    )  # fmt: skip
    graph = run_passes(ir.load(traced), recipe)
    with ArtifactWriter(folder) as writer:
        info = compile_engine(graph, recipe, writer.path)
        info.properties["kernels"] = kernels
        writer.commit(tiny_manifest(backend=info, kv=kv_layout(graph, recipe), limits=LIMITS))
    return Artifact.open(folder, verify="full")


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 0},
    "unrestricted": {"temperature": 0.8},
    "top_k": {"temperature": 1.1, "top_k": 8, "logprobs": 3},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.2},
}


def answers(executor: _Poisoned, drafter: DrawnFromTable | None = None) -> dict[str, Answer]:
    config: dict[str, Any] = {"max_context_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 32, "num_blocks": 24}
    if drafter is not None:
        config["speculation"] = ANY_DRAFTS
    driver = Driver(EngineCore(executor, EngineConfig(**config), draft_engine=drafter))
    for i, (name, case) in enumerate(REQUESTS.items()):
        prompt = np.random.default_rng(i).integers(3, VOCAB_SIZE, 5).tolist()
        driver.add(make_request(name, prompt, greedy=False, seed=i, max_tokens=4, **case))
    found = driver.run()
    executor.close()
    return found


def check_equal(got: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert answer.error is None
        assert (got[name].tokens, got[name].error) == (answer.tokens, None), name
        for index, entries in answer.logprobs.items():
            for mine, theirs in zip(got[name].logprobs[index], entries, strict=True):
                assert (mine.token_ids, mine.ranks) == (theirs.token_ids, theirs.ranks), name
                np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("drafted", [False, True])
def test_answers_are_those_of_the_host(
    traced: Path, tmp_path: Path, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that the device samples beside one of the host's, whose logits alone are fetched; with drafts drawn."""
    artifact = build(traced, tmp_path / "engine", "reference")
    fetched: list[int] = []
    fetch = torch_sampling.fetch_rows
    monkeypatch.setattr(torch_sampling, "fetch_rows", lambda *a: (fetched.append(len(a[1])), fetch(*a)))
    rng = np.random.default_rng(1)
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for row in table:
        row[rng.choice(VOCAB_SIZE, 30, replace=False)] = rng.dirichlet(np.ones(30))
    drafters = [DrawnFromTable(table) if drafted else None for _ in range(2)]
    device = _Device(artifact)
    assert isinstance(device, DeviceExecutor)
    assert type(open_executor(artifact)) is TorchExecutor  # on a CPU the host samples
    assert not isinstance(open_executor(artifact), DeviceExecutor)
    got = answers(device, drafters[0])
    assert sum(fetched) > 0
    assert max(fetched) <= (4 if drafted else 1)  # of one request: its last token and up to three drafts
    check_equal(got, answers(_Host(artifact), drafters[1]))


def test_rows_of_captured_steps_are_sampled(traced: Path, tmp_path: Path) -> None:
    """Decodes by a graph, padded to a bucket, and the next one launched before the last is told."""
    artifact = build(traced, tmp_path / "engine", "triton")
    capture = SimulatedCapture()
    device = _Device(artifact, capture=capture)
    got = answers(device)
    assert capture.launches > 0
    check_equal(got, answers(_Host(artifact)))


def test_a_closed_executor_launches_nothing(traced: Path, tmp_path: Path) -> None:
    device = TorchDeviceExecutor(build(traced, tmp_path / "engine", "reference"))
    device.close()
    with pytest.raises(PlancastError, match="closed"):
        device.allocate(2)
