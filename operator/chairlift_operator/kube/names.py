"""Every name, label, annotation and port that the operator's objects carry. Append-only: objects of
an earlier release are found by them.
"""

from __future__ import annotations

from typing import Final

from chairlift_operator.api_group import API_VERSION as API_VERSION
from chairlift_operator.api_group import GROUP as GROUP
from chairlift_operator.api_group import KIND as KIND
from chairlift_operator.api_group import PLURAL as PLURAL
from chairlift_operator.api_group import QUOTA_KIND as QUOTA_KIND
from chairlift_operator.api_group import QUOTA_PLURAL as QUOTA_PLURAL
from chairlift_operator.api_group import VERSION as VERSION
from chairlift_protocol.quota import NUM_SHARDS, shard_name
from chairlift_protocol.wire import RequestClass

# Who writes which fields: a manager each, so that no apply of a manifest ever touches a count, a
# rollout's state or a status.
FIELD_MANAGER: Final = "chairlift"
SCALER: Final = "chairlift-scaler"
ROLLOUT_MANAGER: Final = "chairlift-rollout"
STATUS_MANAGER: Final = "chairlift-status"
LEASE_MANAGER: Final = "chairlift-lease"

MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
MANAGED_BY: Final = "chairlift"
NAME_LABEL: Final = "app.kubernetes.io/name"
POOL_LABEL: Final = "chairlift.dev/pool"
CLASS_LABEL: Final = "chairlift.dev/class"
ROLE_LABEL: Final = "chairlift.dev/role"
ENGINE_ROLE: Final = "engine"
GATEWAY_ROLE: Final = "gateway"
# On pods, and in the Services' selectors: "false" takes a pod out of the endpoints at once.
SERVING_LABEL: Final = "chairlift.dev/serving"
# Names the start-up values that a pod runs with.
REVISION_LABEL: Final = "chairlift.dev/revision"

# namespace/instance of the operator that owns an object; another one leaves it alone.
OPERATOR_ANNOTATION: Final = "chairlift.dev/operator"
# Names the whole manifest, so that another release's rendering is not taken for drift.
RENDERED_ANNOTATION: Final = "chairlift.dev/rendered"
# On a pod that is to go: JSON of `pod_view.Mark`.
DRAIN_ANNOTATION: Final = "chairlift.dev/drain"
ROLLED_OUT_ANNOTATION: Final = "deployment.kubernetes.io/revision"  # Kubernetes' own
DELETION_COST_ANNOTATION: Final = "controller.kubernetes.io/pod-deletion-cost"

OPERATOR_NAME: Final = "chairlift-operator"  # the operator pods' app.kubernetes.io/name

PUBLIC_PORT: Final = 8000
PUBLIC_PORT_NAME: Final = "http"
ADMIN_PORT: Final = 9000
GATEWAY_PORT: Final = 8080
GATEWAY_SERVICE_PORT: Final = 80

ENGINE_CONTAINER: Final = "engine"
GATEWAY_CONTAINER: Final = "gateway"

POLICY_DIR: Final = "/etc/chairlift/policy"
TOKEN_DIR: Final = "/etc/chairlift/tokens"
ADMIN_TOKEN_KEY: Final = "admin-token"
INTERNAL_TOKEN_KEY: Final = "internal-token"
REDIS_DIR: Final = "/etc/chairlift/redis"
PASSWORD_KEY: Final = "password"
CA_DIR: Final = "/etc/chairlift/redis-ca"
CA_KEY: Final = "ca.crt"
COSTS_KEY: Final = "step-costs.json"


def engines(pool: str, request_class: RequestClass) -> str:
    """The Deployment and the Service of one class."""
    return f"{pool}-{request_class.value}"


def gateway(pool: str) -> str:
    return f"{pool}-gateway"


def tokens(pool: str) -> str:
    return f"{pool}-tokens"


def policies(pool: str) -> str:
    return f"{pool}-policy"


def tenants(pool: str) -> str:
    """The ConfigMap in which gateways find whose each API key is."""
    return f"{pool}-tenants"


def tenant_shards(pool: str) -> list[str]:
    """Those that hold a part each, where one would be too large."""
    return [shard_name(tenants(pool), number) for number in range(NUM_SHARDS)]


def policy_key(request_class: RequestClass) -> str:
    return f"{request_class.value}.json"


def pool_labels(pool: str) -> dict[str, str]:
    return {MANAGED_BY_LABEL: MANAGED_BY, POOL_LABEL: pool}


def engine_selector(pool: str, request_class: RequestClass) -> dict[str, str]:
    return {POOL_LABEL: pool, ROLE_LABEL: ENGINE_ROLE, CLASS_LABEL: request_class.value}


def gateway_selector(pool: str) -> dict[str, str]:
    return {POOL_LABEL: pool, ROLE_LABEL: GATEWAY_ROLE}


def gateway_url(pool: str, namespace: str) -> str:
    return f"http://{gateway(pool)}.{namespace}"
