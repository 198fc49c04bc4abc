"""Parity with Hugging Face: what is asked, what is compared, and what a recipe's bounds make of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_artifact import tiny_manifest
from tiny_hf import CONTEXT, VOCAB, write_tiny_hf
from tiny_model import TinyModelExecutor

from builder import parity
from builder.parity import MAX_LOGITS_BYTES, Questions, ask_engine, check_quality, make_questions
from builder.recipe import ParityConfig, QualityConfig
from runtime.errors import BuildError
from runtime.executor import StepBatch
from runtime.manifest import Limits, Parity

TOKENS = list(range(3763))
GOOD = Parity(
    greedy_prompts=12, greedy_tokens=384, greedy_matching_prompts=12, greedy_matching_tokens=384, positions=2048,
    mean_kl=1e-9, p99_kl=1e-8, top1_agreement=1.0, perplexity=17.0, reference_perplexity=17.0,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.integers(1, 40),
    new_tokens=st.integers(1, 100),
    max_context_len=st.integers(4, 4096),
    vocab_size=st.sampled_from([64, 49_152, 262_144]),
    prefix=st.sampled_from([[], [1]]),
)
def test_questions_fit_the_engine_and_the_budget(
    prompts: int, new_tokens: int, max_context_len: int, vocab_size: int, prefix: list[int]
) -> None:
    config = ParityConfig(prompts=prompts, new_tokens=new_tokens)
    asked = make_questions(TOKENS, prefix, config, vocab_size=vocab_size, max_context_len=max_context_len)
    assert len(asked.prompts) == prompts
    assert 1 <= asked.new_tokens <= new_tokens
    for prompt in asked.prompts:
        assert prompt[: len(prefix)] == prefix
        assert len(prefix) < len(prompt) <= max_context_len - asked.new_tokens
    for window in asked.windows:
        assert window[: len(prefix)] == prefix
        assert len(window) <= max_context_len
    one = 4 * vocab_size * len(asked.windows[0])
    assert 4 * vocab_size * asked.positions <= max(MAX_LOGITS_BYTES, one)


def test_the_prompts_of_a_usual_build_differ_in_length_and_content() -> None:
    asked = make_questions(TOKENS, [], ParityConfig(), vocab_size=49_152, max_context_len=2048)
    assert sorted(map(len, asked.prompts)) == [1, 2, 4, 7, 12, 20, 33, 48, 64, 100, 160, 256]
    assert len({prompt[0] for prompt in asked.prompts}) == 12
    assert asked.positions == 2048
    assert asked.windows[0][0] == TOKENS[0]
    assert asked.windows[-1][-1] == TOKENS[-1]


def test_the_text_is_long_and_varied() -> None:
    text = parity.TEXT.read_text(encoding="utf-8")
    assert len(text) > 10_000
    for sample in ("def merge_intervals", "SELECT c.name", "| Antwerp", "À six heures", "Question: A train"):
        assert sample in text
    assert parity.TEXT.with_name(parity.TEXT.name + ".license").is_file()


def greedy(executor: TinyModelExecutor, prompt: list[int], count: int) -> list[int]:
    """Greedy continuation by reading everything from the start for each token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(executor.read_alone(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_the_engine_s_answers_are_its_greedy_ones_and_its_logits_those_of_the_text(tmp_path: Path) -> None:
    executor = TinyModelExecutor(seed=3)
    manifest = tiny_manifest(
        limits=Limits(max_context_len=64, max_num_seqs=3, max_num_batched_tokens=16), kv=executor.kv_layout
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length).tolist() for length in (1, 3, 9, 20, 5)]
    windows = [rng.integers(0, 96, 33).tolist(), rng.integers(0, 96, 21).tolist()]
    answers = ask_engine(executor, manifest, Questions(prompts, 6, windows), tmp_path / "logits")
    alone = TinyModelExecutor(seed=3)
    alone.allocate(32)
    assert answers == [greedy(alone, prompt, 6) for prompt in prompts]
    logits = np.fromfile(tmp_path / "logits", np.float32).reshape(-1, 96)
    np.testing.assert_array_equal(logits, np.concatenate([alone.read_alone(window) for window in windows]))


def test_an_engine_of_nans_is_refused(tmp_path: Path) -> None:
    class Broken(TinyModelExecutor):
        def run(self, batch: StepBatch) -> np.ndarray:
            logits = super().run(batch)
            return np.full_like(logits, np.nan) if len(batch.logits_rows) > 1 else logits

    executor = Broken(seed=3)
    limits = Limits(max_context_len=64, max_num_seqs=1, max_num_batched_tokens=16)
    manifest = tiny_manifest(limits=limits, kv=executor.kv_layout)
    with pytest.raises(BuildError, match="output is not finite"):
        ask_engine(executor, manifest, Questions([[1]], 2, [[1, 2, 3]]), tmp_path / "logits")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from builder.parity_reference import load_reference

    folder = write_tiny_hf(tmp_path_factory.mktemp("model"))
    return load_reference(str(folder), trust_remote_code=False), folder


def hf_logits(model: Any, tokens: list[int]) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].numpy()


def test_text_figures_are_those_of_their_definitions(reference: Any, tmp_path: Path) -> None:
    from builder.parity_reference import compare_text

    model, _ = reference
    rng = np.random.default_rng(1)
    windows = [rng.integers(0, VOCAB, length).tolist() for length in (70, 130, 2)]
    theirs = np.concatenate([hf_logits(model, window) for window in windows]).astype(np.float64)
    ours = (theirs + rng.standard_normal(theirs.shape)).astype(np.float32)
    ours.tofile(tmp_path / "logits")
    import torch

    with torch.inference_mode():
        figures = compare_text(model, {"windows": windows, "output": str(tmp_path / "logits")})

    def log_softmax(x: np.ndarray) -> np.ndarray:
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    p, q = log_softmax(theirs), log_softmax(ours.astype(np.float64))
    kl = (np.exp(p) * (p - q)).sum(-1)
    rows = np.cumsum([0, *map(len, windows)])
    scored = np.concatenate([np.arange(a, b - 1) for a, b in itertools.pairwise(rows)])
    targets = np.concatenate([window[1:] for window in windows])
    assert figures["positions"] == 202
    assert figures["mean_kl"] == pytest.approx(kl.mean(), rel=1e-4)
    assert figures["p99_kl"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-4)
    assert figures["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).mean())
    assert figures["reference_perplexity"] == pytest.approx(np.exp(-p[scored, targets].mean()), rel=1e-4)
    assert figures["perplexity"] == pytest.approx(np.exp(-q[scored, targets].mean()), rel=1e-4)
    assert 0 < figures["top1_agreement"] < 1


def test_equal_logits_have_no_divergence(reference: Any, tmp_path: Path) -> None:
    from builder.parity_reference import compare_text

    model, _ = reference
    import torch

    window = list(range(100))
    hf_logits(model, window).tofile(tmp_path / "logits")
    with torch.inference_mode():
        figures = compare_text(model, {"windows": [window], "output": str(tmp_path / "logits")})
    assert figures["mean_kl"] < 1e-9
    assert figures["top1_agreement"] == 1
    assert figures["perplexity"] == pytest.approx(figures["reference_perplexity"])


def test_greedy_answers_are_checked_token_by_token(reference: Any) -> None:
    import torch

    from builder.parity_reference import compare_greedy

    model, _ = reference
    prompts = [[5], [7, 8, 9], [30, 31]]
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            answers.append(ids[0, len(prompt) :].tolist())
        right = compare_greedy(model, {"prompts": prompts, "answers": answers})
        answers[1][3] ^= 1
        wrong = compare_greedy(model, {"prompts": prompts, "answers": answers})
    assert right == {
        "greedy_prompts": 3, "greedy_tokens": 24, "greedy_matching_prompts": 3, "greedy_matching_tokens": 24,
    }  # fmt: skip
    assert wrong["greedy_matching_prompts"] == 2
    assert wrong["greedy_matching_tokens"] == 8 + 3 + 8


def test_the_reference_runs_in_a_process_of_its_own(reference: Any, tmp_path: Path) -> None:
    from zoo.checkpoint import open_folder

    model, folder = reference
    window = list(range(60))
    hf_logits(model, window).tofile(tmp_path / "logits")
    first = int(hf_logits(model, [5])[-1].argmax())
    questions = Questions([[5]], 1, [window])
    checkpoint = open_folder(folder, name="tiny")
    figures = parity.ask_reference(checkpoint, questions, {"answers": [[first]]}, tmp_path / "logits", tmp_path, False)
    assert Parity(**figures).greedy_matching_prompts == 1
    assert not (tmp_path / "questions.json").exists()


def test_a_reference_that_cannot_run_is_one_line(tmp_path: Path) -> None:
    from zoo.checkpoint import open_folder

    folder = write_tiny_hf(tmp_path / "model")
    checkpoint = open_folder(folder, name="tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no-such-family"}))
    questions = Questions([[1]], 1, [[1]])
    with pytest.raises(BuildError) as caught:
        parity.ask_reference(checkpoint, questions, {"answers": [[1]]}, tmp_path / "logits", tmp_path, False)
    assert "\n" not in str(caught.value)
    assert "parity.enabled: false" in str(caught.value)
    assert "no-such-family" in str(caught.value)


def test_bounds_that_hold_pass() -> None:
    check_quality(GOOD, QualityConfig())
    check_quality(None, QualityConfig())
    check_quality(GOOD, QualityConfig(max_kl=0.01, min_top1=0.99, max_perplexity_ratio=1.01))


def test_bounds_that_do_not_hold_are_named_with_their_figures() -> None:
    import msgspec

    poor = msgspec.structs.replace(GOOD, mean_kl=0.28, top1_agreement=0.8, perplexity=34.0)
    bounds = QualityConfig(max_kl=0.05, min_top1=0.95, max_perplexity_ratio=1.05)
    with pytest.raises(BuildError) as caught:
        check_quality(poor, bounds)
    message = str(caught.value)
    for part in ("0.28 nats, over quality.max_kl 0.05", "0.8000, under quality.min_top1 0.95", "2.0000", "1.05"):
        assert part in message
    with pytest.raises(BuildError, match=r"max_kl"):
        check_quality(msgspec.structs.replace(GOOD, mean_kl=float("nan")), QualityConfig(max_kl=0.05))
    with pytest.raises(BuildError, match=r"quality.min_top1 needs the comparison"):
        check_quality(None, QualityConfig(min_top1=0.5))


def test_the_tiny_model_fits_the_questions() -> None:
    asked = make_questions(list(range(400)), [1], ParityConfig(), vocab_size=VOCAB, max_context_len=CONTEXT)
    assert max(len(prompt) for prompt in asked.prompts) + asked.new_tokens <= CONTEXT
