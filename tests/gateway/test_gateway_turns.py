from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chairlift_gateway.turns import FEWEST, SHARE, Turns

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


@pytest.mark.parametrize("num_pieces", [1, FEWEST, 3 * FEWEST, 4 * FEWEST * SHARE])
async def test_pieces_take_turns_in_their_order_and_a_few_in_each_pass(
    until: Any, num_pieces: int
) -> None:
    turns, passes = Turns(), Passes()
    ran: list[tuple[int, int]] = []
    for number in range(num_pieces):
        turns.take(lambda number=number: ran.append((number, passes.num)))
    assert not ran
    await until(lambda: len(ran) == num_pieces)
    passes.stop()
    assert [number for number, _ in ran] == list(range(num_pieces))
    in_pass = [sum(1 for _, each in ran if each == n) for n in sorted({n for _, n in ran})]
    assert in_pass[0] == min(num_pieces, max(FEWEST, num_pieces // SHARE))
    assert all(num <= max(FEWEST, num_pieces // SHARE) for num in in_pass)
    assert all(num == FEWEST for num in in_pass[-3:-1])


async def test_others_run_between_two_passes(until: Any) -> None:
    turns = Turns()
    ran: list[str] = []
    for _ in range(2 * FEWEST):
        turns.take(lambda: ran.append("piece"))
    asyncio.get_running_loop().call_soon(ran.append, "other")
    await until(lambda: len(ran) == 2 * FEWEST + 1)
    assert ran.index("other") == FEWEST


async def test_a_piece_taken_in_a_turn_has_its_own_turn(until: Any) -> None:
    turns = Turns()
    ran: list[int] = []

    def again() -> None:
        ran.append(len(ran))
        if len(ran) < 5:
            turns.take(again)

    turns.take(again)
    await until(lambda: len(ran) == 5)
    turns.take(lambda: ran.append(5))
    await until(lambda: len(ran) == 6)
    assert ran == list(range(6))


async def test_a_piece_that_raises_keeps_nobody_waiting(until: Any) -> None:
    turns = Turns()
    ran: list[int] = []
    told: list[Any] = []

    def fail() -> None:
        raise ZeroDivisionError

    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    turns.take(fail)
    for number in range(3 * FEWEST):
        turns.take(lambda number=number: ran.append(number))
    await until(lambda: len(ran) == 3 * FEWEST)
    turns.take(lambda: ran.append(-1))
    await until(lambda: ran[-1] == -1)
    assert [type(each["exception"]) for each in told] == [ZeroDivisionError]
