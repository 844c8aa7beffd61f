"""A pod as the operator's decisions see it: read from the API's object once, then plain values."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Self

from chairlift_operator.kube import names
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
SCALE: Final = "scale"
ROLLOUT: Final = "rollout"
_PULL_TROUBLE: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")


@dataclass(frozen=True, slots=True)
class Mark:
    """On a pod that is to go. why: SCALE, fewer are wanted; ROLLOUT, another takes its place."""

    since_s: float
    timeout_s: float
    why: str

    def to_text(self) -> str:
        body = {"since": self.since_s, "timeout": self.timeout_s, "why": self.why}
        return json.dumps(body)

    @classmethod
    def from_text(cls, text: str | None) -> Self | None:
        if not text:
            return None
        try:
            body = json.loads(text)
            return cls(float(body["since"]), float(body["timeout"]), str(body["why"]))
        except (ValueError, KeyError, TypeError):
            return cls(0.0, 0.0, SCALE)  # somebody's own writing: it is to go, and at once


@dataclass(frozen=True, slots=True)
class PodView:
    """unschedulable: why no node takes it. trouble: why it does not come up, in words.
    ready_since_s: 0 where it is not ready.
    """

    name: str
    uid: str
    request_class: RequestClass
    revision: str
    ip: str | None
    is_assigned: bool
    is_running: bool
    is_ready: bool
    is_terminating: bool
    mark: Mark | None
    deletion_cost: int
    created_s: float
    unschedulable: str | None = None
    unschedulable_since_s: float = math.inf
    trouble: str | None = None
    ready_since_s: float = 0.0

    @property
    def counts(self) -> bool:
        """Towards the replicas of its Deployment."""
        return not self.is_terminating

    @property
    def is_failing(self) -> bool:
        """It will not come up by itself, as far as one can tell."""
        return self.trouble is not None

    @property
    def deletion_rank(self) -> tuple[bool, bool, bool, int]:
        """Kubernetes' own order for pods that are too many, lowest first, as far as it is sure."""
        return self.is_assigned, self.is_running, self.is_ready, self.deletion_cost


def pod_view(pod: Json) -> PodView | None:
    """None for a pod that is none of a pool's engines, or that has ended."""
    metadata, status = pod["metadata"], pod.get("status", {})
    labels = metadata.get("labels", {})
    annotations = metadata.get("annotations", {})
    if labels.get(names.ROLE_LABEL) != names.ENGINE_ROLE:
        return None
    if labels.get(names.CLASS_LABEL) not in list(RequestClass):
        return None
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    conditions = {c["type"]: c for c in status.get("conditions", ())}
    placed = conditions.get("PodScheduled", {})
    is_unschedulable = placed.get("status") == "False" and placed.get("reason") == "Unschedulable"
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        request_class=RequestClass(labels[names.CLASS_LABEL]),
        revision=labels.get(names.REVISION_LABEL, ""),
        ip=status.get("podIP"),
        is_assigned=bool(pod.get("spec", {}).get("nodeName")),
        is_running=status.get("phase") == "Running",
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        is_terminating=bool(metadata.get("deletionTimestamp")),
        mark=Mark.from_text(annotations.get(names.DRAIN_ANNOTATION)),
        deletion_cost=_whole(annotations.get(names.DELETION_COST_ANNOTATION)),
        created_s=unix_s(metadata.get("creationTimestamp")),
        unschedulable=placed.get("message", "no node takes it") if is_unschedulable else None,
        unschedulable_since_s=(
            unix_s(placed.get("lastTransitionTime")) if is_unschedulable else math.inf
        ),
        trouble=_trouble(status),
        ready_since_s=ready_since_s(status),
    )


def ready_since_s(status: Json) -> float:
    """0 for a pod that is not ready."""
    ready: Json = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})
    return unix_s(ready.get("lastTransitionTime")) if ready.get("status") == "True" else 0.0


def unix_s(timestamp: str | None) -> float:
    if not timestamp:
        return 0.0
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def _whole(text: str | None) -> int:
    try:
        return int(text or 0)
    except ValueError:
        return 0


def _trouble(status: Json) -> str | None:
    for container in status.get("containerStatuses", ()):
        waiting = container.get("state", {}).get("waiting", {})
        reason = waiting.get("reason")
        if reason in _PULL_TROUBLE:
            return f"its image cannot be had: {waiting.get('message', reason)}"
        if reason == "CrashLoopBackOff":
            ended = container.get("lastState", {}).get("terminated", {})
            code, count = ended.get("exitCode", "?"), container.get("restartCount", 0)
            log = (ended.get("message") or "").strip().splitlines()  # it may be the log's end
            said = f": {log[-1].strip()}" if log else ""
            return f"it has ended {count} times, last with exit code {code}{said}"
        if reason == "CreateContainerConfigError":
            return f"it cannot be made: {waiting.get('message', reason)}"
    return None
