"""A pool's spec as an object, parsed once for as long as it stays the same."""

from __future__ import annotations

from typing import Any

from chairlift_operator.kube import names
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_parsing import parse_pool

Json = dict[str, Any]


class SpecReader:
    def __init__(self) -> None:
        self._parsed: tuple[Any, InferencePool] | None = None

    def read(self, body: Json) -> InferencePool:
        """Raise SpecError."""
        metadata = {name: body["metadata"][name] for name in ("name", "namespace")}
        kind = {"apiVersion": names.API_VERSION, "kind": names.KIND}
        if self._parsed is None or self._parsed[0] != body.get("spec"):
            pool = parse_pool({**kind, "metadata": metadata, "spec": body.get("spec")})
            self._parsed = (body.get("spec"), pool)
        return self._parsed[1]
