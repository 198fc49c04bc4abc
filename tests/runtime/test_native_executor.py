"""Engines run by the C++ library alone: to the bit what OpenVINO's runtime makes of the same artifact."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from native_library import require_native
from openvino_engine import Sequences, build_artifact, recipe
from tiny_onnx import TinyOnnx

from runtime.artifact import Artifact
from runtime.config import EngineConfig
from runtime.engine_process import EngineSpec, open_engine
from runtime.errors import ArtifactError, PlancastError
from runtime.executor import Executor
from runtime.executors import open_executor
from runtime.executors.native import NativeExecutor
from runtime.executors.openvino import OpenVINOExecutor

require_native()

TINY = TinyOnnx(weights="int8", rope="halves")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    return build_artifact(tmp_path_factory.mktemp("engines") / "tiny", TINY, recipe(kv="int8", weights="int8"))


@pytest.fixture
def executor(artifact):
    executor = open_executor(artifact)
    yield executor
    executor.close()


def test_is_an_executor_of_a_plan(executor):
    assert isinstance(executor, Executor)
    assert isinstance(executor, NativeExecutor)
    assert (executor.load_source, executor.notes, executor.num_blocks) == ("plan", (), 0)
    assert executor.vocab_size == TINY.vocab_size
    assert executor.load_seconds > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_gives_openvinos_bits(artifact, threads):
    """Prompts, chunks, decodes and verifications of sizes that come and go, with a fork and a swap."""
    ours, theirs = open_executor(artifact, num_threads=threads), OpenVINOExecutor(artifact, num_threads=threads)
    assert ours.num_threads == threads
    assert theirs.load_source == "ir"
    results = []
    for executor in (ours, theirs):
        sequences = Sequences(3, 120, vocab_size=TINY.vocab_size)
        executor.allocate(sequences.num_blocks)
        executor.warm_up()
        given = []
        for advance in [
            {0: 7},
            {1: 40, 0: 1},
            {0: 1, 1: 1, 2: 33},
            {0: 5},
            {1: 1, 2: 64},
            {2: 1, 0: 1},
            {0: 1},
            {1: 3},
        ]:
            given.append(executor.run(sequences.batch(advance, every_row=len(advance) == 1)).copy())
        spare = next(b for b in range(sequences.num_blocks) if not any(b in table for table in sequences.tables))
        batch = sequences.batch({0: 1})
        batch.copies = [(int(batch.block_ids[0]), spare)]
        batch.block_ids = np.array([spare, *batch.block_ids[1:]], np.int32)
        given.append(executor.run(batch).copy())
        saved = executor.read_block(spare)
        assert len(saved) == executor.kv_layout.bytes_per_block
        executor.write_block(int(sequences.tables[0][0]), saved)
        given.append(executor.run(sequences.batch({0: 1})).copy())
        batch = sequences.batch({1: 2})
        batch.logits_rows = np.zeros(0, np.int64)
        given.append(executor.run(batch).copy())
        given.append(executor.run(sequences.batch({1: 1})).copy())
        results.append(given)
    for got, expected in zip(*results, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)
    assert len(results[0][-2]) == 0


def test_an_engine_opens_on_it(artifact):
    config = EngineConfig(max_context_len=64, max_num_seqs=2, max_num_batched_tokens=64, num_blocks=8)
    engine = open_engine(EngineSpec(config=config, artifact=str(artifact.path)))
    try:
        assert engine.ready.load_source == "plan"
        assert engine.ready.notes == []
        assert engine.core.kv.pool.num_free == 8
    finally:
        engine.close()


@pytest.mark.parametrize("program", [False, True])
def test_a_plan_that_does_not_fit_is_made_anew(artifact, tmp_path, program):
    folder = tmp_path / "copy"
    shutil.copytree(artifact.path, folder)
    path = folder / "engine.plan"
    data = path.read_bytes()
    if program:
        data = data.replace(b";attend ", b";attind ")
    path.write_bytes(data if program else b"another" + data[7:])
    executor = open_executor(Artifact.open(folder))
    assert isinstance(executor, NativeExecutor)
    assert executor.load_source == "ir"
    (note,) = executor.notes
    assert ("attind" if program else "not a plan") in note
    assert "rebuild it: plancast build" in note
    results = []
    for each in (executor, open_executor(artifact)):
        sequences = Sequences(1, 40, vocab_size=TINY.vocab_size)
        each.allocate(sequences.num_blocks)
        results.append(each.run(sequences.batch({0: 33}, every_row=True)).copy())
    np.testing.assert_array_equal(*results)


def test_a_plan_of_another_cpu_loads(artifact):
    """Only a blob hangs on the CPU's features."""
    hardware = msgspec.structs.replace(artifact.manifest.hardware, isa=["avx9000"])
    manifest = msgspec.structs.replace(artifact.manifest, hardware=hardware)
    assert open_executor(Artifact(artifact.path, manifest)).load_source == "plan"


def test_a_manifest_that_lies_about_the_cache_is_refused(artifact):
    layers = tuple(msgspec.structs.replace(layer, key_head_size=8) for layer in artifact.manifest.kv.layers)
    kv = msgspec.structs.replace(artifact.manifest.kv, layers=layers)
    manifest = msgspec.structs.replace(artifact.manifest, kv=kv)
    with pytest.raises(ArtifactError, match=r"a KV block has \d+ bytes in the engine and \d+ in the manifest"):
        open_executor(Artifact(artifact.path, manifest))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_ids", 10_000, r"block_ids must lie in 0\.\."),
        ("block_ids", -1, "block_ids must lie in"),
        ("token_ids", TINY.vocab_size, r"token_ids must lie in 0\.\."),
        ("token_ids", -1, "token_ids must lie in"),
    ],
)
def test_ids_out_of_range_do_not_reach_the_library(executor, field, value, message):
    sequences = Sequences(1, 40, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    batch = sequences.batch({0: 33})
    getattr(batch, field)[0] = value
    with pytest.raises(ValueError, match=message):
        executor.run(batch)


def test_before_allocate_and_after_close(artifact):
    executor = open_executor(artifact)
    batch = Sequences(1, 40, vocab_size=TINY.vocab_size).batch({0: 3})
    with pytest.raises(PlancastError, match="allocate first"):
        executor.run(batch)
    executor.close()
    executor.close()
    with pytest.raises(PlancastError, match="closed"):
        executor.run(batch)
    with pytest.raises(PlancastError, match="closed"):
        executor.allocate(2)


def test_memory_that_is_not_there_is_refused_with_the_numbers(executor):
    executor.allocate(2)
    with pytest.raises(PlancastError, match=r"1099511627776 blocks takes .* TiB, and .* are free"):
        executor.allocate(1 << 40)
    assert executor.num_blocks == 2


def test_an_engine_that_embeds(tmp_path: Path):
    """Its vectors through the plan are those of OpenVINO's runtime."""
    from tiny_build import plancast_home, tiny_recipe, tiny_workshop

    from builder.build import build

    workshop = tiny_workshop()
    with plancast_home(workshop / "home"):
        asked = tiny_recipe(workshop / "model", task="embed", weights={"dtype": "int8"}, parity={"enabled": False})
        artifact = Artifact.open(build(asked, tmp_path / "artifact"))
    ours, theirs = open_executor(artifact), OpenVINOExecutor(artifact)
    assert isinstance(ours, NativeExecutor)
    assert ours.vocab_size == theirs.vocab_size == artifact.manifest.model.vocab_size
    results = []
    for executor in (ours, theirs):
        sequences = Sequences(2, 60, vocab_size=ours.vocab_size)
        executor.allocate(sequences.num_blocks)
        results.append(executor.run(sequences.batch({0: 33, 1: 5}, every_row=True)).copy())
    np.testing.assert_array_equal(*results)
    assert artifact.manifest.embedding is not None
    assert results[0].shape[1] == artifact.manifest.embedding.size
    embedding = msgspec.structs.replace(artifact.manifest.embedding, size=7)
    manifest = msgspec.structs.replace(artifact.manifest, embedding=embedding)
    with pytest.raises(ArtifactError, match=r"a hidden state has .* entries in the engine and 7 in the manifest"):
        open_executor(Artifact(artifact.path, manifest))
