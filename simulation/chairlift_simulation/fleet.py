"""The replicas of a pool in virtual time: they start, serve, drain and go, as `chairlift local`'s.

Each is the engine's own loop on its own clock. A step that ends after the moment that the pool has
reached is not yet known to anybody: its report is kept back until then. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from chairlift_engine.config import MAX_WAITING, Capacity
from chairlift_engine.engine import StepReport
from chairlift_engine.queue_room import tenants_room
from chairlift_engine.residency import Gauges
from chairlift_engine.simulator_profile import Profile
from chairlift_engine.tenancy import ANONYMOUS
from chairlift_operator.decisions import SetReplicas
from chairlift_operator.policy_plan import first_policy
from chairlift_operator.snapshot import EngineCapacity, Phase, PolicyReadback, ReplicaSnapshot
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_values import BLOCK_TOKENS
from chairlift_protocol.load import Load
from chairlift_protocol.policy import Policy
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.counters import EngineCounters
from chairlift_simulation.records import Journey, ReplicaState
from chairlift_simulation.replica import VirtualReplica

INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
_SEEDS_APART: Final = 1000


@dataclass(frozen=True, slots=True)
class Hardware:
    """What every replica runs on; odd_ones: those, by name, that run on something else.

    kv_tokens: memory for context. block_tokens: of a KV block; the law counts on the engine's.
    """

    profile: Profile
    kv_tokens: int
    block_tokens: int = BLOCK_TOKENS
    odd_ones: dict[str, Profile] = field(default_factory=dict)


class Member:
    """One replica. engine is None while it starts."""

    def __init__(self, name: str, request_class: RequestClass, asked_s: float) -> None:
        self.name = name
        self.request_class = request_class
        self.asked_s = asked_s
        self.engine: VirtualReplica | None = None
        self.counters = EngineCounters()
        self.is_draining = False
        self.open: dict[str, Journey] = {}
        self._kept_back: deque[StepReport] = deque()
        self._gauges: Gauges | None = None

    def start(
        self, capacity: Capacity, policy: Policy, profile: Profile, seed: int, at_s: float
    ) -> None:
        self.engine = VirtualReplica(
            capacity, policy, profile, seed, self._kept_back.append, start_s=at_s
        )

    @property
    def phase(self) -> Phase:
        if self.is_draining:
            return Phase.DRAINING
        return Phase.STARTING if self.engine is None else Phase.SERVING

    def advance(self, until_s: float) -> Iterator[StepReport]:
        """Compute up to that time; what has become known by then."""
        if self.engine is None:
            return
        self.engine.advance(until_s)
        while self._kept_back and self._kept_back[0].now_s <= until_s:
            report = self._kept_back.popleft()
            self.counters.take(report)
            self._gauges = report.gauges
            yield report

    @property
    def gauges(self) -> Gauges:
        assert self.engine is not None
        return self._gauges or self.engine.scheduler.residency.gauges()

    def load(self) -> Load:
        assert self.engine is not None
        gauges, policy = self.gauges, self.engine.scheduler.policy
        return Load(
            num_running=sum(gauges.num_running.values()),
            num_waiting=sum(gauges.num_waiting.values()),
            waiting_prefill_tokens=gauges.waiting_prefill_tokens,
            free_kv_tokens=gauges.num_free_blocks * self.engine.scheduler.capacity.block_tokens,
            lend_share=policy.batch_class_share,
            policy_generation=(policy.generation.term, policy.generation.counter),
            draining=self.is_draining,
        )

    def is_full(self, request_class: RequestClass, tenant: str) -> bool:
        """As the engine's door sees it."""
        assert self.engine is not None
        residency = self.engine.scheduler.residency
        num_taken = residency.num_running[INTERACTIVE]
        if request_class is BATCH:
            num_taken += residency.num_running[BATCH]
        num_free_slots = max(0, residency.policy.batch_size - num_taken)
        num_waiting = residency.num_waiting[request_class]
        if num_waiting + 1 > MAX_WAITING + num_free_slots:
            return True
        if tenant == ANONYMOUS:
            return False
        own = residency.tenants.with_work.get(tenant)
        room = tenants_room(MAX_WAITING, num_waiting)
        return (own.num_waiting if own else 0) + 1 > room + num_free_slots

    def observed(self, now_s: float) -> ReplicaSnapshot:
        if self.engine is None:
            return ReplicaSnapshot(self.name, False, self.request_class, phase=self.phase)
        scheduler = self.engine.scheduler
        capacity = scheduler.capacity
        bounds = EngineCapacity(
            capacity.batch_size, capacity.step_tokens, capacity.kv_tokens,
            capacity.model_length_tokens, capacity.block_tokens,
        )  # fmt: skip
        return ReplicaSnapshot(
            name=self.name,
            ready=not self.is_draining,
            request_class=self.request_class,
            sample=self.counters.sample(self.gauges, scheduler.policy, capacity.num_blocks, now_s),
            sampled_at_s=now_s,
            policy=PolicyReadback(scheduler.desired, scheduler.policy, bounds),
            phase=self.phase,
        )

    def state(self) -> ReplicaState:
        if self.engine is None:
            return ReplicaState(self.name, self.request_class, False, self.is_draining)
        gauges, scheduler = self.gauges, self.engine.scheduler
        policy = scheduler.policy
        return ReplicaState(
            self.name,
            self.request_class,
            not self.is_draining,
            self.is_draining,
            policy.batch_size,
            policy.step_tokens,
            policy.batch_class_share,
            sum(gauges.num_running.values()),
            sum(gauges.num_waiting.values()),
            gauges.num_running[BATCH],
            1 - gauges.num_free_blocks / scheduler.capacity.num_blocks,
        )


class Fleet:
    def __init__(
        self,
        pool: InferencePool,
        hardware: Hardware,
        seed: int,
        first: Callable[[RequestClass], Policy] | None = None,
    ) -> None:
        """first: what a new engine of a class starts with; the operator's choice by default."""
        self.members: dict[str, Member] = {}
        self.replica_s = 0.0  # held so far by those that are gone
        self._pool = pool
        self._hardware = hardware
        self._seed = seed
        self._first = first or (lambda request_class: first_policy(pool, request_class))
        self._num_made = dict.fromkeys(RequestClass, 0)

    def of(self, request_class: RequestClass) -> list[Member]:
        """Without those that drain."""
        return [
            m
            for m in self.members.values()
            if m.request_class is request_class and not m.is_draining
        ]

    def serving(self) -> list[Member]:
        return [m for m in self.members.values() if m.phase is Phase.SERVING]

    def grow(self, action: SetReplicas, now_s: float) -> list[Member]:
        """Those that were asked for now."""
        grown = []
        while len(self.of(action.request_class)) < action.count:
            number = self._num_made[action.request_class]
            self._num_made[action.request_class] += 1
            member = Member(f"{action.request_class}-{number}", action.request_class, now_s)
            self.members[member.name] = member
            grown.append(member)
        return grown

    def make_ready(self, member: Member, now_s: float) -> None:
        aims, hardware = self._pool.spec.aims(member.request_class), self._hardware
        capacity = Capacity(
            aims.batch_size.max,
            aims.step_tokens.max,
            hardware.kv_tokens // hardware.block_tokens,
            hardware.block_tokens,
            self._pool.spec.model.max_length,
            self._pool.spec.runtime.share_prefixes,
        )
        profile = hardware.odd_ones.get(member.name, hardware.profile)
        ordinal = list(RequestClass).index(member.request_class)
        number = int(member.name.rpartition("-")[2])
        seed = (self._seed * 2 + ordinal) * _SEEDS_APART + number
        member.start(capacity, self._first(member.request_class), profile, seed, now_s)

    def remove(self, member: Member, now_s: float) -> None:
        self.replica_s += now_s - member.asked_s
        del self.members[member.name]

    def held_replica_s(self, now_s: float) -> float:
        """Seconds that replicas were held in all, those that start and drain included."""
        return self.replica_s + sum(now_s - m.asked_s for m in self.members.values())
