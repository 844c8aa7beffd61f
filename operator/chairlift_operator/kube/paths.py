"""Where objects live in the API: a path for a kind, a namespace and a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from chairlift_operator.kube import names


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    prefix: str
    plural: str

    def path(self, namespace: str | None = None, name: str | None = None, sub: str = "") -> str:
        parts = [self.prefix]
        if namespace:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name:
            parts.append(name)
        if sub:
            parts.append(sub)
        return "/".join(parts)


_RBAC: Final = "/apis/rbac.authorization.k8s.io/v1"
POOL: Final = Kind(names.KIND, f"/apis/{names.API_VERSION}", names.PLURAL)
QUOTA: Final = Kind(names.QUOTA_KIND, f"/apis/{names.API_VERSION}", names.QUOTA_PLURAL)
POD: Final = Kind("Pod", "/api/v1", "pods")
SECRET: Final = Kind("Secret", "/api/v1", "secrets")
EVENT: Final = Kind("Event", "/api/v1", "events")
LEASE: Final = Kind("Lease", "/apis/coordination.k8s.io/v1", "leases")
DEPLOYMENT: Final = Kind("Deployment", "/apis/apps/v1", "deployments")
CONFIG_MAP: Final = Kind("ConfigMap", "/api/v1", "configmaps")
# Every kind of child that is watched, so that what somebody changed is seen and set right.
CHILD_KINDS: Final = (
    DEPLOYMENT,
    CONFIG_MAP,
    Kind("Service", "/api/v1", "services"),
    Kind("ServiceAccount", "/api/v1", "serviceaccounts"),
    Kind("Role", _RBAC, "roles"),
    Kind("RoleBinding", _RBAC, "rolebindings"),
    Kind("PodDisruptionBudget", "/apis/policy/v1", "poddisruptionbudgets"),
    Kind("NetworkPolicy", "/apis/networking.k8s.io/v1", "networkpolicies"),
)
_BY_NAME: Final = {kind.name: kind for kind in CHILD_KINDS}


def path_of(manifest: dict[str, Any]) -> str:
    metadata = manifest["metadata"]
    return _BY_NAME[manifest["kind"]].path(metadata["namespace"], metadata["name"])
