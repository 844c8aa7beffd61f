"""Drawing tokens: exact cuts, the right distribution, and the same draw in any company."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift_engine.request import SamplingParams
from chairlift_engine.sampler import (
    LOGPROB_ROWS,
    NUCLEUS_CANDIDATES,
    Draw,
    sample,
    token_logprobs,
)


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def picked(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits, draws)]


def drawn(logits: torch.Tensor, count: int, **fields: float) -> Counter[int]:
    """Tokens of `count` positions of one request with these logits throughout."""
    draws = [Draw(params(**fields), position) for position in range(count)]
    return Counter(picked(logits.expand(count, -1), draws))


def test_greedy_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, -1.0, 3.0]])
    assert picked(logits, [Draw(params(temperature=0), 0)] * 2) == [1, 0]


def test_a_temperature_near_zero_is_greedy_and_overflows_nothing() -> None:
    logits = torch.tensor([[1e4, -1e4, 9e3]])
    for fields in ({}, {"top_k": 2}, {"top_p": 0.5}):
        draw = Draw(params(temperature=1e-6, **fields), 5)
        assert picked(logits, [draw]) == [0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    logits, count = torch.tensor([[0.0, 1.0, -1.0, 0.5, -30.0]]), 4000
    expected = (logits[0] / temperature).softmax(0) * count
    got = drawn(logits, count, temperature=temperature)
    likely = [i for i in range(5) if expected[i] > 5]
    chi_square = sum(float((got[i] - expected[i]) ** 2 / expected[i]) for i in likely)
    assert chi_square < 18.5  # 99.9th percentile for at most 4 degrees of freedom
    assert sum(got[i] for i in likely) == count


def test_top_k_draws_from_exactly_the_k_likeliest() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3, 0.0]])
    assert set(drawn(logits, 300, top_k=3)) == {1, 2, 3}
    assert set(drawn(logits, 50, top_k=1)) == {1}
    assert set(drawn(logits, 300, top_k=99)) == {0, 1, 2, 3, 4}


def test_top_p_draws_from_the_fewest_that_hold_the_mass() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, expected in ((0.01, {0}), (0.49, {0}), (0.51, {0, 1}), (0.79, {0, 1})):
        assert set(drawn(logits, 300, top_p=top_p)) == expected
    assert set(drawn(logits, 300, top_p=0.9)) == {0, 1, 2}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first two, token 0 holds 4/7.
    assert set(drawn(logits, 300, top_k=2, top_p=0.55)) == {0}
    assert set(drawn(logits, 300, top_k=2, top_p=0.6)) == {0, 1}


def test_min_p_draws_from_those_as_likely_as_a_share_of_the_likeliest() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for others in ({}, {"top_k": 3}, {"top_p": 0.99}):
        assert set(drawn(logits, 300, min_p=0.25, **others)) == {0, 1, 2}
    assert set(drawn(logits, 100, min_p=1.0)) == {0}
    # At temperature 2 the last is 0.32 as likely as the first.
    assert set(drawn(logits, 300, min_p=0.25, temperature=2.0)) == {0, 1, 2, 3}


def test_top_p_counts_the_mass_that_min_p_left() -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Of the first two, token 0 holds 4/7.
    assert set(drawn(logits, 300, min_p=0.7, top_p=0.55)) == {0}
    assert set(drawn(logits, 300, min_p=0.7, top_p=0.6)) == {0, 1}


def test_top_p_reaches_past_its_candidates_when_the_mass_lies_there() -> None:
    vocabulary = 4 * NUCLEUS_CANDIDATES
    got = drawn(torch.zeros(1, vocabulary), 400, top_p=0.75)
    assert max(got) >= 2 * NUCLEUS_CANDIDATES
    assert max(got) < 3 * NUCLEUS_CANDIDATES + 2  # equal logits are ordered by id


_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    seed=st.integers(-(2**63), 2**64),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (290, -2.0))]),
    stop_token_ids=st.sampled_from([frozenset(), frozenset((1, 7))]),
    min_tokens=st.sampled_from([0, 5]),
    num_logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_PARAMS, st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=8))
def test_a_draw_does_not_depend_on_its_neighbours(
    rows: list[tuple[SamplingParams, int, int]],
) -> None:
    # Coarse logits: many ties, as bf16 models have them.
    source = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).mul(2).round()
    draws = [Draw(p, position, [*range(20, 30)] * 2) for p, position, _ in rows]
    together = sample(source[[row for _, _, row in rows]], draws)
    alone = [
        sample(source[row : row + 1], [draw])[0]
        for draw, (_, _, row) in zip(draws, rows, strict=True)
    ]
    assert together == alone


@settings(max_examples=60)
@given(_PARAMS, st.integers(1, 9))
def test_logprobs_are_the_models_own_whatever_is_done_to_sample(
    params: SamplingParams, position: int
) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(3)).mul(4)
    asking = replace(params, num_logprobs=4)
    given_logits = logits.clone()
    (sampled, _) = sample(logits, [Draw(asking, position, [5] * 12), Draw(params, 0, [5])])
    assert sampled.token_id == picked(logits, [Draw(params, position, [5] * 12)] * 2)[0]
    assert sampled.logprobs is not None
    expected = given_logits[0].log_softmax(-1)
    assert sampled.logprobs.logprob == pytest.approx(float(expected[sampled.token_id]))
    values, ids = expected.topk(4)
    assert [token for token, _ in sampled.logprobs.top] == ids.tolist()
    assert [value for _, value in sampled.logprobs.top] == pytest.approx(values.tolist())


def test_a_row_that_asks_for_no_logprobs_gets_none() -> None:
    assert sample(torch.zeros(1, 9), [Draw(params(), 0)])[0].logprobs is None


def test_logprobs_of_many_rows_are_those_of_each() -> None:
    logits = torch.randn(2 * LOGPROB_ROWS + 3, 40, generator=torch.Generator().manual_seed(1))
    tokens = [row % 40 for row in range(len(logits))]
    counts = [row % 3 for row in range(len(logits))]
    together = token_logprobs(logits, tokens, counts)
    assert together == [
        token_logprobs(logits[i : i + 1], tokens[i : i + 1], counts[i : i + 1])[0]
        for i in range(len(logits))
    ]
    assert [len(each.top) for each in together] == counts


def test_seed_and_position_both_move_the_draw() -> None:
    logits = torch.zeros(1, 1000)
    by_seed = {picked(logits, [Draw(params(seed=s), 0)])[0] for s in range(20)}
    by_position = {picked(logits, [Draw(params(seed=1), p)])[0] for p in range(20)}
    assert len(by_seed) > 15 and len(by_position) > 15
