"""Every value of a policy moves while requests run: no request is dropped, none is altered."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from chairlift_engine.audit import audit
from chairlift_engine.clock import VirtualClock
from chairlift_engine.config import Capacity
from chairlift_engine.engine import Engine, StepReport
from chairlift_engine.request import FinishReason, Request, SamplingParams
from chairlift_engine.scheduler import Scheduler
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import Profile
from chairlift_protocol.policy import Generation, Policy, SloThresholds, TenantPolicy
from chairlift_protocol.wire import RequestClass

CAPACITY = Capacity(
    batch_size=16, step_tokens=256, num_blocks=60, block_tokens=16, model_length_tokens=400
)
POLICY = Policy(Generation(0, 0), 16, 256, 256, 1.0, SloThresholds(1000, 100))
TENANTS = ("acme", "zen", "anonymous")
NUM_REQUESTS = 30


class Run:
    """Thirty requests from start to end, with or without somebody at the policy."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        clock = VirtualClock()
        runner = SimulatorRunner(Profile(), clock, seed)
        self.engine = Engine(Scheduler(CAPACITY, POLICY), runner, clock, self.on_report)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.reasons: dict[str, FinishReason] = {}
        self.num_preemptions = 0
        self.most_running = 0

    def on_report(self, report: StepReport) -> None:
        self.num_preemptions += report.num_preemptions
        for event in report.tokens:
            self.tokens[event.request.id].append(event.token_id)
            if event.finish_reason is not None:
                self.reasons[event.request.id] = event.finish_reason
        assert not report.ended

    def add_all(self) -> None:
        for number in range(NUM_REQUESTS):
            prompt = [self.rng.randrange(97, 123) for _ in range(self.rng.choice([5, 40, 150]))]
            sampling = SamplingParams(max_tokens=self.rng.randint(5, 40), seed=number)
            request_class = self.rng.choice(list(RequestClass))
            tenant = self.rng.choice(TENANTS)
            self.engine.request_add(
                Request(f"r{number}", prompt, sampling, 0.0, request_class, tenant)
            )

    def step_until_done(self, changes_policy: bool) -> None:
        num_changes = 0
        for step in range(5000):
            if len(self.reasons) == NUM_REQUESTS:
                return
            if changes_policy and step % 3 == 0:
                num_changes += 1
                # Now and then one that lets all run, or what a hard one holds up would never end.
                policy = self.anything(num_changes) if step % 30 else self.everything(num_changes)
                taken = self.engine.request_policy(policy)
                self.engine.step()
                assert taken.result(0) == self.engine.scheduler.policy == policy
            else:
                self.engine.request_snapshot(lambda _: None)  # what may not run idles no real time
                self.engine.step()
        raise AssertionError(f"unfinished: {NUM_REQUESTS - len(self.reasons)}")

    def everything(self, number: int) -> Policy:
        return Policy(Generation(1, number), 16, 256, 256, 1.0, SloThresholds(1000, 100))

    def anything(self, number: int) -> Policy:
        rng = self.rng
        return Policy(
            generation=Generation(1, number),
            batch_size=rng.randint(1, 16),
            step_tokens=rng.choice([16, 50, 256]),
            chunk_tokens=rng.choice([16, 33, 256]),
            batch_class_share=rng.choice([0.0, 0.2, 0.7, 1.0]),
            slo=SloThresholds(rng.uniform(1, 2000), rng.uniform(1, 200)),
            scheduling=rng.choice(["continuous", "continuous", "static"]),
            batch_min_share=rng.choice([0.0, 0.05, 0.5]),
            tenants={
                tenant: TenantPolicy(
                    weight=rng.choice([0.5, 1.0, 4.0]),
                    slots=rng.choice([None, 1, 5]),
                    kv_tokens=rng.choice([None, 16, 400]),
                    waiting=rng.choice([None, 0, 3]),
                )
                for tenant in rng.sample(TENANTS, 2)
            },
        )


@pytest.mark.parametrize("seed", range(4))
def test_any_change_of_policy_leaves_every_text_as_it_was(seed: int) -> None:
    undisturbed, disturbed = Run(seed), Run(seed)
    for run in (undisturbed, disturbed):
        run.add_all()
        run.step_until_done(changes_policy=run is disturbed)
    assert disturbed.tokens == undisturbed.tokens
    assert disturbed.reasons == undisturbed.reasons
    assert disturbed.num_preemptions > 0
    residency = disturbed.engine.scheduler.residency
    audit(residency)
    assert residency.blocks.num_free == CAPACITY.num_blocks
