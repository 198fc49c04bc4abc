"""A head from nothing but its target: training, weights on disk, its engine in the artifact, drafts with it."""

from __future__ import annotations

import functools
import json
import shutil
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


def test_the_engine_computes_what_the_trained_head_does() -> None:
    """Slots fed in chunks and a draft on top, against the torch module over the whole text."""
    import torch

    from builder.drafts.head import UnrolledAttention
    from builder.drafts.head_file import find_head, load_head
    from runtime.artifact import Artifact
    from runtime.executor import StepBatch
    from runtime.executors import open_executor
    from zoo import open_folder

    folder, _ = trained()
    head = load_head(find_head(str(folder / "head")), open_folder(tiny_workshop() / "model", name="tiny"))
    rng = np.random.default_rng(0)
    length, width = 40, head.config.hidden_size
    ids, states = rng.integers(0, 300, length), rng.standard_normal((length, width)).astype(np.float32)
    with torch.no_grad():
        rope = head.rope(torch.arange(length)[None])
        outputs = head(torch.from_numpy(ids)[None], torch.from_numpy(states)[None], rope, UnrolledAttention())[0]
        wanted = head.lm_head(outputs)
    view = Artifact.open(folder / "artifact").draft_head()
    assert view is not None
    executor = open_executor(view, num_threads=1)
    executor.allocate(4)
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
    import msgspec

    from builder.drafts.head import FROZEN, EagleHead, HeadConfig
    from builder.drafts.head_file import HEADS, WEIGHTS, _stored_weights, find_head

    folders = [path.parent for path in HEADS.glob("*/head.json")]
    assert folders, "a head ships"
    for folder in folders:
        found = find_head(folder.name)
        assert found.path == folder
        assert sum(path.stat().st_size for path in folder.iterdir()) < 8 << 20
        head = EagleHead(msgspec.convert(found.facts.shape, HeadConfig))
        missing = head.load_state_dict(_stored_weights(folder / WEIGHTS), strict=False).missing_keys
        assert set(missing) == set(FROZEN)
        assert len(found.facts.target_ids) == head.config.vocab_size
        card = (folder / "README.md").read_text()
        assert "plancast draft train" in card
        assert f"seed {found.facts.training['seed']}" in card


def test_training_goes_on_from_a_head(tmp_path: Path) -> None:
    """With steps of no length the weights are the old head's, read off other tokens; one of other sizes is refused."""
    import msgspec
    from safetensors.numpy import load_file, save_file

    from builder.drafts.make import train_draft

    folder, _ = trained()
    workshop = tiny_workshop()
    recipe = tiny_recipe(workshop / "model")
    odd = tmp_path / "odd"
    shutil.copytree(folder / "head", odd)
    weights = load_file(odd / "head.safetensors")
    weights["norm.weight"] = weights["norm.weight"][1:]
    save_file(weights, odd / "head.safetensors")

    def train(start: Path, out: Path) -> None:
        config = msgspec.structs.replace(
            CONFIG, seed=1, steps=1, vocab_size=480, learning_rate=1e-12, start_head=str(start)
        )
        with plancast_home(workshop / "home"):
            train_draft(recipe, workshop / "artifact", tmp_path / "work", out, config, Watcher(), 1)

    train(folder / "head", tmp_path / "head")
    old, new = (load_file(path / "head.safetensors") for path in (folder / "head", tmp_path / "head"))
    assert old.keys() == new.keys()
    for name in old:
        np.testing.assert_allclose(new[name], old[name], rtol=1e-6, atol=1e-9)
    assert len({path.stat().st_mode for path in (tmp_path / "head").iterdir()}) == 1
    assert f"--start-head {folder / 'head'}" in (tmp_path / "head" / "README.md").read_text()
    with pytest.raises(PlancastError, match=r"odd.*of another shape"):
        train(odd, tmp_path / "none")
    shutil.rmtree(tmp_path / "work")
    with pytest.raises(PlancastError, match=r"no head '.*nothing'"):
        train(tmp_path / "nothing", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert not (tmp_path / "work").exists(), "no corpus is written for a head that there is not"
    with pytest.raises(PlancastError, match="--kind head"):
        DraftTraining(kind="model", start_head="x")


def test_what_a_lookup_would_draft_counts_less() -> None:
    from builder.drafts.train_head import repeated

    text = np.array([1, 2, 3, 4, 1, 2, 3, 4, 1, 9, 2, 3, 4, 1, 2, 3], np.int32)
    seen = [tuple(text[at : at + 4]) for at in range(len(text))]
    wanted = [place >= 3 and seen[place - 3] in seen[: place - 3] for place in range(len(text))]
    assert repeated(text).tolist() == wanted
    assert sum(wanted) == 5
    assert not repeated(text[:3]).any()
