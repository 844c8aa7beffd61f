"""The pod template of an engine: how a pool's spec becomes a container, its files and its probes.

Pure. `children` puts it into a Deployment.
"""

from __future__ import annotations

from typing import Any, Final

from chairlift_operator.engine_arguments import engine_arguments
from chairlift_operator.kube import names
from chairlift_operator.kube.merging import Json, digest, merged
from chairlift_operator.kube.settings import Images
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_pods import Resources
from chairlift_protocol.wire import LIVE_PATH, METRICS_PATH, READY_PATH, RequestClass

# Between a pod's leaving the endpoints and its SIGTERM: gateways hear of it meanwhile.
PRE_STOP_S: Final = 5
# After the drain time: cut streams get their last words, the process ends.
LAST_WORDS_S: Final = 15
MODEL_DIR: Final = "/model"
HUB_DIR: Final = "/hub"
POD_SECURITY: Final[Json] = {
    "runAsNonRoot": True,
    "fsGroup": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Json] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def revision_of(pool: InferencePool, request_class: RequestClass) -> str:
    """Names what engines start with, as far as the user's spec says it: another release of the
    operator that renders the same spec otherwise does not restart them."""
    spec, runtime = pool.spec, pool.spec.runtime
    return digest(
        {
            "arguments": engine_arguments(pool, request_class),
            "huggingFace": repr(spec.model.hugging_face),
            "image": runtime.image,
            "resources": resources_of(runtime.resources),
            "template": runtime.pod_template,
            "drain": spec.autoscaling.drain_timeout_s,
        }
    )


def engine_template(pool: InferencePool, request_class: RequestClass, images: Images) -> Json:
    labels = {
        **names.pool_labels(pool.name),
        names.ROLE_LABEL: names.ENGINE_ROLE,
        names.CLASS_LABEL: request_class.value,
        names.SERVING_LABEL: "true",
        names.REVISION_LABEL: revision_of(pool, request_class),
    }
    files = _model_files(pool)
    volumes = [
        {"name": "policy", "configMap": {"name": names.policies(pool.name)}},
        {"name": "tokens", "secret": {"secretName": names.tokens(pool.name)}},
        {"name": "tmp", "emptyDir": {}},
        *files["volumes"],
    ]
    drain_s = pool.spec.autoscaling.drain_timeout_s
    template: Json = {
        "metadata": {"annotations": scraped_at(names.PUBLIC_PORT)},
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": POD_SECURITY,
            "terminationGracePeriodSeconds": PRE_STOP_S + int(drain_s) + LAST_WORDS_S,
            "containers": [_engine_container(pool, request_class, images, files)],
            "volumes": volumes,
        },
    }
    template = merged(template, pool.spec.runtime.pod_template)
    # Ours last: selectors need them.
    labelled: Json = merged(template, {"metadata": {"labels": labels}})
    return labelled


def _engine_container(
    pool: InferencePool, request_class: RequestClass, images: Images, files: Json
) -> Json:
    runtime = pool.spec.runtime
    default = images.simulator if runtime.engine == "simulator" else images.engine
    return {
        "name": names.ENGINE_CONTAINER,
        "image": runtime.image or default,
        "command": ["chairlift-engine"],
        "args": _arguments(pool, request_class, files),
        "env": [{"name": "HOME", "value": "/tmp"}, *files["env"]],
        "ports": [
            {"name": names.PUBLIC_PORT_NAME, "containerPort": names.PUBLIC_PORT},
            {"name": "admin", "containerPort": names.ADMIN_PORT},
        ],
        "resources": resources_of(runtime.resources),
        "securityContext": CONTAINER_SECURITY,
        # The sentence that an engine ends with, such as a model that cannot be had, is its status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        # One slow answer takes no pod out, and a busy engine is not a dead one.
        "readinessProbe": {**_probe(READY_PATH), "periodSeconds": 2, "failureThreshold": 3},
        "livenessProbe": {**_probe(LIVE_PATH), "periodSeconds": 10, "failureThreshold": 6},
        "volumeMounts": [
            {"name": "policy", "mountPath": names.POLICY_DIR, "readOnly": True},
            {"name": "tokens", "mountPath": names.TOKEN_DIR, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            *files["mounts"],
        ],
    }


def _arguments(pool: InferencePool, request_class: RequestClass, files: Json) -> list[str]:
    values: dict[str, Any] = {
        **engine_arguments(pool, request_class),
        "--model-source": files["source"],
        "--host": "0.0.0.0",
        "--port": names.PUBLIC_PORT,
        "--admin-port": names.ADMIN_PORT,
        "--policy-file": f"{names.POLICY_DIR}/{names.policy_key(request_class)}",
        "--admin-token-file": f"{names.TOKEN_DIR}/{names.ADMIN_TOKEN_KEY}",
        "--internal-token-file": f"{names.TOKEN_DIR}/{names.INTERNAL_TOKEN_KEY}",
        "--engine-id": "$(POD_NAME)",
        "--drain-s": f"{pool.spec.autoscaling.drain_timeout_s:g}",
        "--log-level": "info",
    }
    return [f"{option}={value}" for option, value in values.items()]


def _model_files(pool: InferencePool) -> Json:
    """Where the engine finds the model: its source, and volumes, mounts and variables for it."""
    source, hub = pool.spec.model.source, pool.spec.model.hugging_face
    env: list[Json] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    ]
    scheme, _, rest = source.partition("://")
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume: Json = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        mount = {"name": "model", "mountPath": MODEL_DIR, "readOnly": True}
        source = f"file://{MODEL_DIR}/{path}".rstrip("/")
        env.append(_scratch())
        volumes, mounts = [{"name": "model", **volume}], [mount]
    elif scheme == "hf":
        kept = hub.cache_claim if hub else None
        volume = {"persistentVolumeClaim": {"claimName": kept}} if kept else {"emptyDir": {}}
        env += [_scratch(), {"name": "HF_HOME", "value": HUB_DIR}]
        if hub and hub.endpoint:
            env.append({"name": "HF_ENDPOINT", "value": hub.endpoint})
        if hub and hub.token_secret:
            key = {"name": hub.token_secret, "key": "token"}
            env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
        volumes, mounts = [{"name": "hub", **volume}], [{"name": "hub", "mountPath": HUB_DIR}]
    else:
        volumes, mounts = [], []
        if scheme != "cache":  # a cache:// model lies in the image, where its CHAIRLIFT_CACHE says
            env.append(_scratch())
    return {"source": source, "env": env, "volumes": volumes, "mounts": mounts}


def _scratch() -> Json:
    """Compiled kernels go where the container may write."""
    return {"name": "CHAIRLIFT_CACHE", "value": "/tmp/chairlift"}


def _probe(path: str) -> Json:
    return {"httpGet": {"path": path, "port": names.PUBLIC_PORT}, "timeoutSeconds": 2}


def scraped_at(port: int) -> Json:
    """Annotations by which Prometheus finds a pod, as most of its configurations read them."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(port),
        "prometheus.io/path": METRICS_PATH,
    }


def resources_of(resources: Resources) -> Json:
    told = {"requests": dict(resources.requests), "limits": dict(resources.limits)}
    return {key: value for key, value in told.items() if value}
