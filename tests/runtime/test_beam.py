"""Beam search against transformers' own on a tiny random Llama."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from runtime.beam import BeamSearch
from runtime.logits_processors import build_processors
from runtime.sampling_params import SamplingParams

VOCAB, EOS = 48, 2


@pytest.fixture(scope="module")
def llama():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():  # EOS likely enough that hypotheses end at many lengths
        model.lm_head.weight[EOS] *= 1.6
    yield model
    torch.set_num_threads(threads)


def reference(model, prompt, **options):
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, return_dict_in_generate=True, output_scores=True, **options
        )
    sequences = []
    for row in out.sequences[:, len(prompt) :].tolist():
        ends = [i for i, token in enumerate(row) if token in np.atleast_1d(options.get("eos_token_id", EOS))]
        sequences.append(row[: ends[0] + 1] if ends else row)
    return sequences, out.sequences_scores.tolist()


def ours(model, prompt, *, num_beams, max_new_tokens, n, processors=(), eos=(EOS,), **options):
    import torch

    search = BeamSearch(num_beams, n, eos, max_new_tokens, processors=processors, **options)
    live = [list(prompt)]
    while not search.is_done:
        with torch.no_grad():
            logits = model(torch.tensor(live)).logits[:, -1].float().numpy()
        moves = search.step(logits)
        live = [[*live[move.parent], move.token_id] for move in moves]
    found = search.hypotheses()
    return [h.token_ids for h in found], [h.score for h in found], [h.finish_reason for h in found]


PROMPTS = [[1, 5, 9], [1, 30, 31, 32, 33], [1, 7], [1, 40, 3, 3, 8, 21, 17], [1, 11, 12], [1, 25, 44]]


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("num_beams", [2, 4, 7])
def test_equals_transformers(llama, num_beams, length_penalty, early_stopping):
    for prompt in PROMPTS:
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        for max_new_tokens in (1, 6, 20):
            expected, scores = reference(
                llama,
                prompt,
                num_beams=num_beams,
                num_return_sequences=num_beams,
                max_new_tokens=max_new_tokens,
                **options,
            )
            tokens, got, reasons = ours(
                llama, prompt, num_beams=num_beams, max_new_tokens=max_new_tokens, n=num_beams, **options
            )
            assert tokens == expected
            np.testing.assert_allclose(got, scores, rtol=1e-4, atol=1e-5)
            assert reasons == ["stop" if row[-1] == EOS else "length" for row in expected]


def test_several_eos_ids(llama):
    for prompt in PROMPTS:
        expected, _ = reference(
            llama, prompt, num_beams=3, num_return_sequences=2, max_new_tokens=12, eos_token_id=[EOS, 7, 11]
        )
        tokens, *_ = ours(llama, prompt, num_beams=3, max_new_tokens=12, n=2, eos=(EOS, 7, 11))
        assert tokens == expected


def test_processors_apply_as_in_transformers(llama):
    params = SamplingParams(repetition_penalty=1.5, min_tokens=5, bad_words_token_ids=[[9], [20, 21]])
    for prompt in PROMPTS:
        expected, scores = reference(
            llama,
            prompt,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=12,
            repetition_penalty=1.5,
            min_new_tokens=5,
            bad_words_ids=[[9], [20, 21]],
        )
        tokens, got, _ = ours(
            llama,
            prompt,
            num_beams=4,
            max_new_tokens=12,
            n=4,
            processors=build_processors(params, prompt, [EOS]),
        )
        assert tokens == expected
        np.testing.assert_allclose(got, scores, rtol=1e-4, atol=1e-5)


def test_fewer_tokens_than_beams():
    """A search over fewer continuations than beams goes on with the beams there are."""
    processors = build_processors(SamplingParams(allowed_token_ids=[4]), [1], [0])
    search = BeamSearch(4, 2, [0], 3, processors=processors)
    rng = np.random.default_rng(0)
    beams = 1
    while not search.is_done:
        beams = len(search.step(rng.normal(size=(beams, 10)).astype(np.float32))) or beams
    assert [h.token_ids for h in search.hypotheses()] == [[4, 4, 4]]


def test_everything_forbidden_ends_the_search():
    search = BeamSearch(2, 1, [0], 5, processors=[SimpleNamespace(apply=lambda row: row.fill(-np.inf))])
    assert search.step(np.zeros((1, 10), np.float32)) == []
    assert search.is_done
    assert search.hypotheses() == []


def test_enough_candidates_where_every_eos_id_is_likely():
    """(1 + number of EOS ids) x width candidates: the search goes on with a full set of beams."""
    search = BeamSearch(2, 1, [1, 2, 3], 5)
    logits = np.zeros((1, 10), np.float32)
    logits[0, [1, 2, 3]] = 9.0
    assert [move.token_id for move in search.step(logits)] == [0, 4]
