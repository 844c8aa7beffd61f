"""`python -m chairlift_e2e.fleet`: a node for thousands of pods, as a process of its own.

What its engines and gateways show as metrics is what real ones show before their first request, so
that reading it costs what it costs. Ends with SIGTERM.
"""

from __future__ import annotations

import logging
import signal
from typing import Final

from chairlift_e2e.fake_engine import CAPACITY
from chairlift_e2e.fake_node import FakeNode
from chairlift_engine.clock import MonotonicClock
from chairlift_engine.config import Capacity
from chairlift_engine.residency import Gauges
from chairlift_engine.server.metrics import Metrics
from chairlift_gateway.metrics import GatewayMetrics
from chairlift_protocol.policy import Generation, Policy, SloThresholds
from chairlift_protocol.wire import RequestClass

LOOK_S: Final = 4.0


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    with FakeNode(LOOK_S, expositions()):
        signal.sigwait(ends)


def expositions() -> tuple[str, str]:
    """Of an engine and of a gateway at rest."""
    capacity = Capacity(
        batch_size=CAPACITY["batch_size"],
        step_tokens=CAPACITY["step_tokens"],
        num_blocks=CAPACITY["kv_tokens"] // CAPACITY["block_tokens"],
        block_tokens=CAPACITY["block_tokens"],
        model_length_tokens=CAPACITY["model_length_tokens"],
    )
    engine = Metrics("tiny", "0", capacity, MonotonicClock())
    policy = Policy(Generation(0, 0), 16, 256, 256, 1.0, SloThresholds(2000.0, 100.0))
    none = dict.fromkeys(RequestClass, 0)
    gauges = Gauges(none, none, dict.fromkeys(RequestClass), 0, capacity.num_blocks)
    engine.observe_gauges(gauges, policy, policy)
    return engine.render().decode(), GatewayMetrics().exposition().decode()


if __name__ == "__main__":
    main()
