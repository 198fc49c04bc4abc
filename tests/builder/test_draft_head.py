"""A head from nothing but its target: training, weights on disk, its engine in the artifact, drafts with it."""

from __future__ import annotations

import functools
import json
import shutil
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_build import plancast_home, tiny_recipe, tiny_workshop

from builder.drafts.config import DraftTraining
from runtime.errors import PlancastError
from runtime.llm import LLM
from runtime.sampling_params import SamplingParams

CONFIG = DraftTraining(
    kind="head",
    corpus_tokens=800,
    max_question=8,
    max_answer=24,
    batch_requests=8,
    held_out_every=4,
    vocab_size=512,
    steps=20,
    batch_tokens=256,
    evaluate_every=4,
    warmup=3,
    learning_rate=3e-3,
    passes=2,
)


class Watcher:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def corpus(self, tokens: int) -> None: ...

    def features(self, files: int) -> None: ...

    def step(self, step: int, loss: float, acceptance: Any) -> None:
        self.steps.append(step)
        self.losses.append(loss)


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@functools.cache
def trained() -> tuple[Path, Watcher]:
    """A folder with `head`, and `artifact` built with it."""
    from builder.build import build
    from builder.drafts.make import train_draft

    workshop = tiny_workshop()
    folder, watcher = workshop / "with-head", Watcher()
    recipe = tiny_recipe(workshop / "model")
    with plancast_home(workshop / "home"):
        train_draft(recipe, workshop / "artifact", folder / "work", folder / "head", CONFIG, watcher, 1)
        build(tiny_recipe(workshop / "model", draft_head=str(folder / "head")), folder / "artifact")
    return folder, watcher


def test_a_head_is_trained_and_built_into_its_targets_artifact() -> None:
    folder, watcher = trained()
    assert watcher.steps == list(range(21))
    assert sum(watcher.losses[-3:]) < sum(watcher.losses[1:4])
    facts = json.loads((folder / "head" / "head.json").read_text())
    assert len(facts["target_ids"]) == 512
    assert "--kind head" in (folder / "head" / "README.md").read_text()
    manifest = json.loads((folder / "artifact" / "manifest.json").read_text())
    assert manifest["draft_head"]["name"] == "head"
    assert {"head.xml", "head.bin", "head.vocabulary.json"} <= manifest["files"].keys()


def test_greedy_text_is_the_same_with_a_head() -> None:
    folder, _ = trained()
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (1, 7, 40)]
    texts = []
    for config in ("off", "eagle", {"method": "eagle", "adaptive": False, "num_speculative_tokens": 4}):
        with LLM(folder / "artifact", speculative_config=config, num_blocks=64) as llm:
            texts.append([result.outputs[0].token_ids for result in llm.generate(prompts, GREEDY)])
            stats = llm.stats()
    assert texts[0] == texts[1] == texts[2]
    assert stats.spec_decode_num_draft_tokens > 0


def test_fewer_steps_than_there_were_write_the_best_so_far(tmp_path: Path) -> None:
    import msgspec

    from builder.drafts.make import train_draft

    folder, _ = trained()
    workshop, watcher = tiny_workshop(), Watcher()
    config = msgspec.structs.replace(CONFIG, steps=8)
    with plancast_home(workshop / "home"):
        train_draft(
            tiny_recipe(workshop / "model"),
            workshop / "artifact",
            folder / "work",
            tmp_path / "head",
            config,
            watcher,
            1,
        )
    assert watcher.steps == []
    weights = [(path / "head.safetensors").read_bytes() for path in (folder / "head", tmp_path / "head")]
    assert weights[0] == weights[1]


@functools.cache
def of_two_layers() -> Path:
    """A folder with `head`, which is random, and `artifact` built with it."""
    import msgspec
    import torch

    from builder.build import build
    from builder.drafts.head import EagleHead
    from builder.drafts.head_file import find_head, read_shape, save_head

    one_layer = find_head(str(trained()[0] / "head"))
    shape = msgspec.structs.replace(read_shape(one_layer), num_layers=2)
    workshop = tiny_workshop()
    folder = workshop / "with-two-layers"
    torch.manual_seed(0)
    facts = msgspec.structs.replace(one_layer.facts, shape=msgspec.structs.asdict(shape))
    save_head(EagleHead(shape), facts, folder / "head", "")
    with plancast_home(workshop / "home"):
        build(tiny_recipe(workshop / "model", draft_head=str(folder / "head")), folder / "artifact")
    return folder


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_engine_computes_what_the_head_does(num_layers: int) -> None:
    """Slots fed in chunks and a draft on top, against the torch module over the whole text."""
    import torch

    from builder.drafts.head import UnrolledAttention
    from builder.drafts.head_file import find_head, load_head
    from runtime.artifact import Artifact
    from runtime.executor import StepBatch
    from runtime.executors import open_executor
    from zoo import open_folder

    folder = trained()[0] if num_layers == 1 else of_two_layers()
    head = load_head(find_head(str(folder / "head")), open_folder(tiny_workshop() / "model", name="tiny"))
    rng = np.random.default_rng(0)
    length, width = 40, head.config.hidden_size
    ids, states = rng.integers(0, 300, length), rng.standard_normal((length, width)).astype(np.float32)
    with torch.no_grad():
        rope = head.rope(torch.arange(length)[None])
        attends = [UnrolledAttention() for _ in head.layers]
        outputs = head(torch.from_numpy(ids)[None], torch.from_numpy(states)[None], rope, attends)[0]
        wanted = head.lm_head(outputs)
    view = Artifact.open(folder / "artifact").draft_head()
    assert view is not None
    executor = open_executor(view, num_threads=1)
    executor.allocate(4)
    assert len(executor.kv_layout.layers) == num_layers
    got, hidden = [], []
    for start, end in ((0, 33), (33, 39), (39, 40)):
        count = end - start
        blocks = np.array([2, 0][: -(-end // 32)], np.int32)
        batch = StepBatch(
            token_ids=ids[start:end],
            positions=np.arange(start, end),
            past_lens=np.array([start], np.int32),
            query_starts=np.array([0, count], np.int32),
            block_ids=blocks,
            block_starts=np.array([0, len(blocks)], np.int32),
            max_context_len=end,
            logits_rows=np.arange(count),
            hidden_states=states[start:end],
        )
        got.append(executor.run(batch).copy())
        hidden.append(executor.hidden_states.copy())  # type: ignore[attr-defined]
    executor.close()
    # Embedding and reading rows are int8 in the engine, and f32 here.
    for made, meant in ((np.concatenate(hidden), outputs.numpy()), (np.concatenate(got), wanted.numpy())):
        error = np.sqrt(((made - meant) ** 2).mean(axis=1))
        assert error.max() < 0.05 * meant.std()


def test_the_library_alone_computes_what_openvino_does() -> None:
    from draft_batches import draft_batch

    from runtime.artifact import Artifact
    from runtime.executors import open_executor
    from runtime.executors.native import NativeExecutor
    from runtime.executors.openvino import OpenVINOExecutor

    folder, _ = trained()
    head = Artifact.open(folder / "artifact").draft_head()
    assert head is not None
    ours, theirs = open_executor(head, num_threads=2), OpenVINOExecutor(head, num_threads=2)
    assert isinstance(ours, NativeExecutor), "fell back"
    assert ours.load_source == "plan"
    assert (ours.kv_layout, ours.vocab_size) == (theirs.kv_layout, theirs.vocab_size)
    with pytest.raises(PlancastError, match="allocate"):
        ours.run(draft_batch([(0, 1)], width=64))
    for executor in (ours, theirs):
        executor.allocate(9)
    for seed, parts in enumerate(([(0, 40)], [(40, 1)], [(41, 3), (0, 33), (0, 1)], [(41, 1), (33, 1)])):
        batch = draft_batch(parts, width=64, seed=seed)
        expected, got = theirs.run(batch), ours.run(batch)
        assert got.shape == expected.shape == (len(batch.logits_rows), 512)
        # OpenVINO's own norm, of what stands before the blocks, rounds in other places.
        for index, (made, meant) in enumerate(((got, expected), (ours.hidden_states, theirs.hidden_states))):
            assert np.abs(made - meant).max() <= 1e-3 * meant.std(), index
    assert any(ours.read_block(0))
    ours.write_block(8, ours.read_block(0))
    assert ours.read_block(8) == ours.read_block(0)
    with pytest.raises(ValueError, match="token_ids must lie in"):
        ours.run(draft_batch([(0, 1)], width=64, token_id=10**6))
    ours.close()
    theirs.close()


def test_a_pass_over_one_sequence_is_that_of_a_batch() -> None:
    from draft_batches import draft_batch

    from runtime.artifact import Artifact
    from runtime.executors import open_executor

    head = Artifact.open(trained()[0] / "artifact").draft_head()
    assert head is not None
    batched, single = (open_executor(head, num_threads=2) for _ in range(2))
    for executor in (batched, single):
        executor.allocate(40)
    for seed, (past, new) in enumerate([(0, 3), (3, 1), (4, 1), (5, 20), (25, 9), (34, 1)]):
        batch = draft_batch([(past, new)], width=64, seed=seed)
        logits = batched.run(batch)
        blocks = array("i", batch.block_ids.tolist())
        one = single.one_sequence(new, len(blocks))  # type: ignore[attr-defined]
        one.run(array("i", batch.token_ids.tolist()), past, blocks, batch.hidden_states)
        assert np.array_equal(one.logits, logits[-1])
        assert np.array_equal(one.hidden_states, batched.hidden_states[-1:])  # type: ignore[attr-defined]
    assert single.one_sequence(33, 2) is None, "no room"  # type: ignore[attr-defined]
    single.run(draft_batch([(0, 33), (0, 2)], width=64))  # makes room
    batch = draft_batch([(0, 33)], width=64)
    one = single.one_sequence(33, 2)  # type: ignore[attr-defined]
    one.run(array("i", batch.token_ids.tolist()), 0, array("i", [0, 1]), batch.hidden_states)
    assert np.array_equal(one.logits, batched.run(batch)[-1])
    for executor in (batched, single):
        executor.close()


def test_one_sequence_is_drafted_for_as_many_are() -> None:
    """Alone, without a batch put together for each pass, a request gets the same drafts."""
    from core_driver import make_request

    from runtime.artifact import Artifact
    from runtime.config import EngineConfig
    from runtime.engine_core import EngineCore
    from runtime.executors import open_executor
    from runtime.sampler import Sampler
    from runtime.speculation.config import parse_speculation
    from runtime.speculation.head_engine import HeadEngine
    from runtime.speculation.opening import open_draft

    artifact = Artifact.open(trained()[0] / "artifact")
    speculation = parse_speculation({"method": "eagle", "adaptive": False, "num_speculative_tokens": 4})
    drafted: list[list[list[int]]] = []
    for alone in (True, False):
        target = open_executor(artifact, num_threads=1)
        draft = open_draft(speculation, artifact, open_executor, {"num_threads": 1})
        assert draft is not None
        sampler = Sampler(target.vocab_size, ())
        engine = draft.engine(speculation, sampler, 1024, caching=False)
        assert isinstance(engine, HeadEngine)
        assert engine._one_sequence is not None
        if not alone:
            engine._one_sequence = None
        found: list[list[int]] = []
        propose = engine.propose

        def noted(wanted: Any, propose: Any = propose, found: Any = found) -> Any:
            drafts = propose(wanted)
            found += [list(draft.token_ids) for draft in drafts if draft is not None]
            return drafts

        engine.propose = noted  # type: ignore[method-assign]
        config = EngineConfig.from_manifest(artifact.manifest, num_blocks=64, speculation=speculation)
        core = EngineCore(target, config, sampler=sampler, draft_engine=engine)
        core.add_request(make_request("long", list(range(3, 30)), max_tokens=60))
        core.add_request(make_request("short", [7, 8, 9], max_tokens=10))
        core.add_request(make_request("biased", [9, 8, 7], max_tokens=80, logit_bias={5: 2.0}))
        while core.has_work():
            core.step()
        drafted.append(found)
        target.close()
        draft.executor.close()
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) > 20


def test_a_head_for_another_model_is_refused(tmp_path: Path) -> None:
    import msgspec

    from builder.build import build
    from builder.drafts.head import EagleHead, HeadConfig
    from builder.drafts.head_file import HeadFacts, save_head

    shape = HeadConfig(
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        num_kv_heads=2,
        head_size=16,
        vocab_size=64,
        target_vocab_size=512,
    )
    facts = HeadFacts(target="another", shape=msgspec.structs.asdict(shape), target_ids=list(range(64)))
    save_head(EagleHead(shape), facts, tmp_path / "head", "")
    recipe = tiny_recipe(tiny_workshop() / "model", draft_head=str(tmp_path / "head"))
    with (
        plancast_home(tiny_workshop() / "home"),
        pytest.raises(PlancastError, match=r"made for another, of 512 tokens and hidden size 32; .* and 64: train a"),
    ):
        build(recipe, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


def test_no_such_head_is_named() -> None:
    from builder.drafts.head_file import find_head

    with pytest.raises(PlancastError, match=r"no head 'nothing': looked for .*plancast draft train --kind head"):
        find_head("nothing")


def test_eagle_without_a_head_says_how_to_get_one() -> None:
    with pytest.raises(PlancastError, match=r"has no head to draft with .*draft_head"):
        LLM(tiny_workshop() / "artifact", speculative_config="eagle")


def test_shipped_heads_are_whole_and_small() -> None:
    from builder.drafts.head import EagleHead
    from builder.drafts.head_file import HEADS, find_head, read_shape, read_weights

    folders = [path.parent for path in HEADS.glob("*/head.json")]
    assert folders, "a head ships"
    for folder in folders:
        found = find_head(folder.name)
        assert found.path == folder
        assert sum(path.stat().st_size for path in folder.iterdir()) < 8 << 20
        head = EagleHead(read_shape(found))
        read_weights(head, found)
        assert len(found.facts.target_ids) == head.config.vocab_size
        card = (folder / "README.md").read_text()
        assert "plancast draft train" in card
        assert f"seed {found.facts.training['seed']}" in card


def test_training_goes_on_from_a_head(tmp_path: Path) -> None:
    """With steps of no length the weights are the old head's, read off other tokens."""
    import msgspec
    from safetensors.numpy import load_file

    from builder.drafts.make import train_draft

    folder, _ = trained()
    workshop = tiny_workshop()
    recipe = tiny_recipe(workshop / "model")
    for num_layers, out in ((1, tmp_path / "head"), (2, tmp_path / "two")):
        config = msgspec.structs.replace(
            CONFIG,
            seed=1,
            steps=1,
            vocab_size=480,
            learning_rate=1e-12,
            num_layers=num_layers,
            start_head=str(folder / "head"),
        )
        with plancast_home(workshop / "home"):
            train_draft(recipe, workshop / "artifact", tmp_path / f"work-{num_layers}", out, config, Watcher(), 1)
        old, new = (load_file(path / "head.safetensors") for path in (folder / "head", out))
        further = {name for name in new if name.startswith("layers.1.")}
        assert old.keys() == new.keys() - further
        assert len({name.removesuffix(".scale") for name in further}) == (9 if num_layers == 2 else 0)
        for name in old:
            np.testing.assert_allclose(new[name], old[name], rtol=1e-6, atol=1e-9)
    assert len({path.stat().st_mode for path in (tmp_path / "head").iterdir()}) == 1
    card = (tmp_path / "two" / "README.md").read_text()
    assert f"--start-head {folder / 'head'}" in card
    assert "--layers 2" in card
    assert "2 decoder layers" in card
    with pytest.raises(PlancastError, match="--kind head"):
        DraftTraining(kind="model", start_head="x")


def test_further_layers_say_what_the_head_before_them_says(tmp_path: Path) -> None:
    """A deeper head begins exactly where the one that it starts from is, one of before layers were numbered, too."""
    import msgspec
    import torch
    from safetensors.numpy import load_file, save_file

    from builder.drafts.head import EagleHead, unroll
    from builder.drafts.head_file import find_head, read_shape, read_weights

    found = find_head(str(trained()[0] / "head"))
    shutil.copytree(found.path, tmp_path / "old")
    flat = {name.removeprefix("layers.0."): value for name, value in load_file(found.path / "head.safetensors").items()}
    save_file(flat, tmp_path / "old" / "head.safetensors")
    facts = json.loads((tmp_path / "old" / "head.json").read_text())
    del facts["shape"]["num_layers"]
    (tmp_path / "old" / "head.json").write_text(json.dumps(facts))
    shape, said = read_shape(found), []
    tables = [torch.randn(rows, shape.hidden_size) for rows in (shape.target_vocab_size, shape.vocab_size)]
    ids, states = torch.randint(0, shape.target_vocab_size, (2, 20)), torch.randn(2, 20, shape.hidden_size)
    for source, num_layers in ((found, 1), (found, 2), (find_head(str(tmp_path / "old")), 3)):
        head = EagleHead(msgspec.structs.replace(shape, num_layers=num_layers))
        head.adopt(*tables)
        read_weights(head, source)
        with torch.no_grad():
            said.append(torch.stack(unroll(head, ids, states, 3)))
    assert torch.equal(said[0], said[1])
    assert torch.equal(said[0], said[2])


def test_a_start_that_cannot_be_is_told_before_the_corpus_is_written(tmp_path: Path) -> None:
    import msgspec
    from safetensors.numpy import load_file, save_file

    from builder.drafts.make import train_draft

    folder, _ = trained()
    workshop = tiny_workshop()
    for name in ("odd", "wide"):
        shutil.copytree(folder / "head", tmp_path / name)
    weights = load_file(tmp_path / "odd" / "head.safetensors")
    weights["norm.weight"] = weights["norm.weight"][1:]
    save_file(weights, tmp_path / "odd" / "head.safetensors")
    facts = json.loads((tmp_path / "wide" / "head.json").read_text())
    facts["shape"] |= {"intermediate_size": 7, "num_heads": 3}
    (tmp_path / "wide" / "head.json").write_text(json.dumps(facts))
    for start, told in (
        (tmp_path / "odd", "odd.*of another shape"),
        (tmp_path / "wide", r"wide: made for .*intermediate_size is 7, not \d+; num_heads is 3, not \d+"),
        (of_two_layers() / "head", "has 2 layers, and 1 were asked for: give --layers 2 or more"),
        (tmp_path / "nothing", "no head '.*nothing'"),
    ):
        config = msgspec.structs.replace(CONFIG, start_head=str(start))
        with plancast_home(workshop / "home"), pytest.raises(PlancastError, match=told):
            train_draft(
                tiny_recipe(workshop / "model"),
                workshop / "artifact",
                tmp_path / "work",
                tmp_path / "none",
                config,
                Watcher(),
                1,
            )
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "work").exists()


def test_what_a_lookup_would_draft_counts_less() -> None:
    from builder.drafts.repetition import goes_round, repeated

    text = np.array([1, 2, 3, 4, 1, 2, 3, 4, 1, 9, 2, 3, 4, 1, 2, 3], np.int32)
    seen = [tuple(text[at : at + 4]) for at in range(len(text))]
    wanted = [place >= 3 and seen[place - 3] in seen[: place - 3] for place in range(len(text))]
    assert repeated(text).tolist() == wanted
    assert sum(wanted) == 5
    assert not repeated(text[:3]).any()
    assert goes_round(np.tile(text, 16))
    assert not goes_round(np.append(np.tile(text, 16), np.arange(10, 80)).astype(np.int32))
    assert not goes_round(np.tile(text, 4))
