"""Whether interactive requests wait for too long, and what a pool carries. Pure: for `lowering`.

Too long is what makes the batch share fall before anything is missed: a request that has spent part
of its objective in the queue, or that a gateway holds back. That something waits for a step is no
sign; in a large pool it nearly always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from chairlift_operator import law
from chairlift_operator.batch_share import QUEUE_SHARE
from chairlift_operator.decisions import BLIND, ReplicaReport
from chairlift_operator.memory import Memory
from chairlift_operator.quotas.rates import Strain
from chairlift_operator.replica_law import FILL
from chairlift_operator.snapshot import GatewaySnapshot, Phase
from chairlift_operator.spec import InferencePool
from chairlift_operator.workload import lengths_of, rate_per_replica
from chairlift_protocol.wire import RequestClass

MINUTE_S: Final = 60.0


def strain_of(
    pool: InferencePool,
    reports: Sequence[ReplicaReport],
    memory: Memory,
    gateway: GatewaySnapshot,
    at_s: float,
) -> Strain:
    """By one tick."""
    serving = [r for r in reports if r.phase is Phase.SERVING and r.ready]
    own = [r for r in serving if r.request_class is RequestClass.INTERACTIVE]
    others = [r.name for r in serving if r.request_class is RequestClass.BATCH]
    return Strain(
        at_s,
        _is_crowded(pool, own, memory, gateway),
        _carried(pool, RequestClass.INTERACTIVE, [r.name for r in own], memory),
        _carried(pool, RequestClass.BATCH, others, memory) if others else 0.0,
    )


def _is_crowded(
    pool: InferencePool, own: Sequence[ReplicaReport], memory: Memory, gateway: GatewaySnapshot
) -> bool | None:
    """That one request waits is enough; that none does must be known of all."""
    if any(c.num_held > 0 for c in gateway.classes if c.request_class is RequestClass.INTERACTIVE):
        return True
    longest_s = QUEUE_SHARE * pool.spec.interactive.slo.time_to_first_token.threshold_s
    waited = [_waited_s(report, memory) for report in own]
    if any(each is not None and each > longest_s for each in waited):
        return True
    is_known = own and gateway.failure is None and all(each is not None for each in waited)
    return False if is_known else None


def _waited_s(report: ReplicaReport, memory: Memory) -> float | None:
    """How long its oldest queued interactive request has waited; None where it did not say."""
    known = memory.replicas.get(report.name)
    latest = known.history.latest if known is not None else None
    if latest is None or report.health in BLIND:
        return None
    oldest_s = latest.sample.of(RequestClass.INTERACTIVE).oldest_waiting_s
    return 0.0 if oldest_s is None and report.num_waiting == 0 else oldest_s


def _carried(
    pool: InferencePool, request_class: RequestClass, names: Sequence[str], memory: Memory
) -> float | None:
    """Tokens a minute within the objectives, of requests as long as those of the last minutes.

    The mean replica of those whose model came true lately stands for all.
    """
    known = {n: m for n in names if (m := memory.replicas.get(n)) and m.model.stands}
    aims = pool.spec.aims(request_class)
    target_s = law.MARGIN * aims.slo.inter_token_latency.threshold_s
    lengths = lengths_of(request_class, known)
    per_s = rate_per_replica(request_class, known, target_s, aims.batch_size.max)
    if lengths is None or not per_s:
        return None
    tokens = lengths.prompt_tokens + lengths.output_tokens
    return MINUTE_S * FILL * per_s * len(names) * tokens
