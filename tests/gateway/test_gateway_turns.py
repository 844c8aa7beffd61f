from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chairlift_gateway.turns import AT_ONCE, SHARE, TURN_S, Turns

pytestmark = pytest.mark.anyio


class Passes:
    """Counts the event loop's passes for as long as it is asked to."""

    def __init__(self) -> None:
        self.num = 0
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._count)

    def stop(self) -> None:
        self._next.cancel()

    def _count(self) -> None:
        self.num += 1
        self._next = self._loop.call_soon(self._count)


@pytest.fixture
async def turns() -> Turns:
    """In which no time passes."""
    return Turns(lambda: 7.0)


@pytest.mark.parametrize("num_pieces", [1, AT_ONCE, 3 * AT_ONCE, 5 * AT_ONCE * SHARE])
async def test_a_few_pieces_go_at_once_and_a_few_more_in_each_pass_in_their_order(
    turns: Turns, until: Any, num_pieces: int
) -> None:
    passes = Passes()
    ran: list[tuple[int, int]] = []
    for number in range(num_pieces):
        turns.take(lambda number=number: ran.append((number, passes.num)))
    assert len(ran) == min(num_pieces, AT_ONCE)
    await until(lambda: len(ran) == num_pieces)
    passes.stop()
    assert [number for number, _ in ran] == list(range(num_pieces))
    in_pass = [sum(1 for _, each in ran if each == n) for n in sorted({n for _, n in ran})]
    assert all(num <= max(AT_ONCE, num_pieces // SHARE) for num in in_pass)
    if num_pieces > AT_ONCE * SHARE:
        assert in_pass[1] == (num_pieces - AT_ONCE) // SHARE > AT_ONCE
        assert in_pass[-2] == AT_ONCE


async def test_pieces_that_come_one_by_one_all_go_at_once() -> None:
    now_s = 0.0
    turns = Turns(lambda: now_s)
    ran: list[int] = []
    for number in range(3 * AT_ONCE):
        turns.take(lambda number=number: ran.append(number))
        now_s += 1.01 * TURN_S / AT_ONCE
    assert ran == list(range(3 * AT_ONCE))


async def test_nobody_goes_before_those_that_wait(until: Any) -> None:
    now_s = 0.0
    turns = Turns(lambda: now_s)
    ran: list[int] = []
    for number in range(AT_ONCE + 2):
        turns.take(lambda number=number: ran.append(number))
    now_s += 2 * TURN_S
    turns.take(lambda: ran.append(-1))
    await until(lambda: len(ran) == AT_ONCE + 3)
    assert ran == [*range(AT_ONCE + 2), -1]


async def test_others_run_between_two_passes(turns: Turns, until: Any) -> None:
    ran: list[str] = []
    for _ in range(3 * AT_ONCE):
        turns.take(lambda: ran.append("piece"))
    asyncio.get_running_loop().call_soon(ran.append, "other")
    await until(lambda: len(ran) == 3 * AT_ONCE + 1)
    assert ran.index("other") == 2 * AT_ONCE


async def test_a_piece_that_raises_keeps_nobody_waiting(turns: Turns, until: Any) -> None:
    ran: list[int] = []
    told: list[Any] = []

    def fail() -> None:
        raise ZeroDivisionError

    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    for number in range(AT_ONCE):
        turns.take(lambda number=number: ran.append(number))
    turns.take(fail)
    for number in range(3 * AT_ONCE):
        turns.take(lambda number=number: ran.append(number))
    await until(lambda: len(ran) == 4 * AT_ONCE)
    turns.take(lambda: ran.append(-1))
    await until(lambda: ran[-1] == -1)
    assert [type(each["exception"]) for each in told] == [ZeroDivisionError]
