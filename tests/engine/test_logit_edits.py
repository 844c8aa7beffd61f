"""Penalties, biases and bans against their definitions, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift_engine.logit_edits import EditedRow, edit, edits
from chairlift_engine.request import SamplingParams

VOCABULARY = 12

_TOKENS = st.integers(0, VOCABULARY - 1)
_ROWS = st.builds(
    lambda params, prompt, output: EditedRow(params, len(output), prompt + output),
    st.builds(
        SamplingParams,
        max_tokens=st.just(9),
        presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
        logit_bias=st.lists(
            st.tuples(_TOKENS, st.sampled_from([-100.0, 2.0])), max_size=3, unique_by=lambda b: b[0]
        ).map(tuple),
        stop_token_ids=st.frozensets(_TOKENS, max_size=2),
        min_tokens=st.integers(0, 4),
    ),
    st.lists(_TOKENS, min_size=1, max_size=8),
    st.lists(_TOKENS, max_size=8),
)


def defined(logit: float, token_id: int, row: EditedRow) -> float:
    params, output = row.params, list(row.token_ids[row.num_prompt_tokens :])
    if token_id in params.stop_token_ids and len(output) < params.min_tokens:
        return -math.inf
    if token_id in row.token_ids:
        repetition = params.repetition_penalty
        logit = logit / repetition if logit > 0 else logit * repetition
    logit -= params.frequency_penalty * output.count(token_id)
    logit -= params.presence_penalty * (token_id in output)
    return logit + dict(params.logit_bias).get(token_id, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_together_change_as_each_is_defined(dtype: torch.dtype) -> None:
    @given(st.lists(_ROWS, min_size=1, max_size=5))
    def holds(rows: list[EditedRow]) -> None:
        generator = torch.Generator().manual_seed(len(rows))
        logits = torch.randn(len(rows), VOCABULARY, generator=generator).mul(5).to(dtype)
        before = logits.clone()
        edited = edit(logits, rows)
        for index, row in enumerate(rows):
            for token_id in range(VOCABULARY):
                expected = defined(float(before[index, token_id]), token_id, row)
                got = float(edited[index, token_id])
                assert got == pytest.approx(expected, abs=1e-4) or got < -1e29 > expected
            changes = not torch.equal(edited[index], before[index].float())
            assert edits(row.params, row.position) or not changes

    holds()


def test_a_row_without_any_of_these_fields_is_not_edited() -> None:
    assert not edits(SamplingParams(max_tokens=5, stop_token_ids=frozenset((1,))), 0)
    assert not edits(SamplingParams(5, min_tokens=2, stop_token_ids=frozenset((1,))), 2)


def test_where_everything_is_banned_a_token_is_drawn_all_the_same() -> None:
    from chairlift_engine.sampler import Draw, sample

    everything = frozenset(range(VOCABULARY))
    for fields in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}):
        params = SamplingParams(5, stop_token_ids=everything, min_tokens=3, **fields)
        (sampled,) = sample(torch.randn(1, VOCABULARY), [Draw(params, 0, [1])])
        assert sampled.token_id in everything
