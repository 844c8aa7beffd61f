from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import kopf
import pytest

from chairlift_operator import handlers
from chairlift_operator.kube.kopf_side import PoolIndex, configure, slim
from chairlift_operator.kube.settings import Settings, SettingsError

ALLOWED = {"on.login", "on.startup", "on.cleanup", "on.event", "on.probe", "index"}


def _decorators(function: ast.AsyncFunctionDef) -> list[str]:
    names = []
    for decorator in function.decorator_list:
        assert isinstance(decorator, ast.Call)
        names.append(ast.unparse(decorator.func).removeprefix("kopf."))
    return names


def test_kopf_is_given_nothing_that_annotates_or_leaves_finalizers() -> None:
    tree = ast.parse(Path(handlers.__file__).read_text())
    functions = [node for node in tree.body if isinstance(node, ast.AsyncFunctionDef)]
    assert {name for function in functions for name in _decorators(function)} == ALLOWED
    for function in functions:  # what runs in a thread could not wake the loop
        assert function.end_lineno is not None and function.end_lineno - function.lineno <= 10


def test_kopf_posts_nothing_and_asks_for_no_more_than_pools() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.scanning.disabled is True
    assert isinstance(settings.watching.server_timeout, int)  # an API server refuses 300.0
    assert settings.watching.client_timeout is not None
    assert settings.watching.client_timeout > settings.watching.server_timeout


def test_kopf_does_not_give_up_on_an_api_server_that_is_away() -> None:
    settings = kopf.OperatorSettings()
    configure(settings)
    backoffs: Any = settings.networking.error_backoffs
    for _ in range(2):  # asked anew for each request
        hour = list(itertools.islice(backoffs, 360))
        assert len(hour) == 360 and max(hour) <= 10 and hour[0] <= 1


def _body(version: int) -> dict[str, Any]:
    return {"metadata": {"name": "chat", "resourceVersion": str(version)}}


def test_of_two_pools_of_one_name_the_newer_counts() -> None:
    index: Any = {("team", "chat"): [_body(9), _body(10)]}
    pools = PoolIndex(index)
    assert pools[("team", "chat")] == _body(10)
    assert list(pools) == [("team", "chat")] and len(pools) == 1
    assert pools.get(("team", "other")) is None


def test_what_nobody_reads_is_not_kept() -> None:
    metadata = {"name": "chat", "managedFields": [{"manager": "kubectl"}]}
    assert slim({"metadata": metadata, "spec": {}}) == {"metadata": {"name": "chat"}, "spec": {}}


def test_the_environment_says_who_and_where() -> None:
    known = Settings.from_environment(
        {
            "POD_NAME": "operator-1",
            "POD_NAMESPACE": "system",
            "CHAIRLIFT_NAMESPACES": "a, b",
            "CHAIRLIFT_GATEWAY_IMAGE": "gateway:2",
        }
    )
    assert (known.identity, known.operator) == ("operator-1", "system/chairlift")
    assert known.namespaces == ("a", "b") and known.images.gateway == "gateway:2"
    with pytest.raises(SettingsError, match="POD_NAMESPACE: is not set"):
        Settings.from_environment({"POD_NAME": "operator-1"})
