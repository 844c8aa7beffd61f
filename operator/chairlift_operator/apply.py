"""Perform a plan's actions: what shrinks first, then what grows, each verified by read-back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from chairlift_operator.cluster import ActionResult
from chairlift_operator.decisions import SetPolicy
from chairlift_operator.engine_client import EngineClient, EngineError


async def apply_actions(
    actions: Sequence[SetPolicy], clients: Mapping[str, EngineClient]
) -> tuple[ActionResult, ...]:
    results: list[ActionResult] = []
    for shrinks in (True, False):
        phase = [action for action in actions if action.shrinks is shrinks]
        results += await asyncio.gather(*(_set_policy(action, clients) for action in phase))
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
