from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chairlift_gateway.config import GatewayConfig, parse_config
from chairlift_operator.kube import names
from chairlift_operator.kube.children import Owner, children
from chairlift_operator.kube.pods import LAST_WORDS_S, PRE_STOP_S, engine_template, revision_of
from chairlift_operator.kube.settings import Settings
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool
from chairlift_protocol.wire import RequestClass

Json = dict[str, Any]
MakePool = Callable[..., InferencePool]
INTERACTIVE, BATCH = RequestClass.INTERACTIVE, RequestClass.BATCH
TWO_CLASSES: Json = {"batch": {"replicas": {"max": 2}}}


@pytest.fixture
def render(owner: Owner, settings: Settings) -> Callable[[InferencePool], dict[str, Json]]:
    def by_name(pool: InferencePool) -> dict[str, Json]:
        made = children(pool, owner, settings)
        return {f"{m['kind']}/{m['metadata']['name']}": m for m in made}

    return by_name


def _container(template: Json) -> Json:
    container: Json = template["spec"]["containers"][0]
    return container


def _template(pool: InferencePool, settings: Settings) -> Json:
    return engine_template(pool, INTERACTIVE, settings.images)


def test_a_pool_of_two_classes_has_all_its_children(make_pool: MakePool, render: Any) -> None:
    assert sorted(render(make_pool(**TWO_CLASSES))) == [
        "Deployment/chat-batch",
        "Deployment/chat-gateway",
        "Deployment/chat-interactive",
        "NetworkPolicy/chat-engines",
        "PodDisruptionBudget/chat-batch",
        "PodDisruptionBudget/chat-gateway",
        "PodDisruptionBudget/chat-interactive",
        "Role/chat-gateway",
        "RoleBinding/chat-gateway",
        "Service/chat-batch",
        "Service/chat-gateway",
        "Service/chat-interactive",
        "ServiceAccount/chat-gateway",
    ]


def test_without_batch_replicas_there_is_no_batch_deployment(
    make_pool: MakePool, render: Any
) -> None:
    pool = make_pool(batch={"borrowing": {}})
    assert not [name for name in render(pool) if name.endswith("-batch")]


def test_every_child_is_found_owned_and_goes_with_its_pool(
    make_pool: MakePool, render: Any
) -> None:
    for child in render(make_pool(**TWO_CLASSES)).values():
        metadata = child["metadata"]
        assert metadata["namespace"] == "team"
        assert metadata["labels"][names.POOL_LABEL] == "chat"
        assert metadata["annotations"][names.OPERATOR_ANNOTATION] == "chairlift-system/chairlift"
        assert [r["uid"] for r in metadata["ownerReferences"]] == ["uid-1"]
        assert "finalizers" not in metadata


def test_engine_deployments_name_no_count_and_no_turnstile(
    make_pool: MakePool, render: Any
) -> None:
    made = render(make_pool(**TWO_CLASSES))
    for name in ("Deployment/chat-interactive", "Deployment/chat-batch"):
        assert not {"replicas", "paused", "strategy"} & set(made[name]["spec"])
    assert made["Deployment/chat-gateway"]["spec"]["replicas"] == 2


def test_selectors_match_the_pods_they_mean(make_pool: MakePool, render: Any) -> None:
    made = render(make_pool(**TWO_CLASSES))
    for request_class in (INTERACTIVE, BATCH):
        name = f"chat-{request_class.value}"
        spec = made[f"Deployment/{name}"]["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        assert made[f"Service/{name}"]["spec"]["selector"].items() <= labels.items()
        drained = {**labels, names.SERVING_LABEL: "false"}
        assert not made[f"Service/{name}"]["spec"]["selector"].items() <= drained.items()
        budget = made[f"PodDisruptionBudget/{name}"]["spec"]["selector"]["matchLabels"]
        assert budget.items() <= labels.items()


def test_the_grace_period_covers_leaving_the_endpoints_and_the_drain(
    make_pool: MakePool, settings: Settings
) -> None:
    pool = make_pool(autoscaling={"drainTimeout": "2m"})
    template = _template(pool, settings)
    assert "--drain-s=120" in _container(template)["args"]
    assert template["spec"]["terminationGracePeriodSeconds"] == PRE_STOP_S + 120 + LAST_WORDS_S


def test_one_slow_answer_takes_no_pod_out_and_a_busy_engine_is_not_restarted(
    make_pool: MakePool, settings: Settings
) -> None:
    container = _container(_template(make_pool(), settings))
    ready, live = container["readinessProbe"], container["livenessProbe"]
    assert ready["failureThreshold"] >= 3 and ready["timeoutSeconds"] >= 2
    assert live["failureThreshold"] * live["periodSeconds"] >= 60
    assert ready["httpGet"]["path"] != live["httpGet"]["path"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"  # why it ended


def test_pods_run_without_privileges(make_pool: MakePool, render: Any) -> None:
    made = render(make_pool())
    for name in ("Deployment/chat-interactive", "Deployment/chat-gateway"):
        spec = made[name]["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = spec["containers"][0]["securityContext"]
        assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}


def test_the_gateway_is_given_no_admin_token(make_pool: MakePool, render: Any) -> None:
    spec = render(make_pool())["Deployment/chat-gateway"]["spec"]["template"]["spec"]
    items = spec["volumes"][0]["secret"]["items"]
    assert [item["key"] for item in items] == [names.INTERNAL_TOKEN_KEY]


def test_only_the_operator_may_reach_the_admin_port(make_pool: MakePool, render: Any) -> None:
    rules = render(make_pool())["NetworkPolicy/chat-engines"]["spec"]["ingress"]
    admin = [r for r in rules if names.ADMIN_PORT in (p["port"] for p in r["ports"])]
    assert len(admin) == 1
    assert admin[0]["from"][0]["podSelector"]["matchLabels"] == {
        names.NAME_LABEL: names.OPERATOR_NAME
    }


@pytest.mark.parametrize(
    ("runtime", "image"),
    [
        ({"engine": "simulator"}, "simulator:1"),
        ({"engine": "chairlift"}, "engine:1"),
        ({"engine": "chairlift", "image": "mine:2"}, "mine:2"),
    ],
)
def test_the_image_is_the_pools_or_the_releases(
    make_pool: MakePool, settings: Settings, runtime: Json, image: str
) -> None:
    assert _container(_template(make_pool(runtime=runtime), settings))["image"] == image


@pytest.mark.parametrize(
    ("model", "argument", "volume", "env"),
    [
        ({"source": "file:///models/m"}, "file:///models/m", None, {}),
        (
            {"source": "pvc://weights/a/b"},
            "file:///model/a/b",
            {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}},
            {},
        ),
        ({"source": "hf://o/m@r1"}, "hf://o/m@r1", {"emptyDir": {}}, {"HF_HOME": "/hub"}),
        (
            {
                "source": "hf://o/m",
                "huggingFace": {"cacheClaim": "hub", "endpoint": "http://hub.example:8080"},
            },
            "hf://o/m",
            {"persistentVolumeClaim": {"claimName": "hub"}},
            {"HF_ENDPOINT": "http://hub.example:8080"},
        ),
    ],
    ids=["file", "claim", "hub", "hub with cache"],
)
def test_where_the_model_comes_from(
    make_pool: MakePool, settings: Settings, model: Json, argument: str, volume: Any, env: Json
) -> None:
    template = _template(make_pool(model={"name": "m", **model}), settings)
    container = _container(template)
    assert f"--model-source={argument}" in container["args"]
    named = {v["name"]: v for v in template["spec"]["volumes"]}
    extra = {name: v for name, v in named.items() if name not in ("policy", "tokens", "tmp")}
    assert [{k: v for k, v in e.items() if k != "name"} for e in extra.values()] == (
        [volume] if volume else []
    )
    assert {m["name"] for m in container["volumeMounts"]} == set(named)
    told = {e["name"]: e.get("value") for e in container["env"]}
    assert env.items() <= told.items()


def test_the_hubs_token_comes_from_its_secret(make_pool: MakePool, settings: Settings) -> None:
    hub = {"tokenSecret": "hub-token"}
    pool = make_pool(model={"name": "m", "source": "hf://o/m", "huggingFace": hub})
    env = {e["name"]: e for e in _container(_template(pool, settings))["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub-token", "key": "token"}}


def test_the_example_for_gpus_asks_for_what_it_says(settings: Settings) -> None:
    example = Path(__file__).parents[2] / "examples" / "gpu.yaml"
    template = _template(parse_pool(example.read_text()), settings)
    pod, container = template["spec"], _container(template)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert pod["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert [t["key"] for t in pod["tolerations"]] == ["nvidia.com/gpu"]
    assert {"name": "hub", "persistentVolumeClaim": {"claimName": "hf-cache"}} in pod["volumes"]
    variables = {each["name"]: each for each in container["env"]}
    secret = variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert secret == {"name": "hf-token", "key": "token"}


def test_a_pod_template_is_merged_and_cannot_take_our_labels(
    make_pool: MakePool, settings: Settings
) -> None:
    over = {
        "metadata": {"labels": {"team": "a", names.POOL_LABEL: "other"}},
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "volumes": [{"name": "venv", "hostPath": {"path": "/venv"}}],
            "containers": [
                {
                    "name": "engine",
                    "env": [{"name": "HOME", "value": "/home"}, {"name": "A", "value": "b"}],
                    "volumeMounts": [{"name": "venv", "mountPath": "/opt/venv"}],
                },
                {"name": "sidecar", "image": "s"},
            ],
        },
    }
    pool = make_pool(runtime={"engine": "simulator", "podTemplate": over})
    template = _template(pool, settings)
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][names.POOL_LABEL] == "chat"
    assert template["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert [c["name"] for c in template["spec"]["containers"]] == ["engine", "sidecar"]
    env = {e["name"]: e.get("value") for e in _container(template)["env"]}
    assert (env["HOME"], env["A"]) == ("/home", "b")
    mounts = {m["mountPath"] for m in _container(template)["volumeMounts"]}
    assert {"/opt/venv", "/tmp", names.POLICY_DIR} <= mounts


@pytest.mark.parametrize(
    ("change", "restarts"),
    [
        ({"interactive": {"slo": {"interTokenLatency": {"threshold": "90ms"}}}}, False),
        ({"interactive": {"batchSize": {"min": 2}}}, False),
        ({"interactive": {"replicas": {"max": 4}}}, False),
        ({"batch": {"borrowing": {"maxShare": 20}}}, False),
        ({"gateway": {"replicas": 3}}, False),
        ({"mode": "Recommend"}, False),
        ({"interactive": {"batchSize": {"max": 64}}}, True),
        ({"interactive": {"stepTokens": {"max": 1024}}}, True),
        ({"runtime": {"engine": "simulator", "image": "other:2"}}, True),
        ({"runtime": {"engine": "simulator", "simulator": {"profile": "slow"}}}, True),
        ({"runtime": {"engine": "simulator", "resources": {"limits": {"cpu": 2}}}}, True),
        ({"autoscaling": {"drainTimeout": "1m"}}, True),
    ],
)
def test_only_start_up_values_restart_engines(
    make_pool: MakePool, settings: Settings, change: Json, restarts: bool
) -> None:
    before, after = make_pool(), make_pool(**change)
    assert (revision_of(before, INTERACTIVE) != revision_of(after, INTERACTIVE)) is restarts
    assert (_template(before, settings) != _template(after, settings)) is restarts


QUOTAS: Json = {
    "redis": {
        "url": "rediss://redis:6379/0",
        "user": "gateway",
        "passwordSecret": "redis-password",
        "caSecret": "redis-ca",
    },
    "onRedisFailure": "Deny",
}


def test_without_quotas_a_gateway_is_told_nothing_of_tenants(
    make_pool: MakePool, render: Any
) -> None:
    made = render(make_pool())
    (container,) = made["Deployment/chat-gateway"]["spec"]["template"]["spec"]["containers"]
    assert not [a for a in container["args"] if "quota" in a or "tenant" in a or "anonym" in a]
    assert len(made["Role/chat-gateway"]["rules"]) == 1


def test_quotas_become_arguments_and_secrets_become_files(make_pool: MakePool, render: Any) -> None:
    gateway = {"anonymous": "Serve", "trustedTenantHeader": "X-Tenant"}
    made = render(make_pool(quotas=QUOTAS, gateway=gateway))
    pod = made["Deployment/chat-gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config_arguments = [
        "--kubernetes-tenants=chat-tenants",
        "--quota-redis=rediss://redis:6379/0",
        "--quota-redis-user=gateway",
        "--quota-redis-password-file=/etc/chairlift/redis/password",
        "--quota-redis-ca-file=/etc/chairlift/redis-ca/ca.crt",
        "--quota-on-redis-failure=deny",
        "--anonymous=serve",
        "--trusted-tenant-header=X-Tenant",
    ]
    assert set(config_arguments) <= set(container["args"])
    files = {
        f"{mount['mountPath']}/{item['path']}": (volume["secret"]["secretName"], item["key"])
        for volume in pod["volumes"]
        for mount in container["volumeMounts"]
        if mount["name"] == volume["name"]
        for item in volume["secret"]["items"]
    }
    assert files["/etc/chairlift/redis/password"] == ("redis-password", "password")
    assert files["/etc/chairlift/redis-ca/ca.crt"] == ("redis-ca", "ca.crt")


def test_the_gateway_understands_what_it_is_told_of_tenants(
    make_pool: MakePool, render: Any, tmp_path: Path
) -> None:
    gateway = {"anonymous": "Serve", "trustedTenantHeader": "X-Tenant"}
    made = render(make_pool(quotas=QUOTAS, gateway=gateway))
    (container,) = made["Deployment/chat-gateway"]["spec"]["template"]["spec"]["containers"]
    (tmp_path / "token").write_text("secret")
    given = [a for a in container["args"] if not a.startswith("--internal-token-file")]
    config = parse_config([*given, f"--internal-token-file={tmp_path / 'token'}"])
    assert config.redis is not None and config.redis.is_encrypted
    assert config.redis.user == "gateway" and config.quota_pool == "team/chat"
    assert (config.kubernetes_tenants, config.serves_anonymous) == ("chat-tenants", True)
    assert config.on_redis_failure.value == "deny"
    assert config.trusted_tenant_header == b"x-tenant"


def test_bounds_of_a_gateway_are_its_own_unless_the_pool_states_them(
    make_pool: MakePool, render: Any, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret")

    def config(**gateway: Any) -> GatewayConfig:
        made = render(make_pool(gateway=gateway))
        (container,) = made["Deployment/chat-gateway"]["spec"]["template"]["spec"]["containers"]
        given = [a for a in container["args"] if not a.startswith("--internal-token-file")]
        return parse_config([*given, f"--internal-token-file={tmp_path / 'token'}"])

    usual, unstated = GatewayConfig(endpoints_path=None, internal_token=""), config()
    assert unstated.replica_concurrency == usual.replica_concurrency
    assert unstated.batch_max_body_bytes == usual.batch_max_body_bytes
    stated = config(replicaConcurrency=7, batchMaxBodyBytes=2**30)
    assert (stated.replica_concurrency, stated.batch_max_body_bytes) == (7, 2**30)
    assert stated.max_body_bytes == usual.max_body_bytes


def test_a_gateway_may_watch_its_own_tenants_and_no_other_configmap(
    make_pool: MakePool, render: Any
) -> None:
    rules = render(make_pool(quotas=QUOTAS))["Role/chat-gateway"]["rules"]
    (rule,) = [rule for rule in rules if "configmaps" in rule["resources"]]
    assert rule["resourceNames"] == ["chat-tenants", *(f"chat-tenants-{n}" for n in range(16))]
    assert rule["verbs"] == ["get", "list", "watch"]
    assert not [rule for rule in rules if "secrets" in rule["resources"]]
