"""Why Prometheus does not tell of a pod: its target, its labels or its series. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chairlift_operator.pool_windows import Trouble
from chairlift_operator.prometheus.series import NAME, NAMESPACE, POD, Answer, PodKey, Series


def diagnose(
    missed: Iterable[PodKey], heartbeat: str, up: Answer | None, labels: Answer | None
) -> dict[PodKey, Trouble]:
    """For each pod of which something is known. up, labels: the preflight's answers, None where it
    was not asked."""
    if up is None or up.failure or labels is None or labels.failure:
        return {}
    known = [s for s in labels.series if s.labels.get(NAME) == heartbeat]
    return {
        pod: trouble for pod in missed if (trouble := _trouble(pod, heartbeat, up.of(pod), known))
    }


def _trouble(
    pod: PodKey, heartbeat: str, targets: Sequence[Series], known: Sequence[Series]
) -> Trouble | None:
    """known: all series of the heartbeat's name, by the labels that name a pod."""
    is_known = any(s.pod == pod for s in known)
    if targets and all(target.value == 0 for target in targets):
        return Trouble("TargetDown", "Prometheus cannot scrape it (up is 0)")
    if targets and not is_known:
        return Trouble("SeriesMissing", f"series {heartbeat} is absent from what it exposes")
    if targets or is_known:
        return None
    for label, meta in ((NAMESPACE, "namespace"), (POD, "pod_name")):
        if any(not s.labels.get(label) for s in known):
            return Trouble(
                "LabelMissing",
                f"label {label} is absent from series {heartbeat}: have Prometheus take it from "
                f"__meta_kubernetes_{meta}",
            )
    return Trouble(
        "NoTarget",
        "Prometheus does not scrape it: have it scrape pods that say prometheus.io/scrape",
    )
