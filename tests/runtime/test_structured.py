"""Structured output: always valid whatever the logits say, and refused with a reason where it cannot be."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer, write_tiny_tokenizer

from runtime.errors import RequestError
from runtime.sampler import Sampler
from runtime.sampling_params import SamplingParams
from runtime.structured import GrammarCompiler, parse_structured_outputs

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WIDTH = 544  # the engine's logits are wider than the vocabulary


class Bench:
    """A tokenizer, its compiler and a sampler over random logits."""

    def __init__(self, kind: str):
        self.tokenizer = tiny_tokenizer(kind)
        self.eos = self.tokenizer.eos_token_id
        self.grammars = GrammarCompiler(lambda: self.tokenizer, WIDTH, [self.eos])
        self.sampler = Sampler(WIDTH, [self.eos], grammars=self.grammars)

    def params(self, structured, **options) -> SamplingParams:
        return SamplingParams(**{"seed": 1, "structured_outputs": structured, **options})

    def run(self, state, rng, max_tokens=400, scale=4.0) -> list[int]:
        while len(state.output_token_ids) < max_tokens:
            logits = (rng.standard_normal((1, WIDTH)) * scale).astype(np.float32)
            self.sampler.prefetch([state])
            sampled = self.sampler.sample(logits, [state])[0]
            assert sampled.error is None, sampled.error
            state.append(sampled.token_id)
            if sampled.token_id == self.eos:
                break
        return state.output_token_ids

    def text(self, structured, seed=0, **options) -> str:
        state = self.sampler.new_state(self.params(structured, **options), [5])
        ids = self.run(state, np.random.default_rng(seed))
        assert ids[-1] == self.eos, "the grammar never let the text end"
        return self.tokenizer.decode(ids)


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def bench(request):
    made = Bench(request.param)
    yield made
    made.grammars.close()


@pytest.mark.parametrize("seed", range(8))
def test_json_schema_is_always_valid(bench, seed):
    value = json.loads(bench.text({"json": SCHEMA}, seed, temperature=1.5))
    assert set(value) <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert all(tag in ("a", "é", 3) for tag in value.get("tags", []))


@pytest.mark.parametrize("seed", range(4))
def test_json_schema_given_as_text_and_greedy(bench, seed):
    value = json.loads(bench.text({"json": json.dumps(SCHEMA)}, seed, temperature=0.0))
    assert {"name", "age"} <= set(value)


@pytest.mark.parametrize("seed", range(4))
def test_regex(bench, seed):
    assert re.fullmatch(r"[a-c]{2,5}-(é|🙂)[0-9]{3}", bench.text({"regex": r"[a-c]{2,5}-(é|🙂)[0-9]{3}"}, seed))


def test_choice(bench):
    choices = ["yes", "yes, sir", "no\n", 'a "quoted" one']
    found = {bench.text({"choice": choices}, seed, temperature=3.0) for seed in range(24)}
    assert found <= set(choices)
    assert len(found) >= 3


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}/',  # Lark
        'root ::= "[" item ("," item)* "]"\nitem ::= [0-9] [0-9]? [0-9]?',  # GBNF, the EBNF of llama.cpp and xgrammar
    ],
)
def test_grammar(bench, grammar):
    for seed in range(3):
        text = bench.text({"grammar": grammar}, seed, logit_bias={bench.tokenizer.token_to_id("]"): 6.0})
        assert re.fullmatch(r"\[[0-9]{1,3}(,[0-9]{1,3})*\]", text)


def test_json_object_has_bounded_whitespace(bench):
    """A model that loves whitespace still comes to the point: never two blanks in a row outside of strings."""
    blanks = {
        token_id: 30.0
        for token_id in range(bench.tokenizer.vocab_size)
        if re.fullmatch(rb"[ \t\n\r]+", bench.tokenizer.token_bytes(token_id))
    }
    state = bench.sampler.new_state(
        bench.params({"json": {"type": "object", "maxProperties": 2}}, logit_bias=blanks), [5]
    )
    ids = bench.run(state, np.random.default_rng(0), max_tokens=150)
    text = bench.tokenizer.decode(ids).split('"')[0]
    assert "  " not in text.replace("\n", "\n|").split("|")[0]
    assert max(map(len, re.findall(r"\s+", text)), default=0) <= 33


def test_no_whitespace_and_closed_objects(bench):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}
    text = bench.text(
        {"json": schema, "disable_any_whitespace": True, "disable_additional_properties": True}, seed=3, temperature=2.0
    )
    assert re.fullmatch(r'\{("a":-?[0-9]+)?\}', text)


def test_only_eos_follows_the_end(bench):
    state = bench.sampler.new_state(bench.params({"choice": ["a"]}, ignore_eos=True), [5])
    ids = []
    for _ in range(4):
        sampled = bench.sampler.sample(np.zeros((1, WIDTH), np.float32), [state])[0]
        state.append(sampled.token_id)
        ids.append(sampled.token_id)
    assert bench.tokenizer.decode(ids[:1]) == "a"
    assert ids[1:] == [bench.eos] * 3


def test_min_tokens_gives_way_to_a_grammar_that_is_over(bench):
    state = bench.sampler.new_state(bench.params({"choice": ["a"]}, min_tokens=5), [5])
    assert bench.run(state, np.random.default_rng(0))[-1] == bench.eos


def test_min_tokens_holds_where_the_grammar_can_go_on(bench):
    state = bench.sampler.new_state(bench.params({"regex": "a*"}, min_tokens=5, temperature=0.0), [5])
    logits = np.zeros((1, WIDTH), np.float32)
    logits[0, bench.eos] = 9.0
    for _ in range(6):
        state.append(bench.sampler.sample(logits, [state])[0].token_id)
    assert bench.eos not in state.output_token_ids[:5]
    assert state.output_token_ids[5] == bench.eos


def test_a_contradiction_ends_that_sequence_alone(bench):
    contrary = bench.sampler.new_state(bench.params({"choice": ["a"]}, allowed_token_ids=[7]), [5])
    plain = bench.sampler.new_state(SamplingParams(seed=1), [5])
    first, second = bench.sampler.sample(np.zeros((2, WIDTH), np.float32), [contrary, plain])
    assert "no token may be sampled" in first.error
    assert second.error is None


def test_logprobs_are_those_of_the_engine(bench):
    state = bench.sampler.new_state(bench.params({"choice": ["a"]}, logprobs=2), [5])
    logits = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    sampled = bench.sampler.sample(logits, [state])[0]
    reference = logits[0].astype(np.float64) - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert sampled.logprob == pytest.approx(reference[sampled.token_id], abs=1e-5)


def test_forks_go_their_own_ways(bench):
    """n > 1: each sequence is valid by itself, with its own choices."""
    parent = bench.sampler.new_state(bench.params({"regex": "[a-z]{8}"}), [5])
    states = [parent, *(parent.fork(i) for i in range(1, 4))]
    rng = np.random.default_rng(1)
    while any(bench.eos not in state.output_token_ids for state in states):
        logits = np.repeat(rng.standard_normal((1, WIDTH)).astype(np.float32), 4, axis=0)
        bench.sampler.prefetch(states)
        for state, sampled in zip(states, bench.sampler.sample(logits, states), strict=True):
            state.append(sampled.token_id)
    texts = {bench.tokenizer.decode(state.output_token_ids) for state in states}
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts)
    assert len(texts) == 4


def test_resume_replays_the_tokens(bench):
    """A sequence cut anywhere and resumed on a new state ends with the same text."""
    params = bench.params({"json": SCHEMA})
    whole = bench.run(bench.sampler.new_state(params, [5]), np.random.default_rng(2)).copy()
    for cut in {0, 1, len(whole) // 2, len(whole) - 1, len(whole)}:
        rng = np.random.default_rng(2)
        rng.standard_normal((cut, WIDTH))
        resumed = bench.sampler.new_state(params, [5], 0, whole[:cut])
        if bench.eos not in whole[:cut]:
            bench.run(resumed, rng)
        assert resumed.output_token_ids == whole


def test_resume_with_tokens_of_another_grammar_is_refused(bench):
    with pytest.raises(RequestError, match="forbids"):
        bench.sampler.new_state(bench.params({"choice": ["a"]}), [5], 0, [bench.tokenizer.token_to_id("z")])


def test_rollback_leads_back_to_the_same_mask(bench):
    """Speculation: draft, reject, draft again, across the end of the grammar too."""
    whole = bench.run(bench.sampler.new_state(bench.params({"json": SCHEMA}), [5]), np.random.default_rng(4)).copy()
    whole += [bench.eos]

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def check(data):
        state = bench.sampler.new_state(bench.params({"json": SCHEMA}), [5])
        place = 0
        for _ in range(4):
            place = data.draw(st.integers(0, len(whole)))
            here = len(state.output_token_ids)
            for token_id in whole[here:place]:
                state.append(token_id)
            state.truncate(place)
            bench.sampler.prefetch([state])
        fresh = bench.sampler.new_state(bench.params({"json": SCHEMA}), [5], 0, whole[:place])
        row = np.zeros(WIDTH, np.float32)
        expected = bench.sampler.processed(row, fresh).copy()
        np.testing.assert_array_equal(bench.sampler.processed(row, state), expected)

    check()


def test_drafts_are_cut_at_the_first_forbidden_token(bench):
    a, b, c, z = (bench.tokenizer.token_to_id(char) for char in "abcz")
    state = bench.sampler.new_state(bench.params({"regex": "abc"}), [5])
    assert state.grammar.count_allowed([a, b, c]) == 3
    assert state.grammar.count_allowed([a, z, c]) == 1
    assert state.grammar.count_allowed([z]) == 0
    assert state.grammar.count_allowed([a, bench.eos]) == 1
    assert state.grammar.count_allowed([a, b, c, bench.eos]) == 4
    assert state.grammar.count_allowed([a, b, c, bench.eos, a]) == 4
    state.append(a)  # and the sequence is where it was
    assert state.grammar.count_allowed([b, c, bench.eos]) == 3


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ("json", "must be an object"),
        ({}, "exactly one of .* got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"schema": {}}, "unknown keys: schema"),
        ({"json": "{"}, "no valid JSON"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json_object": 1}, "must be true"),
        ({"regex": ""}, "non-empty text"),
        ({"regex": 3}, "non-empty text"),
        ({"choice": []}, "list of one or more"),
        ({"choice": ["a", ""]}, "list of one or more"),
        ({"choice": "abc"}, "list of one or more"),
        ({"grammar": " "}, "non-empty text"),
        ({"json": {}, "disable_any_whitespace": "yes"}, "must be true or false"),
        ({"json": {}, "whitespace_pattern": 3}, "regular expression"),
        ({"regex": "a" * (2 << 20)}, "the limit is 1048576"),
    ],
)
def test_malformed_requests_are_refused_with_the_field(value, match):
    with pytest.raises(RequestError, match=match) as caught:
        parse_structured_outputs(value)
    assert (caught.value.param or "").startswith("structured_outputs")
    with pytest.raises(RequestError, match=match):
        SamplingParams(structured_outputs=value).verify(vocab_size=10, max_context_len=100)


@pytest.mark.parametrize(
    "value",
    [
        {"json": {"type": "strin"}},
        {"json": {"type": "object", "if": {}}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "string", "pattern": "(a"}},
        {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"regex": "(a"},
        {"regex": "a(?=b)"},
        {"grammar": "start: nothing"},
        {"grammar": 'root ::= "a" ('},
        {"grammar": "no grammar at all ::::"},
        {"json": {}, "whitespace_pattern": "(("},
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(bench, value):
    with pytest.raises(RequestError, match="cannot be used") as caught:
        bench.grammars.check(value)
    assert "<state>" not in str(caught.value)
    assert "\n" not in str(caught.value)
    # In the core, where the client's check was left out, it ends that sequence alone.
    state = bench.sampler.new_state(bench.params(value), [5])
    assert "cannot be used" in bench.sampler.sample(np.zeros((1, WIDTH), np.float32), [state])[0].error


@pytest.mark.parametrize("depth", [400, 5000])
@pytest.mark.parametrize("closed", [True, False])
def test_a_schema_nested_too_deeply_is_refused(bench, depth, closed):
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match=r"nested too deeply|recursion limit"):
        bench.grammars.check({"json": schema, "disable_additional_properties": closed})


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_text_nested_too_deeply_is_refused(bench, kind):
    text = {
        "json": '{"items":' * 5000 + "{}" + "}" * 5000,
        "regex": "(" * 5000 + "a" + ")" * 5000,
        "grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
    }[kind]
    with pytest.raises(RequestError) as caught:
        bench.grammars.check({kind: text})
    assert len(str(caught.value)) < 400


def test_a_tokenizer_that_llguidance_cannot_use():
    tokenizer = tiny_tokenizer("wordpiece")
    grammars = GrammarCompiler(lambda: tokenizer, WIDTH, [tokenizer.eos_token_id])
    with pytest.raises(RequestError, match="not available with this model's tokenizer"):
        grammars.check({"regex": "a"})
    grammars.close()


def test_no_grammars_without_a_tokenizer():
    with pytest.raises(RequestError, match="this one has none"):
        Sampler(10, [0]).new_state(SamplingParams(structured_outputs={"regex": "a"}), [1])


def test_from_folder_reads_the_eos_ids(tmp_path):
    folder = write_tiny_tokenizer(tmp_path)
    grammars = GrammarCompiler.from_folder(folder, WIDTH)
    assert grammars.eos_token_ids == {2}
    grammars.check({"regex": "a"})
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert GrammarCompiler.from_folder(folder, WIDTH).eos_token_ids == {2, 0}
    (folder / "generation_config.json").unlink()
    assert GrammarCompiler.from_folder(folder, WIDTH).eos_token_ids == {2}


def test_every_eos_id_may_end_the_text():
    tokenizer = tiny_tokenizer()
    grammars = GrammarCompiler(lambda: tokenizer, WIDTH, [2, 0])
    sampler = Sampler(WIDTH, [2, 0], grammars=grammars)
    ends = set()
    for seed in range(20):
        state = sampler.new_state(SamplingParams(seed=seed, structured_outputs={"choice": ["a"]}), [5])
        state.append(tokenizer.token_to_id("a"))
        ends.add(sampler.sample(np.zeros((1, WIDTH), np.float32), [state])[0].token_id)
    assert ends == {0, 2}
    grammars.close()


def test_prefetch_beside_beams(bench):
    """Beams have no sampling state: a step that holds some beside a grammar must not fail."""
    state = bench.sampler.new_state(bench.params({"choice": ["a"]}), [5])
    bench.sampler.prefetch([None, state, bench.sampler.new_state(SamplingParams(), [5])])
    assert bench.run(state, np.random.default_rng(0))[-1] == bench.eos
