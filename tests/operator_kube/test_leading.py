"""Which pools get a turn, and when; controllers only write down that they had one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self, cast

import pytest

from chairlift_operator.kube import leading
from chairlift_operator.kube.leading import Operator
from chairlift_operator.kube.settings import NUM_TURNS, TICK_S, Settings

KEY = ("team", "chat")
BODY = {"metadata": {"namespace": "team", "name": "chat", "uid": "u"}}
TURN_S = TICK_S / NUM_TURNS


class Lease:
    term = 3

    def is_held(self) -> bool:
        return True


class Controller:
    """turns: what all of them were called for."""

    turns: list[str]
    changes: asyncio.Event
    uid = "u"

    def __init__(self, body: Any, term: int, tools: Any) -> None:
        pass

    async def tick(self, body: Any) -> None:
        self.turns.append("tick")

    async def reconcile(self, body: Any) -> None:
        self.turns.append("change")
        self.changes.set()

    @classmethod
    def forgetful(cls) -> type[Self]:
        cls.turns, cls.changes = [], asyncio.Event()
        return cls


Body = Callable[[Operator, type[Controller]], Any]


@pytest.fixture
def lead(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Runs an operator that leads one pool beside `body`."""

    async def main(body: Body) -> None:
        monkeypatch.setattr(leading, "PoolController", Controller.forgetful())
        operator = Operator(settings, lambda: {KEY: BODY})
        async with asyncio.timeout(20):
            async with asyncio.TaskGroup() as tasks:
                loop = operator._lead(cast(Any, Lease()), cast(Any, None), tasks)
                leads = tasks.create_task(loop)
                await body(operator, Controller)
                leads.cancel()

    return lambda body: asyncio.run(main(body))


def test_a_change_just_before_a_turn_is_not_left_for_the_next_change(lead: Any) -> None:
    """The turn cuts short the wait for the end of a flurry."""

    async def body(operator: Operator, controllers: type[Controller]) -> None:
        await asyncio.sleep(TURN_S - 0.1)
        operator.wake(KEY)
        await controllers.changes.wait()
        assert controllers.turns == ["tick", "change"]  # before its own next turn, 5 s on

    lead(body)


def test_a_change_during_its_pools_turn_is_taken_when_that_is_over(lead: Any) -> None:
    async def body(operator: Operator, controllers: type[Controller]) -> None:
        operator._busy.add(KEY)
        operator.wake(KEY)
        assert operator._take_changed() == []
        operator._busy.discard(KEY)
        operator.wake(KEY)
        await controllers.changes.wait()
        assert operator._take_changed() == []

    lead(body)
