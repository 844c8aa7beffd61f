"""What the API server itself makes of a pool: defaults, refusals with what to change."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chairlift_e2e.kube import Kube, KubectlError
from chairlift_e2e.pool import KIND
from chairlift_operator.spec_parsing import parse_pool, pool_to_mapping

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
Json = dict[str, Any]


def _pool(**sections: Any) -> Json:
    return {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "chat"},
        "spec": {"model": {"name": "m", "source": "cache://m"}, **copy.deepcopy(sections)},
    }


def _dry(kube: Kube, namespace: str, pool: Json) -> Json:
    done = kube.run("create", "-f", "-", f"--namespace={namespace}", "--dry-run=server",
                    "--output=json", stdin=json.dumps(pool))  # fmt: skip
    return dict(json.loads(done))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_accepted_and_say_the_same_here_and_there(
    kube: Kube, namespace: str, example: Path
) -> None:
    given = yaml.safe_load(example.read_text())
    stored = _dry(kube, namespace, given)
    read = {key: stored[key] for key in ("apiVersion", "kind", "spec")}
    parsed = parse_pool({**read, "metadata": {"name": stored["metadata"]["name"]}})
    assert pool_to_mapping(parsed)["spec"] == pool_to_mapping(parse_pool(given))["spec"]


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"interactive": {"batchSize": {"min": 9, "max": 4}}},
         "min is above max: lower min or raise max"),
        ({"interactive": {"batchSize": {"max": 128}, "stepTokens": {"max": 100}}},
         "batchSize.max is above stepTokens.max"),
        ({"capacity": {"replicas": 2}, "interactive": {"replicas": {"min": 2, "max": 4}},
          "batch": {"replicas": {"min": 1, "max": 1}}},
         "are above capacity.replicas: lower a min or raise capacity.replicas"),
        ({"batch": {}}, "batch work would have nowhere to run"),
        ({"batch": {"borrowing": {"returnWithin": "5s"}}}, "returnWithin is below 10s"),
        ({"runtime": {"simulator": {"profile": "slow"}}}, "only works with 'engine: simulator'"),
        ({"model": {"name": "m", "source": "cache://m", "huggingFace": {}}},
         "huggingFace only works with a source that begins with hf://"),
        ({"interactive": {"slo": {"interTokenLatency": {"threshold": "25h"}}}},
         "must be at most 24h"),
        ({"interactive": {"slo": {"interTokenLatency": {"threshold": "fast"}}}}, "should match"),
        ({"autoscaling": {"mode": "Sometimes"}}, 'supported values: "Managed", "External", "Off"'),
        ({"gateway": {"replicas": 0}}, "should be greater than or equal to 1"),
        ({"quota": {}}, 'unknown field "spec.quota"'),
        ({"quotas": {"redis": {"url": "redis://redis:6379", "caSecret": "ca"}}},
         "caSecret only works with a url that begins with rediss://"),
        ({"gateway": {"anonymous": "Refuse"}}, "gateway.anonymous: Refuse would refuse everybody"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused_with_what_to_change(
    kube: Kube, namespace: str, sections: Json, sentence: str
) -> None:
    with pytest.raises(KubectlError) as caught:
        _dry(kube, namespace, _pool(**sections))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"tenant": "*", "keys": [{"secret": "k"}]}, "stand for requests without a key"),
        ({"tenant": "Acme Ltd"}, "should match"),
        ({"interactive": {"whenIdle": "Borrow"}}, "whenIdle: Borrow lends tokens"),
        ({"interactive": {"tokensPerMinute": -1}}, "should be greater than or equal to 0"),
        ({"batch": {"burst": "11m"}}, "burst is above 10m: lower it"),
        ({"keys": [{"secret": "k", "class": "urgent"}]}, "supported values:"),
        ({"keys": [{"secret": "k"}] * 17}, "must have at most 16 items"),
        ({"tenant": "*", "weight": 2}, "who have weight 1: remove weight"),
        ({"weight": 0}, "must be at least 0.001"),
        ({"priority": 2}, 'unknown field "spec.priority"'),
    ],
)  # fmt: skip
def test_a_wrong_quota_is_refused_with_what_to_change(
    kube: Kube, namespace: str, sections: Json, sentence: str
) -> None:
    quota = {
        "apiVersion": "chairlift.dev/v1alpha1",
        "kind": "TenantQuota",
        "metadata": {"name": "acme"},
        "spec": {"poolRef": {"name": "chat"}, "tenant": "acme", **copy.deepcopy(sections)},
    }
    with pytest.raises(KubectlError) as caught:
        _dry(kube, namespace, quota)
    assert sentence in str(caught.value)


def test_the_models_name_stays(kube: Kube, namespace: str) -> None:
    pool = _pool()
    pool["metadata"]["namespace"] = namespace
    kube.apply(pool)
    with pytest.raises(KubectlError, match="model.name cannot change"):
        kube.patch(KIND, namespace, "chat", {"spec": {"model": {"name": "other"}}})


def test_kubectl_explains_a_field_and_finds_pools_by_their_category(kube: Kube) -> None:
    told = kube.run("explain", f"{KIND}.spec.interactive.slo.interTokenLatency.threshold")
    assert "Longest good gap, such as 50ms." in told
    listed = kube.run("api-resources", "--categories=chairlift", "--no-headers")
    assert "ipool" in listed
