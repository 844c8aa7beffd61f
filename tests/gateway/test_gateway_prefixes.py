from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from chairlift_gateway.prefixes import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_REMEMBERED,
    PARTS_AT,
    Partings,
    prefix_names,
)


def chat(*texts: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": text} for text in texts]
    return json.dumps({**fields, "messages": messages}).encode()


@given(st.text(min_size=1), st.text(), st.text())
def test_prompts_that_begin_alike_have_their_first_names_in_common(
    word: str, one: str, other: str
) -> None:
    common = word * 3000
    first, second = prefix_names("a", chat(common, one)), prefix_names("a", chat(common, other))
    assert first[0] == second[0]


def test_names_end_where_texts_part_and_only_whole_blocks_have_one() -> None:
    long = "x" * 5 * BLOCK_BYTES
    one, other = prefix_names("a", chat(long + "1")), prefix_names("a", chat(long + "2" * 5000))
    assert one == other[: len(one)]
    assert prefix_names("a", chat("short")) == ()
    assert len(prefix_names("a", chat("x" * 100 * BLOCK_BYTES))) == MAX_BLOCKS


def test_tenants_have_no_name_in_common_and_fields_before_the_prompt_do_not_count() -> None:
    text = "x" * 2 * BLOCK_BYTES
    assert not set(prefix_names("a", chat(text))) & set(prefix_names("b", chat(text)))
    assert prefix_names("a", chat(text, seed=1)) == prefix_names("a", chat(text, seed=22))


def test_a_conversation_keeps_its_name_as_it_grows() -> None:
    partings = Partings()
    assert {partings.own_name(range(length)) for length in range(1, 10)} == {0}
    assert partings.own_name(()) is None


def test_what_many_prompts_have_in_common_names_none_of_them() -> None:
    partings = Partings()
    talks = [(0, 100 + talk, 200 + talk) for talk in range(PARTS_AT + 4)]
    for talk in talks:
        partings.own_name(talk)
    assert [partings.own_name(talk) for talk in talks] == [talk[1] for talk in talks]
    assert partings.own_name((0,)) == 0  # nothing of its own


def test_only_so_many_blocks_are_remembered_and_the_longest_unseen_is_forgotten() -> None:
    partings = Partings()
    for follower in range(PARTS_AT):
        partings.own_name((0, 1 + follower))
    for other in range(MAX_REMEMBERED):
        partings.own_name((100 + 2 * other, 101 + 2 * other))
    assert partings.own_name((0, 1)) == 0
