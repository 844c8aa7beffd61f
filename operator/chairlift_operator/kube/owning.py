"""Whose an object is: asked before anything is written to it. What is not ours is left alone."""

from __future__ import annotations

from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.kube.api import Api
from chairlift_operator.kube.children import Owner
from chairlift_operator.kube.paths import path_of

Json = dict[str, Any]


class Foreign(RuntimeError):
    """Something that the pool needs is somebody else's; the message says what to change.

    is_operator: another operator's, whose pool this is then: nothing is written, no status either.
    """

    def __init__(self, message: str, is_operator: bool = False) -> None:
        super().__init__(message)
        self.is_operator = is_operator


async def check_name(api: Api, manifest: Json, owner: Owner) -> None:
    """Foreign where an object of this name is there that the pool did not make."""
    live = await api.find(path_of(manifest))
    if live is not None:
        check_ours({**live, "kind": manifest["kind"]}, owner)


def check_ours(live: Json, owner: Owner) -> None:
    metadata = live["metadata"]
    name = f"{live['kind']} {metadata['namespace']}/{metadata['name']}"
    theirs = metadata.get("annotations", {}).get(names.OPERATOR_ANNOTATION)
    if theirs is None:
        raise Foreign(f"{name} exists and is not this pool's: remove it, or rename the pool")
    if theirs != owner.operator:
        raise Foreign(
            f"{name} is looked after by the operator {theirs}, this one is {owner.operator}: "
            "uninstall one of them, then annotate the pool's objects with "
            f"{names.OPERATOR_ANNOTATION}={owner.operator}",
            is_operator=True,
        )
