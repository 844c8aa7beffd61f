"""What a process is said to have spent."""

from __future__ import annotations

import os
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from chairlift_bench.operator_process import Cost, Spent, cpu_s, rss_mib, total


def test_calls_are_summed_over_all_their_labels() -> None:
    registry = CollectorRegistry()
    calls = Counter("calls", "Calls.", ["verb"], registry=registry)
    calls.labels("GET").inc(3)
    calls.labels("PATCH").inc(2)
    Counter("calls_refused", "Others.", registry=registry).inc(9)
    page = generate_latest(registry).decode()
    assert total(page, "calls_total") == 5
    assert total(page, "calls_of_nobody_total") == 0


def test_a_cost_is_what_came_between_by_the_minute() -> None:
    cost = Cost.between(Spent(10.0, 2.0, 100, 300), Spent(130.0, 14.0, 340, 900))
    assert (cost.wall_s, cost.cores) == (120.0, 0.1)
    assert (cost.own_calls_per_minute, cost.server_calls_per_minute) == (120, 300)


def test_this_process_spends_what_it_says() -> None:
    before_s, began_s = cpu_s(os.getpid()), time.process_time()
    while time.process_time() - began_s < 0.2:
        pass
    assert cpu_s(os.getpid()) - before_s == pytest.approx(0.2, abs=0.15)
    assert 10 < rss_mib(os.getpid()) <= rss_mib(os.getpid(), "VmHWM")
