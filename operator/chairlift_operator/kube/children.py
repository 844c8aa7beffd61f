"""What a pool is made of on Kubernetes: one manifest per child, as server-side apply takes it.

Pure. Deployments of engines come without replicas and without their rollout's state: those have
other writers (`acting`, `rolling`). Secret and policies are `keeping`'s: they hold state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from chairlift_operator.kube import gateway_children, names
from chairlift_operator.kube.merging import Json, digest
from chairlift_operator.kube.pods import engine_template
from chairlift_operator.kube.settings import Settings
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass

# A new replica counts as available so late that the next one's turn is the operator's to give.
MIN_READY_S: Final = 10


@dataclass(frozen=True, slots=True)
class Owner:
    """The InferencePool object that owns its children: they go when it goes."""

    uid: str
    operator: str

    def reference(self, pool: str) -> Json:
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": pool,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }


def children(pool: InferencePool, owner: Owner, settings: Settings) -> list[Json]:
    """In the order in which they are applied: what pods need comes before the pods."""
    manifests = [network_policy(pool, settings)]
    for request_class in classes_of(pool):
        manifests.append(_service(pool, request_class))
        name = names.engines(pool.name, request_class)
        selector = names.engine_selector(pool.name, request_class)
        manifests.append(gateway_children.disruption_budget(name, selector))
    manifests += gateway_children.gateway_children(pool, settings)
    manifests += [engine_deployment(pool, c, settings) for c in classes_of(pool)]
    return [owned(manifest, pool, owner) for manifest in manifests]


def classes_of(pool: InferencePool) -> list[RequestClass]:
    """Batch has replicas of its own only where the spec lets it."""
    has_batch = pool.spec.replicas(RequestClass.BATCH).max > 0
    return [RequestClass.INTERACTIVE, *([RequestClass.BATCH] if has_batch else [])]


def owned(manifest: Json, pool: InferencePool, owner: Owner) -> Json:
    """With whose it is, and a name for what it says."""
    metadata = {
        **manifest["metadata"],
        "namespace": pool.namespace,
        "labels": {**names.pool_labels(pool.name), **manifest["metadata"].get("labels", {})},
        "annotations": {
            names.OPERATOR_ANNOTATION: owner.operator,
            names.RENDERED_ANNOTATION: digest(manifest),
            **manifest["metadata"].get("annotations", {}),
        },
        "ownerReferences": [owner.reference(pool.name)],
    }
    return {**manifest, "metadata": metadata}


def engine_deployment(pool: InferencePool, request_class: RequestClass, settings: Settings) -> Json:
    selector = names.engine_selector(pool.name, request_class)
    template = engine_template(pool, request_class, settings.images)
    revision = template["metadata"]["labels"][names.REVISION_LABEL]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": names.engines(pool.name, request_class),
            "labels": {**selector, names.REVISION_LABEL: revision},
        },
        "spec": {
            "selector": {"matchLabels": selector},
            "minReadySeconds": MIN_READY_S,
            "revisionHistoryLimit": 3,
            "template": template,
        },
    }


def _service(pool: InferencePool, request_class: RequestClass) -> Json:
    selector = names.engine_selector(pool.name, request_class)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": names.engines(pool.name, request_class), "labels": selector},
        "spec": {
            "clusterIP": "None",
            "selector": {**selector, names.SERVING_LABEL: "true"},
            "ports": [
                {
                    "name": names.PUBLIC_PORT_NAME,
                    "port": names.PUBLIC_PORT,
                    "targetPort": names.PUBLIC_PORT,
                    "protocol": "TCP",
                }
            ],
        },
    }


def network_policy(pool: InferencePool, settings: Settings) -> Json:
    """The admin port is the operator's alone; the public one is anybody's."""
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}},
        "podSelector": {"matchLabels": {names.NAME_LABEL: names.OPERATOR_NAME}},
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": f"{pool.name}-engines"},
        "spec": {
            "podSelector": {
                "matchLabels": {names.POOL_LABEL: pool.name, names.ROLE_LABEL: names.ENGINE_ROLE}
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"ports": [{"port": names.PUBLIC_PORT, "protocol": "TCP"}]},
                {"from": [operator], "ports": [{"port": names.ADMIN_PORT, "protocol": "TCP"}]},
            ],
        },
    }
