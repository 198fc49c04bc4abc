"""The PagedAttention reference against dense attention."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import dense_attention, make_case

from plugins.paged_attention.reference import reference


@st.composite
def cases(draw):
    num_kv_heads = draw(st.integers(1, 3))
    return make_case(
        draw(st.lists(st.tuples(st.integers(0, 19), st.integers(1, 9)), min_size=1, max_size=4)),
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([4, 8, 12])),
        v_head_size=draw(st.sampled_from([None, 4, 10])),
        block_size=draw(st.sampled_from([1, 4, 5, 32])),
        sliding_window=draw(st.sampled_from([0, 1, 3, 8, 100])),
        softcap=draw(st.sampled_from([0.0, 0.5, 30.0])),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@settings(max_examples=120, deadline=None)
@given(cases())
def test_equals_dense_attention(case):
    out = reference(**case.inputs, **case.attributes)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, dense_attention(case), atol=2e-5, rtol=2e-5)


def test_writes_new_cells_in_place_and_no_others():
    case = make_case([(5, 3), (0, 4), (8, 1)], block_size=4)
    before_k, before_v = case.inputs["key_cache"].copy(), case.inputs["value_cache"].copy()
    reference(**case.inputs, **case.attributes)
    touched = np.zeros(before_k.shape[:1] + before_k.shape[2:3], bool)  # [blocks, cells]
    starts = case.inputs["block_starts"]
    for b, (past, new) in enumerate([(5, 3), (0, 4), (8, 1)]):
        table = case.inputs["block_ids"][starts[b] : starts[b + 1]]
        for position in range(past, past + new):
            block, cell = table[position // 4], position % 4
            touched[block, cell] = True
            np.testing.assert_array_equal(case.inputs["key_cache"][block, :, cell], case.dense_keys[b][position])
            np.testing.assert_array_equal(case.inputs["value_cache"][block, :, cell], case.dense_values[b][position])
    for before, name in ((before_k, "key_cache"), (before_v, "value_cache")):
        changed = (case.inputs[name] != before).any(axis=(1, 3))
        assert not (changed & ~touched).any()


def test_steps_give_what_one_pass_gives():
    """A prompt in chunks of 1, 3 and 7 through the cache equals the prompt in one pass."""
    whole = make_case([(0, 23)], block_size=4)
    expected = reference(**whole.inputs, **whole.attributes)
    for chunk in (1, 3, 7):
        inputs = make_case([(0, 23)], block_size=4).inputs
        rows = []
        for past in range(0, 23, chunk):
            new = min(chunk, 23 - past)
            step = {name: inputs[name][past : past + new] for name in ("query", "key", "value")}
            step["past_lens"] = np.array([past], np.int32)
            step["query_starts"] = np.array([0, new], np.int32)
            rows.append(reference(**{**inputs, **step}, **whole.attributes))
        np.testing.assert_allclose(np.concatenate(rows), expected, atol=1e-5)


def test_a_sequence_without_new_rows_gives_none():
    case = make_case([(5, 0), (3, 2), (0, 0)], block_size=4)
    np.testing.assert_allclose(reference(**case.inputs, **case.attributes), dense_attention(case), atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_ids": np.array([0, 1, 99], np.int32)}, r"block_ids must lie in 0\.\."),
        ({"block_ids": np.array([0], np.int32), "block_starts": np.array([0, 1], np.int32)}, "room for 4"),
        ({"query_starts": np.array([0, 2], np.int32)}, "query_starts must rise"),
        ({"max_context_len": 3}, "max_context_len is 3"),
        ({"past_lens": np.array([-1], np.int32)}, "negative"),
        ({"key": np.zeros((4, 7), np.float32)}, "key has shape"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks has shape"),
    ],
)
def test_refuses_bad_inputs(change, message):
    case = make_case([(5, 4)], block_size=4)
    with pytest.raises(ValueError, match=message):
        reference(**{**case.inputs, **change}, **case.attributes)
