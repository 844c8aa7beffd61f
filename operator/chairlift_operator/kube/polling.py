"""Every Prometheus that pools name, asked in the background; pools read the last answers.

One batch of queries serves all pools of one Prometheus, however many they are. What nobody reads
any more, as on a standby, is not asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import aiohttp

from chairlift_operator.kube.settings import LOOK_S, TICK_S, Settings
from chairlift_operator.kube.watching import PoolKey
from chairlift_operator.pool_windows import PoolWindows, Trouble
from chairlift_operator.prometheus.asking import PrometheusClient
from chairlift_operator.prometheus.batch import ENGINES, GATEWAYS, QUERY_FAILED, Batch, PoolPods
from chairlift_operator.prometheus.heartbeats import FIRST_SCRAPE_S, NUM_STALE_SCRAPES, Pod
from chairlift_operator.prometheus.queries import (
    bucket_queries,
    preflight_queries,
    sample_query,
    selector,
    window_queries,
)
from chairlift_operator.prometheus.reduction import windows_of
from chairlift_operator.prometheus.samples import PodSeries, pod_series
from chairlift_operator.prometheus.series import Answer, PodKey
from chairlift_operator.spec import InferencePool
from chairlift_protocol.wire import RequestClass

logger = logging.getLogger(__name__)

WINDOWS_EVERY_S: Final = 30.0  # minutes and hours change slowly, and an hour of samples is much
WINDOWS_TIMEOUT_S: Final = 15.0
WINDOWS_TOO_OLD_S: Final = 3 * WINDOWS_EVERY_S
SAMPLES_TIMEOUT_S: Final = 4.0  # within a tick
LEAST_SAMPLES_RANGE_S: Final = 15.0
# Who has not read for so long is gone, or another's: pools at rest read seldom.
UNREAD_S: Final = LOOK_S + 4 * TICK_S
UNREAD_SAMPLES_S: Final = 4 * TICK_S
SAMPLE: Final = "sample"
Say = Callable[[Answer], None]
NAMELESS: Final = PoolWindows(
    trouble=Trouble(
        "NoUrl",
        "spec.metrics.source is Prometheus, and neither the pool nor the operator names its URL: "
        "set spec.metrics.url, or the chart's prometheus.url",
    )
)


class PrometheusReader:
    """One Prometheus. `on_answer` hears of every answer."""

    def __init__(
        self,
        client: PrometheusClient,
        now_s: Callable[[], float],
        on_answer: Say = lambda answer: None,
    ) -> None:
        self._client, self._now_s, self._on_answer = client, now_s, on_answer
        self._read_at_s: dict[PoolKey, float] = {}
        self._pods: dict[PoolKey, PoolPods] = {}
        self._missed_at_s: dict[PodKey, float] = {}  # pods that do not answer the operator
        self._batch = Batch(-1e9)
        self._asked_for: frozenset[PoolKey] = frozenset()
        # Several ticks read one batch.
        self._told: dict[PoolKey, tuple[Batch, PoolPods, PoolWindows]] = {}
        self._samples: Mapping[PodKey, PodSeries] = {}
        self._samples_failure: str | None = None

    def windows(self, key: PoolKey, pods: PoolPods) -> PoolWindows:
        """What the last batch says of a pool's pods as they are now."""
        now_s = self._now_s()
        self._read_at_s[key], self._pods[key] = now_s, pods
        age_s = now_s - self._batch.at_s
        if key not in self._asked_for:
            return windows_of(Batch(now_s), pods)
        if age_s > WINDOWS_TOO_OLD_S:
            failure = f"the last answer is {age_s:.0f} s old"
            return windows_of(Batch(now_s, failure=failure, reason=QUERY_FAILED), pods)
        batch, known_pods, windows = self._told.get(key, (None, None, None))
        if windows is None or batch is not self._batch or known_pods != pods:
            windows = windows_of(self._batch, pods)
            self._told[key] = (self._batch, pods, windows)
        return windows

    def sample(self, pod: PodKey) -> PodSeries | str:
        """A pod's last scrape, or why there is none; asked for from now on."""
        self._missed_at_s[pod] = self._now_s()
        if (found := self._samples.get(pod)) is not None:
            return found
        return f"Prometheus: {self._samples_failure or 'no sample of it yet'}"

    @property
    def is_unread(self) -> bool:
        return not self._pods

    @property
    def is_due(self) -> bool:
        """For its windows: at their interval, and as soon as a pool is new."""
        is_new = bool(self._pods.keys() - self._asked_for)
        return is_new or self._now_s() - self._batch.at_s >= WINDOWS_EVERY_S

    @property
    def is_missing_samples(self) -> bool:
        return bool(self._missed_at_s)

    async def poll_windows(self) -> None:
        pools = dict(self._pods)
        engines = [pod for pods in pools.values() for pod in pods.of(ENGINES)]
        gateways = [pod for pods in pools.values() for pod in pods.of(GATEWAYS)]
        at_s = self._now_s()
        queries = window_queries(
            selector(namespace for namespace, _ in pools),
            self._batch.scrape_s((*engines, *gateways)),
        )
        batch = Batch(at_s, await self._ask(queries, at_s, WINDOWS_TIMEOUT_S))
        if further := _further(batch, engines, gateways):
            answers = await self._ask(further, at_s, WINDOWS_TIMEOUT_S)
            batch = Batch(at_s, {**batch.answers, **answers})
        self._batch, self._asked_for = batch, frozenset(pools)

    async def poll_samples(self) -> None:
        pods = list(self._missed_at_s)
        known = [Pod(pod, 0.0) for pod in pods]
        scrape_s = self._batch.scrape_s(known)
        range_s = max(LEAST_SAMPLES_RANGE_S, NUM_STALE_SCRAPES * min(scrape_s, FIRST_SCRAPE_S))
        where = selector((namespace for namespace, _ in pods), (name for _, name in pods))
        at_s = self._now_s()
        answers = await self._ask({SAMPLE: sample_query(where, range_s)}, at_s, SAMPLES_TIMEOUT_S)
        answer = answers[SAMPLE]
        self._samples_failure = answer.failure
        found = {pod: pod_series(answer.of(pod)) for pod in pods}
        self._samples = {pod: series for pod, series in found.items() if series is not None}

    async def _ask(
        self, queries: Mapping[str, str], at_s: float, timeout_s: float
    ) -> dict[str, Answer]:
        answers = await self._client.ask(queries, at_s, timeout_s)
        for answer in answers.values():
            self._on_answer(answer)
        return answers

    def forget_unread(self) -> None:
        now_s = self._now_s()
        for key in [k for k, at_s in self._read_at_s.items() if now_s - at_s > UNREAD_S]:
            del self._read_at_s[key], self._pods[key]
            self._told.pop(key, None)
        late = [p for p, at_s in self._missed_at_s.items() if now_s - at_s > UNREAD_SAMPLES_S]
        for pod in late:
            del self._missed_at_s[pod]


def _further(batch: Batch, engines: list[Pod], gateways: list[Pod]) -> dict[str, str]:
    """What the first answers leave open: buckets of engines that count no events, and why pods are
    missed."""
    missed = [*batch.missed(ENGINES, engines), *batch.missed(GATEWAYS, gateways)]
    further: dict[str, str] = {}
    if uncounted := batch.without_series("sloEvents[1h]", engines):
        further |= bucket_queries(_selector(uncounted))
    if missed:
        further |= preflight_queries(_selector(missed))
    return further


def _selector(pods: list[PodKey]) -> str:
    return selector((namespace for namespace, _ in pods), (name for _, name in pods))


class Polling:
    """All of them, by URL."""

    def __init__(
        self, session: aiohttp.ClientSession, now_s: Callable[[], float], on_answer: Say
    ) -> None:
        self._session, self._now_s, self._on_answer = session, now_s, on_answer
        self._readers: dict[str, PrometheusReader] = {}
        self._busy: set[tuple[str, str]] = set()

    def of(self, url: str) -> PrometheusReader:
        if url not in self._readers:
            client = PrometheusClient(self._session, url)
            self._readers[url] = PrometheusReader(client, self._now_s, self._on_answer)
        return self._readers[url]

    async def run(self) -> None:
        """Until cancelled. A slow Prometheus holds up no other, and hours no seconds."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for url, reader in list(self._readers.items()):
                    reader.forget_unread()
                    if reader.is_unread and not reader.is_missing_samples:
                        del self._readers[url]
                        continue
                    if reader.is_due:
                        self._begin(tasks, (url, "windows"), reader.poll_windows)
                    if reader.is_missing_samples:
                        self._begin(tasks, (url, "samples"), reader.poll_samples)
                await asyncio.sleep(TICK_S)

    def _begin(
        self, tasks: asyncio.TaskGroup, work: tuple[str, str], poll: Callable[[], Awaitable[None]]
    ) -> None:
        if work not in self._busy:
            self._busy.add(work)
            tasks.create_task(self._poll(work, poll))

    async def _poll(self, work: tuple[str, str], poll: Callable[[], Awaitable[None]]) -> None:
        try:
            await poll()
        except Exception:
            logger.exception("%s of %s: this poll failed", work[1], work[0])
        finally:
            self._busy.discard(work)


def prometheus_url(pool: InferencePool, settings: Settings) -> str | None:
    """None for a pool that does without."""
    metrics = pool.spec.metrics
    if metrics.source == "Direct":
        return None
    return metrics.url.rstrip("/") if metrics.url else settings.prometheus_url


def lacks_url(pool: InferencePool, settings: Settings) -> bool:
    return pool.spec.metrics.source == "Prometheus" and prometheus_url(pool, settings) is None


def counted_thresholds_ms(pool: InferencePool) -> dict[tuple[RequestClass, str], float]:
    """What is worth a look back: both objectives of interactive work, the longest wait of batch."""
    own, batch = (pool.spec.aims(c).slo for c in (RequestClass.INTERACTIVE, RequestClass.BATCH))
    return {
        (RequestClass.INTERACTIVE, "itl"): own.inter_token_latency.threshold_ms,
        (RequestClass.INTERACTIVE, "ttft"): own.time_to_first_token.threshold_ms,
        (RequestClass.BATCH, "ttft"): batch.time_to_first_token.threshold_ms,
    }
