"""What a pool must not lose: its last good policies and its step-time model.

New pods start from the policies; another leader starts from the model, and so does another pool of
this operator on the same hardware.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api
from chairlift_operator.kube.children import Owner, owned
from chairlift_operator.kube.objects import PoolObjects
from chairlift_operator.kube.owning import check_name, check_ours
from chairlift_operator.kube.paths import CONFIG_MAP, path_of
from chairlift_operator.memory import Memory
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import hardware_hash
from chairlift_operator.step_time import StepCosts
from chairlift_protocol.policy import Policy, PolicyError
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
KEEP_EVERY_S: Final = 60.0
_MODEL_CHANGE: Final = 0.2  # smaller ones are noise, and not worth a write
# Decodes, prefill tokens, KV tokens. How a model splits a step among its parts wanders, and differs
# between replicas that are as slow: what counts is the time of steps as they come.
_STEPS: Final = (
    (1.0, 0.0, 1024.0),
    (16.0, 0.0, 16_384.0),
    (16.0, 512.0, 16_384.0),
    (128.0, 2048.0, 131_072.0),
)


@dataclass(frozen=True, slots=True)
class KnownHardware:
    """What the pools of this operator know, by hardware: what was learned last."""

    costs: dict[str, StepCosts] = field(default_factory=dict)

    def note(self, hardware: str, learned: StepCosts | None, kept: StepCosts | None) -> None:
        """kept: from an earlier leader, and so older than anything learned under this one."""
        if learned is not None:
            self.costs[hardware] = learned
        elif kept is not None:
            self.costs.setdefault(hardware, kept)


class Keeper:
    """The ConfigMap of policies and model: read once, written when it is worth it."""

    def __init__(
        self,
        objects: PoolObjects,
        api: Api,
        owner: Owner,
        now_s: Callable[[], float],
        known: KnownHardware,
    ) -> None:
        self._known = known
        self._objects = objects
        self._api = api
        self._owner = owner
        self._now_s = now_s
        self._written_at_s = -math.inf

    def prior(self, pool: InferencePool) -> StepCosts | None:
        """The model as an earlier leader knew it, or as another pool on this hardware does."""
        hardware = hardware_hash(pool)
        return self._kept_costs(hardware) or self._known.costs.get(hardware)

    def _kept_costs(self, hardware: str) -> StepCosts | None:
        try:
            kept = json.loads(self._data()[names.COSTS_KEY])
            if kept.pop("hardware") != hardware:
                return None
            costs = StepCosts(**kept)
            return costs if all(map(math.isfinite, asdict(costs).values())) else None
        except (AttributeError, KeyError, ValueError, TypeError, OverflowError):
            return None  # people can write to it too

    async def keep(self, pool: InferencePool, memory: Memory | None) -> None:
        """memory: None before the first plan."""
        data = {names.policy_key(c): self._policy(pool, c, memory) for c in RequestClass}
        hardware = hardware_hash(pool)
        is_of_this = memory is not None and memory.hardware == hardware
        costs = memory.learned if memory is not None and is_of_this else None
        before = self._kept_costs(hardware)
        self._known.note(hardware, costs, before)
        if costs is not None and (before is None or _differ(before, costs)):
            data[names.COSTS_KEY] = json.dumps({"hardware": hardware, **asdict(costs)})
        elif names.COSTS_KEY in self._data():
            data[names.COSTS_KEY] = self._data()[names.COSTS_KEY]
        if data == self._data():
            return
        is_due = self._now_s() - self._written_at_s >= KEEP_EVERY_S
        if self._must_write(pool) or is_due:
            await self._write(pool, data)

    def _must_write(self, pool: InferencePool) -> bool:
        """Engines would not start with what is there."""
        for request_class in RequestClass:
            kept = self._kept(request_class)
            if kept is None or kept != _within(pool, request_class, kept):
                return True
        return False

    def _policy(self, pool: InferencePool, c: RequestClass, memory: Memory | None) -> str:
        good = _last_good(memory, c) if memory else None
        policy = good or self._kept(c) or first_policy(pool, c)
        return json.dumps(_within(pool, c, policy).to_json(), sort_keys=True)

    def _kept(self, request_class: RequestClass) -> Policy | None:
        try:
            return Policy.from_json(json.loads(self._data()[names.policy_key(request_class)]))
        except (KeyError, ValueError, TypeError, PolicyError):
            return None

    def _data(self) -> Mapping[str, str]:
        name = names.policies(self._objects.key[1])
        live = self._objects.child(CONFIG_MAP.name, name)
        data: Mapping[str, str] = (live or {}).get("data") or {}
        return data

    async def _write(self, pool: InferencePool, data: Mapping[str, str]) -> None:
        metadata = {"name": names.policies(pool.name)}
        body = {"apiVersion": "v1", "kind": CONFIG_MAP.name, "metadata": metadata, "data": data}
        manifest = owned(body, pool, self._owner)
        live = self._objects.child(CONFIG_MAP.name, names.policies(pool.name))
        if live is None:
            await check_name(self._api, manifest, self._owner)
        else:
            check_ours(live, self._owner)
        self._objects.note(await self._api.apply(path_of(manifest), manifest, names.FIELD_MANAGER))
        self._written_at_s = self._now_s()


def _within(pool: InferencePool, request_class: RequestClass, policy: Policy) -> Policy:
    """An engine refuses to start with more than it reserved memory for."""
    aims = pool.spec.aims(request_class)
    step_tokens = aims.step_tokens.clamp(policy.step_tokens)
    return replace(
        policy,
        batch_size=aims.batch_size.clamp(policy.batch_size),
        step_tokens=step_tokens,
        chunk_tokens=min(policy.chunk_tokens, step_tokens),
    )


def _last_good(memory: Memory, request_class: RequestClass) -> Policy | None:
    """The most cautious of what served within the objectives and was read back."""
    good = [
        replace(
            known.wanted,
            batch_size=known.last_good.batch_size,
            step_tokens=known.last_good.step_tokens,
            chunk_tokens=known.last_good.step_tokens,
        )
        for known in memory.replicas.values()
        if known.request_class is request_class
        and known.wanted is not None
        and known.last_good is not None
        and known.num_unverified == 0
    ]
    return min(good, key=lambda p: (p.step_tokens, p.batch_size, p.generation), default=None)


def _differ(before: StepCosts, after: StepCosts) -> bool:
    pairs = ((before.step_s(*step), after.step_s(*step)) for step in _STEPS)
    return any(abs(a - b) > _MODEL_CHANGE * abs(b) for b, a in pairs)
