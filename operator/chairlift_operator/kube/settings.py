"""What the operator's process is told by its environment, and the times it keeps, with reasons."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from chairlift_operator.spec_metrics import PROMETHEUS_URL

TICK_S: Final = 5.0  # the loop's grid; what must be seconds fresh is read each time
NUM_TURNS: Final = 5  # pools take turns within a tick, so that a thousand do not come at once
REST_S: Final = 60.0  # a pool that was idle for so long is at rest: its gateways say when that ends
LOOK_S: Final = 180.0  # between two looks at a pool at rest, for what gateways cannot tell
RESYNC_S: Final = 60.0  # pools are listed anew, should a watch have missed an end
# A watch may hang silently: the server ends it first, and a client that hears nothing gives up.
WATCH_S: Final = 300.0
WATCH_SILENCE_S: Final = WATCH_S + 30.0
CONNECT_S: Final = 10.0
REQUEST_S: Final = 20.0
KEEPALIVE_S: Final = 70.0  # shorter than engines and gateways keep an idle connection
# A pool's tick waits for engines and for the API server: many at once, but not a thousand sockets.
NUM_CONCURRENT_POOLS: Final = 32
LEASE_S: Final = 15.0  # a standby takes over so long after the leader's last renewal
RENEW_S: Final = 5.0
# A leader that could not renew for so long writes nothing more: before any standby takes over.
DEADLINE_S: Final = 10.0
STATUS_S: Final = 60.0  # between two writes of a status in which only measurements changed
SEEN_AGAIN_S: Final = 600.0  # the same, where they are as before and only newer
METRICS_PORT: Final = 8082
_RELEASE: Final = "0.1.0"  # of the images, where nobody names any; the chart does


class SettingsError(ValueError):
    """An environment that the operator cannot run in; the message names the variable."""


@dataclass(frozen=True, slots=True)
class Images:
    """For pools that name none."""

    engine: str
    simulator: str
    gateway: str


@dataclass(frozen=True, slots=True)
class Settings:
    """namespaces: those whose pools are looked after; empty for all.

    instance: tells two installs in one namespace apart.
    prometheus_url: for pools that name no source of metrics.
    """

    identity: str
    namespace: str
    instance: str
    namespaces: tuple[str, ...]
    images: Images
    metrics_port: int = METRICS_PORT
    prometheus_url: str | None = None

    @property
    def operator(self) -> str:
        """As the OPERATOR_ANNOTATION of every object of ours says it."""
        return f"{self.namespace}/{self.instance}"

    @property
    def lease_name(self) -> str:
        """Each install leads for itself; the chart gives rights to this name alone."""
        return f"{self.instance}-operator"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        names = environment.get("CHAIRLIFT_NAMESPACES", "").replace(",", " ").split()
        return cls(
            identity=_needed(environment, "POD_NAME"),
            namespace=_needed(environment, "POD_NAMESPACE"),
            instance=environment.get("CHAIRLIFT_INSTANCE", "chairlift"),
            namespaces=tuple(names),
            images=Images(
                engine=environment.get("CHAIRLIFT_ENGINE_IMAGE", f"chairlift-engine:{_RELEASE}"),
                simulator=environment.get(
                    "CHAIRLIFT_SIMULATOR_IMAGE", f"chairlift-engine-simulator:{_RELEASE}"
                ),
                gateway=environment.get("CHAIRLIFT_GATEWAY_IMAGE", f"chairlift-gateway:{_RELEASE}"),
            ),
            metrics_port=_port(environment, "CHAIRLIFT_METRICS_PORT", METRICS_PORT),
            prometheus_url=_url(environment, "CHAIRLIFT_PROMETHEUS_URL"),
        )


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    if not value.isdecimal() or int(value) > 65_535:
        raise SettingsError(f"{name}: must be a port, 0 to 65535 (0: any that is free)")
    return int(value)


def _url(environment: Mapping[str, str], name: str) -> str | None:
    value = environment.get(name, "").rstrip("/")
    if value and not PROMETHEUS_URL.fullmatch(value):
        raise SettingsError(f"{name}: must look like http://prometheus.monitoring:9090")
    return value or None


def _needed(environment: Mapping[str, str], name: str) -> str:
    if not (value := environment.get(name)):
        raise SettingsError(f"{name}: is not set: set it from the pod's own metadata")
    return value
