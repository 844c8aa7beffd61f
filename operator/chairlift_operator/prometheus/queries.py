"""The text of every query: few of them, each for all pools at once. Pure.

Nothing relies on pool labels, which a scrape configuration may drop: `namespace` and `pod` name a
pod, and the watch knows whose it is. Counters are turned into rates before they are summed, and
summed within a pod only: across pods the reader sums, over those that are Ready.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from chairlift_operator.exposition import ENGINE_SERIES, GATEWAY_SERIES
from chairlift_operator.prometheus.series import JOB, NAME, NAMESPACE, POD
from chairlift_protocol import metrics

# Two samples must lie in it, so a pod must be scraped at least every 60 s.
HEARTBEAT_S: Final = 150.0
NUM_SCRAPES: Final = 4  # the least that a rate is made of
ENGINE_HEARTBEAT: Final = metrics.NUM_REQUESTS_RUNNING
GATEWAY_HEARTBEAT: Final = metrics.REQUESTS_RECEIVED
WINDOWS: Final = {"5m": 300.0, "1h": 3600.0}
HISTOGRAMS: Final = {
    "itl": metrics.INTER_TOKEN_LATENCY_SECONDS,
    "ttft": metrics.TTFT_SECONDS,
}
_POD_LABELS: Final = f"{NAMESPACE}, {POD}, {JOB}"


def selector(namespaces: Iterable[str], pods: Iterable[str] = ()) -> str:
    """Matchers of the given namespaces, and of the given pods where there are any."""
    matchers = [f'{NAMESPACE}=~"{_alternatives(namespaces)}"']
    if names := _alternatives(pods):
        matchers.append(f'{POD}=~"{names}"')
    return ", ".join(matchers)


def window_queries(where: str, scrape_s: float) -> dict[str, str]:
    """By the name that signals and messages call them. where: from `selector`."""
    rate_s = max(60.0, NUM_SCRAPES * scrape_s)
    received = f"{metrics.REQUESTS_RECEIVED}{{{where}}}"
    rate = f"sum by ({_POD_LABELS}, class) (rate({received}[{rate_s:.0f}s]))"
    asked = {
        "running": f"{ENGINE_HEARTBEAT}{{{where}}}[{HEARTBEAT_S:.0f}s]",
        "received": f"{received}[{HEARTBEAT_S:.0f}s]",
        # A subquery looks at whole minutes only: a new gateway has none yet.
        "arrivalsPeak[1h]": f"max_over_time(({rate})[1h:1m]) or {rate}",
        "waitingPeak[5m]": _peak("sum", metrics.NUM_REQUESTS_WAITING, where),
        "kvPeak[5m]": _peak("avg", metrics.KV_CACHE_USAGE, where),
    }
    for window in WINDOWS:
        labels = f"{_POD_LABELS}, objective, threshold_ms, result, class"
        events = f"increase({metrics.SLO_EVENTS}{{{where}}}[{window}])"
        asked[f"sloEvents[{window}]"] = f"sum by ({labels}) ({events})"
        steps = f"increase({metrics.STEPS}{{{where}}}[{window}])"
        asked[f"steps[{window}]"] = f"sum by ({_POD_LABELS}) ({steps})"
    return asked


def bucket_queries(where: str) -> dict[str, str]:
    """For engines that do not count against objectives."""
    return {
        f"{objective}Buckets[{window}]": (
            f"sum by ({_POD_LABELS}, le) (increase({name}_bucket{{{where}}}[{window}]))"
        )
        for objective, name in HISTOGRAMS.items()
        for window in WINDOWS
    }


def preflight_queries(where: str) -> dict[str, str]:
    """Why pods are not there: whether they are scraped, and what labels series of that name have.
    where: of the pods that are missed."""
    either = f'{NAME}=~"{ENGINE_HEARTBEAT}|{GATEWAY_HEARTBEAT}"'
    return {
        "up": f"min by ({_POD_LABELS}) (up{{{where}}})",
        "labels": f"count by ({NAME}, {NAMESPACE}, {POD}) ({{{either}}})",
    }


def sample_query(where: str, range_s: float) -> str:
    """Everything that is read from a pod directly, with the samples' own times."""
    names = "|".join((*ENGINE_SERIES, *GATEWAY_SERIES))
    return f'{{{NAME}=~"{names}", {where}}}[{range_s:.0f}s]'


def _peak(within_a_pod: str, gauge: str, where: str) -> str:
    """max_over_time skips what is no number; the root makes a gauge that shows NaN, an infinity or
    a negative now show as NaN here too."""
    series = f"{gauge}{{{where}}}"
    peak = f"max_over_time({series}[5m]) + 0 * sqrt({series})"
    return f"{within_a_pod} by ({_POD_LABELS}) ({peak})"


def _alternatives(words: Iterable[str]) -> str:
    # Twice: once for the expression, once for the string that it stands in.
    return "|".join(re.escape(word).replace("\\", "\\\\") for word in sorted(set(words)))
