"""What a spec says of pods: images, resources, the gateway, where a model's files come from.

Only a cluster has pods: a pool on one machine runs without all of this. Part of `spec`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Strict

from chairlift_operator.spec_values import SPEC_CONFIG, Check, Count, Name, matching, printable

_QUANTITY = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_WEB_ADDRESS = re.compile(r"https?://[^\s/?#]+(?:/[^\s?#]*)?")
_HEADER = re.compile(r"[A-Za-z0-9-]+")
MAX_GATEWAYS: Final = 100
MAX_BODY_BYTES: Final = 2**30  # a gateway holds each of them in memory


def _quantity(value: object) -> object:
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not whole and not (isinstance(value, str) and _QUANTITY.fullmatch(value)):
        raise ValueError("must be a quantity, such as 1, 500m or 8Gi")
    return value


Quantity = Annotated[
    int | str,
    Check(
        _quantity,
        {"x-kubernetes-int-or-string": True, "pattern": f"^{_QUANTITY.pattern}$"},
        is_first=True,
    ),
]
Image = Annotated[str, printable(max_characters=500)]
# Merged into what the operator renders; Kubernetes checks its fields when the pod is made.
PodTemplate = Annotated[
    dict[str, Any], Check(lambda value: value, {"x-kubernetes-preserve-unknown-fields": True})
]


@dataclass(frozen=True, slots=True)
class Resources:
    """As in a container."""

    __pydantic_config__ = SPEC_CONFIG
    requests: Mapping[str, Quantity] = field(default_factory=dict)
    limits: Mapping[str, Quantity] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """cache_claim: a volume claim that replicas share; without it each replica downloads anew.
    token_secret: its key `token` is sent to the hub.
    """

    __pydantic_config__ = SPEC_CONFIG
    cache_claim: Name | None = None
    token_secret: Name | None = None
    endpoint: (
        Annotated[str, matching(_WEB_ADDRESS, "must look like https://hub.example"), printable(500)]
        | None
    ) = None


@dataclass(frozen=True, slots=True)
class GatewayService:
    __pydantic_config__ = SPEC_CONFIG
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"


@dataclass(frozen=True, slots=True)
class Gateway:
    """anonymous: requests without a known tenant; None refuses them where tenants are told apart.

    trusted_tenant_header: in which a gateway in front of this one names the tenant.
    replica_concurrency: requests on an engine that never states its load. None of this and of
    batch_max_body_bytes leaves the gateway's own bound.
    """

    __pydantic_config__ = SPEC_CONFIG
    replicas: Annotated[int, Strict(), Field(ge=1, le=MAX_GATEWAYS)] = 2
    image: Image | None = None
    resources: Resources = Resources()
    pod_template: PodTemplate = field(default_factory=dict)
    service: GatewayService = GatewayService()
    anonymous: Literal["Serve", "Refuse"] | None = None
    trusted_tenant_header: (
        Annotated[str, matching(_HEADER, "must be a header's name, like x-tenant"), printable(100)]
        | None
    ) = None
    replica_concurrency: Count | None = None
    batch_max_body_bytes: Annotated[int, Strict(), Field(ge=1, le=MAX_BODY_BYTES)] | None = None
