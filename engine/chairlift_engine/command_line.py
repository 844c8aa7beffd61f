"""The options of `chairlift-engine`, and what is no value for them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from chairlift_engine import VERSION
from chairlift_engine.server.door import Bounds
from chairlift_engine.server.engine_server import DRAIN_S


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("chairlift-engine", description="One engine replica.")
    add = made.add_argument
    add("--version", action="version", version=f"chairlift-engine {VERSION}")
    add("--runner", choices=("torch", "simulator"), default="torch")
    add("--model-source", help="hf://owner/name[@revision], file:///path or cache://name")
    add("--model-name", required=True, help="what clients call the model")
    add("--max-length", type=_positive, help="prompt and answer, in tokens; default: the model's")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--simulator-profile", default="reference", help="reference, fast, slow, FILE.toml or JSON")
    add("--host", default="127.0.0.1")
    add("--port", type=_port, default=8000, help="public port; 0 picks one")
    add("--admin-port", type=_port, default=0, help="admin port; 0 picks one")
    add("--batch-size", type=_positive, default=32, help="most running sequences, ever")
    add("--step-tokens", type=_positive, default=512, help="most tokens of one step, ever")
    add("--kv-tokens", type=_positive, help="KV cache, in tokens; default: what memory allows")
    add(
        "--share-prefixes",
        choices=("yes", "no"),
        default="no",
        help="whether tenants find each other's prompts cached",
    )
    add("--policy-file", type=Path, help="JSON of the first policy; default: all of the capacity")
    add("--admin-token-file", type=Path, help="without it every admin call is refused")
    add("--internal-token-file", type=Path, help="without it no gateway header is believed")
    add("--engine-id", default="0", help="label `engine` of the metrics")
    add("--drain-s", type=_seconds, default=DRAIN_S, help="time to finish on SIGTERM")
    bounds = Bounds()
    add("--max-waiting", type=_count, default=bounds.max_waiting,
        help="requests of a class that may wait, more get 503 (default: %(default)s)")  # fmt: skip
    add("--queue-timeout-s", type=_seconds,
        help="longest wait of an interactive request to be started; default: any")  # fmt: skip
    add("--threads", type=_positive, help="of torch; default: what the container may use")
    add("--announce-file", type=Path, help="written with URLs and pid once the ports listen")
    levels = ("debug", "info", "warning", "error")
    add("--log-level", choices=levels, default="info")
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to 86400, not {text!r}")
    return seconds
