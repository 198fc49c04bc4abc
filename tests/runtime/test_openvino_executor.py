"""The OpenVINO executor: the tiny decoder through real artifacts, held against the same model in NumPy."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from openvino_engine import Sequences, build_artifact, recipe, relative_error, skip_unless_computed
from tiny_artifact import tiny_manifest, write_tiny_artifact
from tiny_onnx import TinyOnnx

from plugins import native
from runtime.artifact import Artifact
from runtime.config import EngineConfig
from runtime.engine_process import EngineSpec, open_engine
from runtime.errors import ArtifactError, PlancastError
from runtime.executor import Executor
from runtime.executors import open_executor
from runtime.executors import openvino as executor_module
from runtime.executors.openvino import OpenVINOExecutor
from runtime.manifest import BackendInfo

TINY = TinyOnnx()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Artifact:
    native.build_native()
    return build_artifact(tmp_path_factory.mktemp("engines") / "tiny", TINY, recipe())


@pytest.fixture
def executor(artifact):
    executor = OpenVINOExecutor(artifact)
    yield executor
    executor.close()


def compare(executor, tiny: TinyOnnx, tolerance: float) -> None:
    """Prompts, chunks, decodes and a verification, mixed, on scattered blocks, against NumPy."""
    sequences = Sequences(4, 120, vocab_size=tiny.vocab_size)
    executor.allocate(sequences.num_blocks)
    caches = tiny.caches(sequences.num_blocks)
    steps = [{0: 7}, {1: 40, 0: 1}, {0: 1, 1: 1, 2: 33}, {0: 5, 1: 1, 2: 31, 3: 64}, {3: 1, 0: 1}, {2: 1, 1: 30}]
    for advance in steps:
        batch = sequences.batch(advance, every_row=len(advance) == 2)
        logits = executor.run(batch)
        assert logits.dtype == np.float32
        assert logits.shape == (len(batch.logits_rows), tiny.vocab_size)
        assert relative_error(logits, tiny.step(batch, caches)) < tolerance, advance


def test_is_an_executor(executor):
    assert isinstance(executor, Executor)
    assert executor.vocab_size == TINY.vocab_size
    assert executor.num_blocks == 0
    assert executor.kv_layout.bytes_per_block == 2 * TINY.layers * TINY.num_kv_heads * TINY.head_size * 32 * 4


def test_an_engine_is_warm_before_it_is_ready(artifact, monkeypatch):
    steps = []
    run = OpenVINOExecutor.run
    monkeypatch.setattr(OpenVINOExecutor, "run", lambda self, batch: steps.append(batch) or run(self, batch))
    config = EngineConfig(max_context_len=64, max_num_seqs=2, max_num_batched_tokens=64, num_blocks=8)
    engine = open_engine(EngineSpec(config=config, artifact=str(artifact.path)))
    try:
        assert [len(step.token_ids) for step in steps] == [1]
        assert engine.core.kv.pool.num_free == 8
    finally:
        engine.close()


def test_equals_the_model(executor):
    compare(executor, TINY, 1e-4)


def test_each_step_reads_its_own_numbers(executor):
    """Steps of sizes that come again, of one that is too large to keep, and of a batch that was changed in place."""
    sequences = Sequences(3, 200, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    caches = TINY.caches(sequences.num_blocks)
    for advance in [{0: 1}, {1: 1}, {2: 40}, {0: 1}, {0: 2}, {1: 40}, {1: 1, 2: 1}, {0: 2}, {2: 1}, {0: 1, 1: 1}]:
        batch = sequences.batch(advance, every_row=True)
        assert relative_error(executor.run(batch), TINY.step(batch, caches)) < 1e-4, advance
        batch.token_ids = (batch.token_ids + 1) % TINY.vocab_size  # the same cells again
        assert relative_error(executor.run(batch), TINY.step(batch, caches)) < 1e-4, advance


# Bounds: twice the largest error seen.
@pytest.mark.parametrize(
    ("compute", "kv", "weights", "tolerance"),
    [
        ("f32", "f16", "f32", 0.01),
        ("f32", "int8", "f32", 0.1),
        ("f32", "f32", "bf16", 1e-4),
        ("f32", "f32", "int8", 8e-4),  # our Linear rounds activations to 15 bits or so
        ("bf16", "bf16", "bf16", 0.1),
        ("bf16", "int8", "int8", 0.15),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_each_precision_from_either_form(tmp_path, compute, kv, weights, tolerance, compiled):
    skip_unless_computed(compute)
    native.build_native()
    tiny = TinyOnnx(weights=weights)
    executor = open_executor(build_artifact(tmp_path / "tiny", tiny, recipe(compute, kv, weights, blob=compiled)))
    # Products with weights in f32 are OpenVINO's alone.
    assert executor.load_source == ("ir" if not compiled else "blob" if weights == "f32" else "plan")
    compare(executor, tiny, tolerance)


# Bounds: twice the largest error seen.
@pytest.mark.parametrize(
    ("compute", "kv", "tolerance"),
    [
        ("f32", "f32", 1e-4),
        ("f32", "bf16", 0.03),
        ("f32", "int8:int4", 1.0),
        ("f32", "fp8_e4m3", 0.5),
        ("f32", "fp8_e5m2", 0.8),
        ("bf16", "f16", 0.1),
    ],
)
def test_our_own_attention(tmp_path, compute, kv, tolerance):
    """Formats, and pairs of them with a compute dtype, that OpenVINO's operation does not have."""
    skip_unless_computed(compute)
    native.build_native()
    executor = open_executor(build_artifact(tmp_path / "tiny", TINY, recipe(compute, kv)))
    assert executor.load_source == "blob"
    compare(executor, TINY, tolerance)


@pytest.mark.parametrize("attributes", [{"softcap": 2.0}, {"softcap": 2.0, "sliding_window": 21}])
def test_softcap(tmp_path, attributes):
    tiny = TinyOnnx(attributes=attributes)
    compare(open_executor(build_artifact(tmp_path / "tiny", tiny, recipe())), tiny, 1e-4)


@pytest.mark.parametrize("attention", ["native", "openvino"])
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "int8:int4"])
def test_a_rejected_speculation_leaves_nothing_behind(tmp_path, kv, attention):
    """Verify five tokens, take none of them, go on: to the bit as if they had never been tried."""
    if attention == "openvino" and kv not in ("f32", "f16", "int8"):
        pytest.skip("OpenVINO's operation does not have this format")
    executor = open_executor(build_artifact(tmp_path / "tiny", TINY, recipe("f32", kv, attention=attention)))
    results = []
    for speculate in (False, True):
        sequences = Sequences(2, 80, vocab_size=TINY.vocab_size)
        executor.allocate(sequences.num_blocks)
        executor.run(sequences.batch({0: 30, 1: 3}))
        if speculate:
            draft = sequences.batch({0: 6}, every_row=True)
            draft.token_ids[1:] = (draft.token_ids[1:] + 1) % TINY.vocab_size
            executor.run(draft)
            sequences.lengths[0] -= 5  # its own token stands, the five drafted ones go
        else:
            executor.run(sequences.batch({0: 1}))
        results.append([executor.run(sequences.batch(step)).copy() for step in ({0: 3, 1: 1}, {0: 20}, {0: 1})])
    for clean, after in zip(*results, strict=True):
        # OpenVINO's operation rounds a row in another way where others stand beside it.
        np.testing.assert_allclose(after, clean, atol=0 if attention == "native" else 1e-4, rtol=0)


@pytest.mark.parametrize("kv", ["f16", "int8"])
def test_without_the_library_openvino_attends(tmp_path, monkeypatch, kv):
    artifact = build_artifact(tmp_path / "tiny", TINY, recipe("f32", kv, blob=False))
    monkeypatch.setattr(executor_module, "find_native", lambda: None)
    executor = open_executor(artifact)
    compare(executor, TINY, 0.1)
    # OpenVINO's int8 cells have 8 bytes of scales, ours 2; the block pool is told.
    more = 2 * TINY.layers * TINY.num_kv_heads * 32 * (6 if kv == "int8" else 0)
    assert executor.kv_layout.bytes_per_block == artifact.manifest.kv.bytes_per_block + more


def test_without_the_library_what_only_it_can_do_is_refused(tmp_path, monkeypatch):
    artifact = build_artifact(tmp_path / "tiny", TINY, recipe("f32", "int4", blob=False))
    monkeypatch.setattr(executor_module, "find_native", lambda: None)
    with pytest.raises(
        ArtifactError, match=r"KV cache int4.*our C\+\+ operators are not built here: python -m plugins"
    ):
        open_executor(artifact)


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_packed_blocks_are_copied_and_swapped_whole(tmp_path, kv):
    """A fork by copy-on-write and a block that was swapped out go on to the bit as their originals."""
    executor = open_executor(build_artifact(tmp_path / "tiny", TINY, recipe("f32", kv)))
    sequences = Sequences(1, 60, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    executor.run(sequences.batch({0: 40}))
    saved = executor.read_block(int(sequences.tables[0][0]))
    expected = executor.run(sequences.batch({0: 1})).copy()
    spare = [block for block in range(sequences.num_blocks) if block not in sequences.tables[0]]
    for block in (sequences.tables[0][0], spare[0]):
        executor.write_block(int(block), bytes(len(saved)))
    executor.write_block(spare[0], saved)
    sequences.lengths[0] -= 1
    batch = sequences.batch({0: 1})
    batch.copies = [(int(batch.block_ids[1]), spare[1])]
    batch.block_ids = np.array(spare[:2], np.int32)
    np.testing.assert_array_equal(executor.run(batch), expected)


@pytest.mark.parametrize("rope", ["halves", "interleaved"])
def test_rotary_embedding_survives_the_artifact(tmp_path, rope):
    tiny = TinyOnnx(rope=rope)
    compare(open_executor(build_artifact(tmp_path / "tiny", tiny, recipe())), tiny, 1e-4)


def test_ir_and_blob_give_the_same_logits(artifact, monkeypatch):
    from_blob = OpenVINOExecutor(artifact)
    assert from_blob.load_source == "blob"
    monkeypatch.setattr(executor_module, "find_native", lambda: None)
    from_ir = OpenVINOExecutor(artifact)
    assert from_ir.load_source == "ir"
    results = []
    for executor in (from_blob, from_ir):
        sequences = Sequences(2, 50, vocab_size=TINY.vocab_size)
        executor.allocate(sequences.num_blocks)
        results.append([executor.run(sequences.batch(step)).copy() for step in ({0: 40, 1: 3}, {0: 1, 1: 1})])
    for left, right in zip(*results, strict=True):  # without the library, attention is OpenVINO's
        np.testing.assert_allclose(left, right, atol=1e-4)


def test_a_blob_that_openvino_refuses_falls_back_to_ir(artifact, tmp_path):
    folder = tmp_path / "copy"
    build_artifact(folder, TINY, recipe())
    blob = bytearray((folder / "engine.blob").read_bytes())
    blob[blob.index(b"isa=") : blob.index(b"isa=") + 12] = b"isa=ABACUS 1"  # as if made for another CPU
    (folder / "engine.blob").write_bytes(blob)
    executor = OpenVINOExecutor(Artifact.open(folder))
    assert executor.load_source == "ir"
    compare(executor, TINY, 1e-4)


def test_the_number_of_threads_is_chosen_at_load(artifact):
    for asked in (1, 2):
        executor = OpenVINOExecutor(artifact, num_threads=asked)
        assert executor.load_source == "blob"
        assert executor.num_threads == asked
        assert executor._request.get_compiled_model().get_property("INFERENCE_NUM_THREADS") == asked


def test_no_rows_wanted_gives_no_logits(executor):
    sequences = Sequences(1, 40, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    caches = TINY.caches(sequences.num_blocks)
    batch = sequences.batch({0: 33})
    batch.logits_rows = np.zeros(0, np.int64)
    TINY.step(batch, caches)
    assert executor.run(batch).shape == (0, TINY.vocab_size)
    batch = sequences.batch({0: 1})
    assert relative_error(executor.run(batch), TINY.step(batch, caches)) < 1e-4


def test_copies_come_before_the_pass_and_in_order(executor):
    """A fork: the copy holds what its source held, however much the source's block changes afterwards."""
    sequences = Sequences(2, 40, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    caches = TINY.caches(sequences.num_blocks)
    prompt = sequences.batch({0: 20})
    executor.run(prompt)
    TINY.step(prompt, caches)
    sequences.lengths[1] = 20
    source, target = int(sequences.tables[0][0]), int(sequences.tables[1][0])
    spare = next(b for b in range(sequences.num_blocks) if not any(b in table for table in sequences.tables))
    batch = sequences.batch({0: 1, 1: 1})
    batch.copies = [(source, spare), (spare, target)]
    assert relative_error(executor.run(batch), TINY.step(batch, caches)) < 1e-4
    batch = sequences.batch({1: 3, 0: 2}, every_row=True)
    assert relative_error(executor.run(batch), TINY.step(batch, caches)) < 1e-4


def test_a_block_swapped_out_comes_back_anywhere(executor):
    sequences = Sequences(1, 60, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    caches = TINY.caches(sequences.num_blocks)
    prompt = sequences.batch({0: 40})
    executor.run(prompt)
    TINY.step(prompt, caches)
    old, new = int(sequences.tables[0][0]), next(b for b in range(sequences.num_blocks) if b not in sequences.tables[0])
    saved = executor.read_block(old)
    assert len(saved) == executor.kv_layout.bytes_per_block
    executor.write_block(old, bytes(len(saved)))
    executor.write_block(new, saved)
    expected = TINY.step(sequences.batch({0: 1}), caches)
    sequences.lengths[0] -= 1
    sequences.tables[0][0] = new
    assert relative_error(executor.run(sequences.batch({0: 1})), expected) < 1e-4


def test_allocating_again_replaces_the_cache(executor):
    executor.allocate(3)
    executor.allocate(50)
    assert executor.num_blocks == 50
    compare(executor, TINY, 1e-4)


def test_memory_that_is_not_there_is_refused_with_the_numbers(executor):
    executor.allocate(2)
    with pytest.raises(PlancastError, match=r"1099511627776 blocks takes .* TiB, and .* are free"):
        executor.allocate(1 << 40)
    assert executor.num_blocks == 2
    with pytest.raises(PlancastError, match="at least one block, not 0"):
        executor.allocate(0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_ids", 10_000, r"block_ids must lie in 0\.\."),
        ("block_ids", -1, "block_ids must lie in"),
        ("token_ids", 97, r"token_ids must lie in 0\.\.96"),
        ("token_ids", -1, "token_ids must lie in"),
    ],
)
def test_ids_out_of_range_do_not_reach_the_engine(executor, field, value, message):
    sequences = Sequences(1, 40, vocab_size=TINY.vocab_size)
    executor.allocate(sequences.num_blocks)
    batch = sequences.batch({0: 33})
    getattr(batch, field)[0] = value
    with pytest.raises(ValueError, match=message):
        executor.run(batch)


def test_bad_blocks_are_refused(executor):
    executor.allocate(4)
    with pytest.raises(ValueError, match=r"block ids must lie in 0\.\.3, not 4"):
        executor.read_block(4)
    with pytest.raises(ValueError, match=r"a block has .* bytes, and 3 were given"):
        executor.write_block(0, b"abc")


def test_before_allocate_and_after_close(artifact):
    executor = OpenVINOExecutor(artifact)
    batch = Sequences(1, 40, vocab_size=TINY.vocab_size).batch({0: 3})
    with pytest.raises(PlancastError, match="allocate first"):
        executor.run(batch)
    executor.close()
    executor.close()
    with pytest.raises(PlancastError, match="closed"):
        executor.run(batch)


def test_a_manifest_that_lies_about_the_cache_is_refused(tmp_path):
    folder = tmp_path / "tiny"
    artifact = build_artifact(folder, TINY, recipe())
    layers = tuple(msgspec.structs.replace(layer, key_head_size=8) for layer in artifact.manifest.kv.layers)
    artifact.manifest.kv = msgspec.structs.replace(artifact.manifest.kv, layers=layers)
    with pytest.raises(ArtifactError, match=r"a KV block has 16384 bytes in the engine and 12288 in the manifest"):
        OpenVINOExecutor(artifact)


def test_an_engine_that_is_none_is_refused(tmp_path):
    folder = write_tiny_artifact(tmp_path / "tiny")
    with pytest.raises(ArtifactError, match=r"OpenVINO does not load the engine .* rebuild it: plancast build"):
        open_executor(Artifact.open(folder))


def test_bf16_is_refused_where_the_cpu_lacks_it(tmp_path, monkeypatch):
    artifact = build_artifact(tmp_path / "tiny", TINY, recipe("bf16", "bf16"))
    real = executor_module.OpenVINOEngine

    class OldCpu(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.core = type("Core", (), {"get_property": lambda *_: ["FP32", "INT8"]})()

    monkeypatch.setattr(executor_module, "OpenVINOEngine", OldCpu)
    with pytest.raises(ArtifactError, match=r"computes in bf16, which this CPU does not \(it has FP32, INT8\)"):
        OpenVINOExecutor(artifact)


def test_an_unknown_backend_has_no_executor(artifact):
    manifest = tiny_manifest(backend=BackendInfo(name="abacus", version="1", engine="engine.xml"))
    with pytest.raises(ArtifactError, match="'abacus' has no executor"):
        open_executor(Artifact(artifact.path, manifest))
