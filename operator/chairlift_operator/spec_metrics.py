"""`spec.metrics`: where what happened is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from chairlift_operator.spec_values import SPEC_CONFIG, matching, printable

# Without user names and passwords: a spec is no place for them.
PROMETHEUS_URL: Final = re.compile(r"https?://[^\s/?#@]+(?:/[^\s?#]*)?")


@dataclass(frozen=True, slots=True)
class Metrics:
    """source: None takes the operator's own Prometheus, or Direct where it has none. url: None too
    takes the operator's."""

    __pydantic_config__ = SPEC_CONFIG
    source: Literal["Direct", "Prometheus"] | None = None
    url: (
        Annotated[
            str,
            matching(PROMETHEUS_URL, "must look like http://prometheus.monitoring:9090"),
            printable(500),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.url is not None and self.source != "Prometheus":
            raise ValueError("url only works with 'source: Prometheus': set that, or remove url")
