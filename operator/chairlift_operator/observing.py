"""One engine as a snapshot holds it: its counters and its policy, each with why it is missing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from chairlift_operator.engine_client import EngineClient
from chairlift_operator.exposition import EngineSample
from chairlift_operator.http_asking import EngineError
from chairlift_operator.snapshot import Phase, ReplicaSnapshot


async def observe_engine(
    client: EngineClient, now_s: Callable[[], float], phase: Phase, ready: bool = False
) -> ReplicaSnapshot:
    """ready: as the caller knows it."""

    async def sample() -> tuple[EngineSample, float]:
        return await client.scrape(), now_s()

    sampled, policy = await asyncio.gather(sample(), client.read_policy(), return_exceptions=True)
    for outcome in (sampled, policy):
        if isinstance(outcome, BaseException) and not isinstance(outcome, EngineError):
            raise outcome
    taken, taken_at_s = (None, None) if isinstance(sampled, BaseException) else sampled
    return ReplicaSnapshot(
        name=client.endpoint.name,
        ready=ready,
        request_class=client.endpoint.request_class,
        phase=phase,
        sample=taken,
        sampled_at_s=taken_at_s,
        scrape_failure=str(sampled) if isinstance(sampled, BaseException) else None,
        policy=None if isinstance(policy, BaseException) else policy,
        policy_failure=str(policy) if isinstance(policy, BaseException) else None,
    )
