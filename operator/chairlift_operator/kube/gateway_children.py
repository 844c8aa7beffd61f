"""The gateway of a pool: its Deployment, Service, disruption budget, and the right to watch where
engines are. Pure; part of `children`.
"""

from __future__ import annotations

from typing import Final

from chairlift_operator.gateway_arguments import gateway_arguments
from chairlift_operator.kube import names
from chairlift_operator.kube.gateway_tenants import redis_volumes, tenant_arguments, tenant_rules
from chairlift_operator.kube.merging import Json, merged
from chairlift_operator.kube.pods import (
    CONTAINER_SECURITY,
    LAST_WORDS_S,
    POD_SECURITY,
    PRE_STOP_S,
    resources_of,
    scraped_at,
)
from chairlift_operator.kube.settings import Settings
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import LIVE_PATH

WATCHED: Final[Json] = {
    "apiGroups": ["discovery.k8s.io"],
    "resources": ["endpointslices"],
    "verbs": ["get", "list", "watch"],
}


def gateway_children(pool: InferencePool, settings: Settings) -> list[Json]:
    name = names.gateway(pool.name)
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    account = {"kind": "ServiceAccount", "name": name, "namespace": pool.namespace}
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}},
        {
            "apiVersion": rbac,
            "kind": "Role",
            "metadata": {"name": name},
            "rules": [WATCHED, *tenant_rules(pool)],
        },
        {
            "apiVersion": rbac,
            "kind": "RoleBinding",
            "metadata": {"name": name},
            "roleRef": role,
            "subjects": [account],
        },
        _service(pool),
        disruption_budget(names.gateway(pool.name), names.gateway_selector(pool.name)),
        _deployment(pool, settings),
    ]


def _service(pool: InferencePool) -> Json:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.gateway(pool.name),
            "labels": names.gateway_selector(pool.name),
        },
        "spec": {
            "type": pool.spec.gateway.service.type,
            "selector": names.gateway_selector(pool.name),
            "ports": [
                {
                    "name": "http",
                    "port": names.GATEWAY_SERVICE_PORT,
                    "targetPort": names.GATEWAY_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def disruption_budget(name: str, selector: Json) -> Json:
    """A drained node takes one pod at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {
            "maxUnavailable": 1,
            # A pod that is no use yet, or no more, does not hold up a node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": selector},
        },
    }


def _deployment(pool: InferencePool, settings: Settings) -> Json:
    selector, gateway = names.gateway_selector(pool.name), pool.spec.gateway
    labels = {**names.pool_labels(pool.name), **selector}
    template = merged(_template(pool, settings), gateway.pod_template)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": names.gateway(pool.name), "labels": selector},
        "spec": {
            "replicas": gateway.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": merged(template, {"metadata": {"labels": labels}}),
        },
    }


def _template(pool: InferencePool, settings: Settings) -> Json:
    drain_s = pool.spec.autoscaling.drain_timeout_s
    arguments = [
        "--host=0.0.0.0",
        f"--port={names.GATEWAY_PORT}",
        f"--kubernetes-pool={pool.namespace}/{pool.name}",
        f"--internal-token-file={names.TOKEN_DIR}/{names.INTERNAL_TOKEN_KEY}",
        f"--drain-s={drain_s:g}",
        *tenant_arguments(pool),
        *(f"{option}={value}" for option, value in gateway_arguments(pool.spec.gateway).items()),
    ]
    volumes, mounts = redis_volumes(pool)
    token = {"key": names.INTERNAL_TOKEN_KEY, "path": names.INTERNAL_TOKEN_KEY}
    probe = {"httpGet": {"path": LIVE_PATH, "port": names.GATEWAY_PORT}, "timeoutSeconds": 2}
    container = {
        "name": names.GATEWAY_CONTAINER,
        "image": gateway_image(pool, settings),
        "command": ["chairlift-gateway"],
        "args": arguments,
        "ports": [{"name": "http", "containerPort": names.GATEWAY_PORT}],
        "resources": resources_of(pool.spec.gateway.resources),
        "securityContext": CONTAINER_SECURITY,
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        # Alive is enough to serve: without any replica it holds requests for a while.
        "readinessProbe": {**probe, "periodSeconds": 2},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "tokens", "mountPath": names.TOKEN_DIR, "readOnly": True},
            *mounts,
        ],
    }
    return {
        "metadata": {"annotations": scraped_at(names.GATEWAY_PORT)},
        "spec": {
            "serviceAccountName": names.gateway(pool.name),
            "securityContext": POD_SECURITY,
            "terminationGracePeriodSeconds": PRE_STOP_S + int(drain_s) + LAST_WORDS_S,
            "containers": [container],
            # The admin token is not for gateways.
            "volumes": [
                {
                    "name": "tokens",
                    "secret": {"secretName": names.tokens(pool.name), "items": [token]},
                },
                *volumes,
            ],
        },
    }


def gateway_image(pool: InferencePool, settings: Settings) -> str:
    return pool.spec.gateway.image or settings.images.gateway
