"""Who goes, and when a count may be lowered so that Kubernetes takes exactly those. Pure.

A Deployment chooses its own victims: unassigned pods first, then pending, then unready, then by
deletion cost. So a count is lowered only while all that rank lower than the drained ones are
drained too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from chairlift_operator.kube.pod_view import SCALE, PodView

# Below any that a person would write.
VICTIM_COST: Final = -1_000_000


def num_removable(pods: Sequence[PodView], finished: Collection[str], replicas: int) -> int:
    """By how many `replicas` may be lowered now. pods: of one Deployment; finished: names of those
    that may go. What was lowered and not yet carried out counts."""
    active = [pod for pod in pods if pod.counts]
    if replicas > len(active):
        return 0  # a pod not made yet would be the one that is not made
    going = [pod for pod in active if pod.name in finished]
    others = [pod.deletion_rank for pod in active if pod.name not in finished]
    first = min(others, default=None)
    sure = [pod for pod in going if first is None or pod.deletion_rank < first]
    already = max(0, len(active) - replicas)
    return max(0, min(len(sure) - already, replicas))


def blocking(pods: Sequence[PodView], finished: Collection[str]) -> PodView | None:
    """Who would be taken instead of those that shall go."""
    others = [pod for pod in pods if pod.counts and pod.name not in finished]
    going = [pod for pod in pods if pod.counts and pod.name in finished]
    first = min(others, key=lambda pod: pod.deletion_rank, default=None)
    if first is None or not going:
        return None
    worst = max(going, key=lambda pod: pod.deletion_rank)
    return first if first.deletion_rank <= worst.deletion_rank else None


def is_over(pod: PodView, num_left: int | None, now_s: float) -> bool:
    """Whether a marked pod may go. num_left: requests it still runs, None when it does not say."""
    if pod.mark is None:
        return False
    if not pod.is_running or pod.is_failing or num_left == 0:
        return True
    return now_s - pod.mark.since_s > pod.mark.timeout_s


def wants_fewer(pod: PodView) -> bool:
    return pod.mark is not None and pod.mark.why == SCALE
