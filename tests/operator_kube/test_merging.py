from __future__ import annotations

from typing import Any

import pytest

from chairlift_operator.kube.merging import digest, merged, projected

CONTAINER: dict[str, Any] = {"name": "engine", "image": "a", "env": [{"name": "A", "value": "1"}]}


@pytest.mark.parametrize(
    ("base", "over", "both"),
    [
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]},
         {"tolerations": [{"key": "a"}, {"key": "b"}]}),
        ({"containers": [CONTAINER]}, {"containers": [{"name": "engine", "image": "b"}]},
         {"containers": [{**CONTAINER, "image": "b"}]}),
        ({"containers": [CONTAINER]}, {"containers": [{"name": "other"}]},
         {"containers": [CONTAINER, {"name": "other"}]}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}]},
         {"env": [{"name": "A", "value": "2"}]}),
        ({"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
         {"volumeMounts": [{"name": "b", "mountPath": "/a"}]},
         {"volumeMounts": [{"name": "b", "mountPath": "/a"}]}),
    ],
)  # fmt: skip
def test_what_is_laid_over_wins_where_both_speak(base: Any, over: Any, both: Any) -> None:
    before = (digest(base), digest(over))
    assert merged(base, over) == both
    assert (digest(base), digest(over)) == before


@pytest.mark.parametrize(
    ("live", "ours", "is_same"),
    [
        ({"a": 1, "status": {}}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"c": [{"name": "x", "v": 1, "d": 0}]}, {"c": [{"name": "x", "v": 1}]}, True),
        ({"c": [{"name": "y"}, {"name": "x", "v": 1}]}, {"c": [{"name": "x", "v": 1}]}, True),
        ({"c": [{"name": "y"}]}, {"c": [{"name": "x"}]}, False),
        ({"p": [1, 2]}, {"p": [1]}, False),
        ({"p": [1]}, {"p": [1, 2]}, False),
    ],
)
def test_drift_is_a_difference_in_what_is_ours(live: Any, ours: Any, is_same: bool) -> None:
    assert (projected(live, ours) == ours) is is_same
