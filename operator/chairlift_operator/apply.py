"""Perform a plan's actions: what shrinks first, then what grows, each verified by read-back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from chairlift_operator.cluster import ActionResult
from chairlift_operator.decisions import Action, SetPolicy, SetReplicas
from chairlift_operator.engine_client import EngineClient
from chairlift_operator.http_asking import EngineError


async def apply_actions(
    actions: Sequence[Action],
    clients: Mapping[str, EngineClient],
    set_replicas: Callable[[SetReplicas], Awaitable[ActionResult]],
) -> tuple[ActionResult, ...]:
    """`set_replicas` begins what takes minutes and says what it began."""
    results: list[ActionResult] = []
    for shrinks in (True, False):
        phase = [action for action in actions if action.shrinks is shrinks]
        policies = [a for a in phase if isinstance(a, SetPolicy)]
        results += await asyncio.gather(*(_set_policy(action, clients) for action in policies))
        for action in phase:
            if isinstance(action, SetReplicas):
                results.append(await set_replicas(action))
    return tuple(results)


async def _set_policy(action: SetPolicy, clients: Mapping[str, EngineClient]) -> ActionResult:
    client = clients.get(action.replica)
    if client is None:
        return ActionResult(action, False, f"{action.replica} is gone")
    try:
        readback = await client.write_policy(action.policy)
    except EngineError as error:
        return ActionResult(action, False, str(error))
    if readback.desired != action.policy:
        held = readback.desired.generation.to_json()
        return ActionResult(action, False, f"wrote the policy, but read back generation {held}")
    return ActionResult(action, True, "read back")
