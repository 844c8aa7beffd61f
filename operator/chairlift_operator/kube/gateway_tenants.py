"""What a gateway is told of tenants: arguments, the Secrets that it reads, and the right to watch
whose each key is. Pure; part of `gateway_children`.
"""

from __future__ import annotations

from typing import Final

from chairlift_operator.kube import names
from chairlift_operator.kube.merging import Json
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_quotas import Quotas

_PASSWORD_VOLUME: Final = "redis-password"
_CA_VOLUME: Final = "redis-ca"


def tenant_arguments(pool: InferencePool) -> list[str]:
    quotas = pool.spec.quotas
    return _redis_arguments(quotas, names.tenants(pool.name)) if quotas is not None else []


def tenant_rules(pool: InferencePool) -> list[Json]:
    """The pool's own ConfigMaps of tenants, whether there are parts or not, and no others."""
    if pool.spec.quotas is None:
        return []
    return [
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [names.tenants(pool.name), *names.tenant_shards(pool.name)],
            "verbs": ["get", "list", "watch"],
        }
    ]


def redis_volumes(pool: InferencePool) -> tuple[list[Json], list[Json]]:
    """Volumes, and where they are mounted: one key of each Secret."""
    volumes, mounts = [], []
    for name, secret, key, folder in _secrets(pool.spec.quotas):
        items = [{"key": key, "path": key}]
        volumes.append({"name": name, "secret": {"secretName": secret, "items": items}})
        mounts.append({"name": name, "mountPath": folder, "readOnly": True})
    return volumes, mounts


def _secrets(quotas: Quotas | None) -> list[tuple[str, str, str, str]]:
    if quotas is None:
        return []
    redis = quotas.redis
    named = (
        (_PASSWORD_VOLUME, redis.password_secret, names.PASSWORD_KEY, names.REDIS_DIR),
        (_CA_VOLUME, redis.ca_secret, names.CA_KEY, names.CA_DIR),
    )
    return [
        (name, secret, key, folder) for name, secret, key, folder in named if secret is not None
    ]


def _redis_arguments(quotas: Quotas, tenants: str) -> list[str]:
    redis = quotas.redis
    arguments = [
        f"--kubernetes-tenants={tenants}",
        f"--quota-redis={redis.url}",
        f"--quota-on-redis-failure={quotas.on_redis_failure.lower()}",
    ]
    if redis.user is not None:
        arguments.append(f"--quota-redis-user={redis.user}")
    if redis.password_secret is not None:
        arguments.append(f"--quota-redis-password-file={names.REDIS_DIR}/{names.PASSWORD_KEY}")
    if redis.ca_secret is not None:
        arguments.append(f"--quota-redis-ca-file={names.CA_DIR}/{names.CA_KEY}")
    return arguments
