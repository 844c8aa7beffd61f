from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway import estimate
from chairlift_gateway.quota.law import Outcome, Status
from chairlift_gateway.quota.told import ratelimit_headers, reason, retry_after_s
from chairlift_gateway.sse import num_token_events
from chairlift_gateway.usage import Usage, Used
from chairlift_protocol.quota import MAX_TOKENS, Limits

OPENING = b': chairlift-usage {"prompt_tokens":7,"completion_tokens":0}\n\n'
CLOSING = b': chairlift-usage {"prompt_tokens":7,"completion_tokens":3}\n\n'
EVENT = b'data: {"choices":[{"text":"a"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def sent(guessed_prompt: int = 10, guessed_answer: int = 0) -> Usage:
    return Usage(guessed_prompt, guessed_answer, is_sent=True)


def passed(usage: Usage, events: bytes) -> bytes:
    """As `metering` does it."""
    for_client, uncovered = usage.take_comments(events)
    usage.see(num_token_events(uncovered))
    return for_client


@given(st.sets(st.integers(0, 6)))
def test_comments_are_taken_out_and_the_count_is_right_however_a_stream_is_cut(
    cuts: set[int],
) -> None:
    parts = [OPENING, EVENT, EVENT, EVENT, CLOSING, DONE]
    usage, client, piece = sent(), b"", b""
    for number, part in enumerate(parts):
        piece += part
        if number in cuts:
            client, piece = client + passed(usage, piece), b""
    client += passed(usage, piece)
    assert client == EVENT * 3 + DONE
    assert usage.num_tokens == 7 + 3


def test_a_stream_that_broke_off_is_the_prompt_as_stated_and_the_tokens_seen() -> None:
    usage = sent()
    passed(usage, OPENING + EVENT)
    passed(usage, EVENT)
    assert usage.num_tokens == 7 + 2


@given(st.text())
def test_text_that_spells_a_comment_passes_and_states_nothing(text: str) -> None:
    told = text + ": chairlift-usage " + text
    for ascii_only in (True, False):
        body = json.dumps({"choices": [{"text": told}]}, ensure_ascii=ascii_only)
        event = b"data: " + body.encode("utf-8", "surrogatepass") + b"\n\n"
        usage = sent()
        assert usage.take_comments(event) == (event, event)
        assert usage.num_tokens == 10


@pytest.mark.parametrize(
    "comment", [b": chairlift-usage {}\n\n", b': chairlift-usage {"prompt_tokens":"x"}\n\n']
)
def test_a_comment_that_says_nothing_is_still_not_for_the_client(comment: bytes) -> None:
    usage = sent()
    assert passed(usage, comment + EVENT) == EVENT
    assert usage.num_tokens == 11


@given(st.text(), st.integers(0, 1000), st.integers(0, 1000))
def test_a_whole_answers_usage_is_found_whatever_its_text_says(
    text: str, prompt: int, answer: int
) -> None:
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    body = {"choices": [{"text": text + '"usage": {"prompt_tokens": 0}'}], "usage": usage}
    counted = sent(guessed_answer=50)
    counted.read_whole(json.dumps(body).encode())
    assert counted.num_tokens == prompt + answer


@pytest.mark.parametrize("body", [b"{}", b'{"usage": null}', b'{"usage": {', b'"usage"', b""])
def test_without_a_statement_the_guess_stands(body: bytes) -> None:
    usage = sent(guessed_answer=50)
    usage.read_whole(body)
    assert usage.num_tokens == 60


def test_what_no_engine_got_and_what_failed_costs_nothing() -> None:
    assert Usage(10, 50).num_tokens == 0
    failed = sent()
    failed.is_void = True
    assert failed.num_tokens == 0


def test_a_stream_is_charged_what_was_seen_of_it() -> None:
    usage = sent()
    assert usage.num_tokens == 10
    usage.see(3)
    assert usage.num_tokens == 13


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"prompt": "x"}', 80),
        (b'{"max_tokens": 5}', 5),
        (b'{"max_completion_tokens":7}', 7),
        (b'{"max_tokens": 500}', 80),
        (b'{"max_tokens": 5, "n": 3}', 15),
        (b'{"n": 9999}', 80 * 128),
        (b'{"n": 99999}', 80 * 128),
        (b'{"best_of": 3}', 80 * 3),
        (b'{"n": 0}', 80),
        (b'{"prompt": "\\"max_tokens\\": 1"}', 80),
    ],
)
def test_an_answer_is_guessed_by_what_is_usual_and_what_the_request_allows(
    body: bytes, tokens: int
) -> None:
    assert estimate.answer_tokens(body, 80) == tokens


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({}, 400),
        ({"max_tokens": 300}, 300),
        ({"max_tokens": 1, "max_completion_tokens": 300}, 300),
        ({"max_tokens": 1000}, 400),
        # What takes nothing away: the engine's own bound, whatever that is.
        ({"max_tokens": None}, 400),
        ({"max_tokens": "1"}, 400),
        ({"metadata": {"max_tokens": 1, "stream": True}}, 400),
        ({"n": 3, "max_tokens": 300}, 900),
        ({"best_of": 4, "n": 2}, 1600),
        ({"prompt": ["a", "b"]}, 800),
        ({"prompt": [[1, 2], [3]]}, 800),
        ({"prompt": [1, 2, 3]}, 400),
        ({"prompt": []}, 400),
        ({"stream": True}, 0),
        # What no engine takes.
        ({"n": 10**20}, 400 * 128),
        ({"n": -5}, 400),
        ({"max_tokens": -5}, 400),
        ({"prompt": ["a"] * 2000}, 400 * 1024),
    ],
)
def test_an_engine_that_cannot_be_asked_may_have_made_what_its_time_and_the_request_allow(
    asked: object, tokens: int
) -> None:
    assert estimate.most_answer_tokens(json.dumps(asked).encode(), elapsed_s=2.0) == tokens


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_nothing_is_made_of_what_no_engine_understands(body: bytes) -> None:
    assert estimate.most_answer_tokens(body, 10.0) == 0


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [
        ({}, 400),
        ({"max_tokens": 300, "n": 3}, 900),
        ({"best_of": 10**8}, 400 * 128),
        ({"prompt": ["a", "b", "c"]}, 1200),
        ({"prompt": ["", "", "a, b"]}, 1200),
        ({"prompt": [[1, 2], [3]]}, 800),
        ({"prompt": [1, 2, 3]}, 400),
        ({"prompt": ["a"] * 2000}, 400 * 1024),
        ({"prompt": '"n": 5, "prompt": ["a", "b"], "max_tokens": 1'}, 400),
        # Whether it is one that engines heed cannot be told; `metering` sees one that has begun.
        ({"stream": True}, 400),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_body_too_large_to_parse_is_bounded_by_what_is_found_in_it(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, object], tokens: int,
    separators: tuple[str, str],
) -> None:  # fmt: skip
    monkeypatch.setattr(estimate, "json", None)
    large = {**asked, "user": "x" * estimate.MAX_PARSED_BYTES}
    body = json.dumps(large, separators=separators).encode()
    assert estimate.most_answer_tokens(body, elapsed_s=2.0) == tokens


def test_no_statement_counts_for_more_than_any_request_can_use_nor_for_less_than_nothing() -> None:
    usage = sent()
    usage.state(Used(10**400, 10**400))
    assert usage.num_tokens == 2 * MAX_TOKENS
    usage.state(Used(-1, -1))
    assert usage.num_tokens == 0
    told = sent()
    passed(told, b': chairlift-usage {"prompt_tokens":Infinity,"completion_tokens":1}\n\n')
    assert told.num_tokens == 10


def test_what_one_engine_said_is_no_longer_so_at_the_next() -> None:
    usage = sent(guessed_answer=50)
    usage.state(Used(7, 300))
    usage.see(2)
    usage.sent()
    assert (usage.num_answer_tokens, usage.num_tokens) == (0, 60)


def test_usual_is_what_four_of_five_recent_answers_did_not_exceed() -> None:
    usual = estimate.UsualAnswers()
    assert usual.of("a") == estimate.FIRST_ANSWER_TOKENS
    for length in range(1, 101):
        usual.note("a", length)
    assert usual.of("a") == 90  # of the last fifty
    assert usual.of("b") == estimate.FIRST_ANSWER_TOKENS


def test_clients_are_told_limit_rest_and_reset_as_openai_writes_them() -> None:
    limits = Limits(tokens_per_minute=60_000, requests_per_minute=60, burst_ms=30_000)
    told = dict(ratelimit_headers(limits, Outcome(Status.ADMITTED, 5, 12_000, 29)))
    assert told == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"29",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"60000",
        b"x-ratelimit-remaining-tokens": b"12000",
        b"x-ratelimit-reset-tokens": b"18s",
    }
    owing = dict(ratelimit_headers(limits, Outcome(Status.ADMITTED, 5, -60_000, 30)))
    assert owing[b"x-ratelimit-remaining-tokens"] == b"0"
    assert owing[b"x-ratelimit-reset-tokens"] == b"1m30s"
    assert owing[b"x-ratelimit-reset-requests"] == b"0ms"
    assert ratelimit_headers(Limits(concurrency=3), Outcome(Status.ADMITTED)) == []


@pytest.mark.parametrize(
    ("status", "number", "said"),
    [
        (Status.TOKENS, 1_500, "60 tokens per minute. Please try again in 2 s."),
        (Status.REQUESTS, 1, "7 requests per minute. Please try again in 1 s."),
        (Status.CONCURRENCY, 1_000, "3 requests at the same time. Please try again in 1 s."),
    ],
)
def test_a_refusal_says_which_limit_and_when_to_come_back(
    status: Status, number: int, said: str
) -> None:
    limits = Limits(tokens_per_minute=60, requests_per_minute=7, concurrency=3)
    outcome = Outcome(status, number)
    assert reason(limits, outcome) == f"Rate limit reached: {said}"
    assert f"in {retry_after_s(outcome)} s" in said


def test_a_refusal_says_that_a_limit_is_lowered_where_that_is_why() -> None:
    limits = Limits(tokens_per_minute=20, requests_per_minute=7, lowered_from=60)
    told = dict(ratelimit_headers(limits, Outcome(Status.TOKENS, 0, 0, 7)))
    assert told[b"x-ratelimit-limit-tokens"] == b"20"
    why = "20 tokens per minute (lowered from 60 while the pool is congested). Please"
    assert why in reason(limits, Outcome(Status.TOKENS, 1))
    assert "lowered" not in reason(limits, Outcome(Status.REQUESTS, 1))


def test_a_limit_of_nothing_admits_nobody_but_those_who_may_borrow_tokens() -> None:
    for name in ("tokens_per_minute", "requests_per_minute", "concurrency"):
        assert replace(Limits(), **{name: 0}).admits_nobody
    assert not Limits(tokens_per_minute=0, may_borrow=True).admits_nobody
    assert not Limits().admits_nobody
    assert not Limits(1, 1, 1).admits_nobody
