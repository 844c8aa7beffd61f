"""`chairlift-engine`: one engine replica in one process.

Turns the command line into a runner, a tokenizer and a capacity, and hands them to the server.
torch is imported only for `--runner torch`, after its environment has been set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import math
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from chairlift_engine.clock import Clock, MonotonicClock
from chairlift_engine.command_line import parser
from chairlift_engine.config import Capacity
from chairlift_engine.live_policy import check_range
from chairlift_engine.model_source import ModelSourceError, resolve
from chairlift_engine.server.door import Bounds
from chairlift_engine.server.engine_server import (
    THREAD_PREFIX,
    EngineServer,
    LoadedModel,
    ServerSettings,
)
from chairlift_engine.simulator import SimulatorRunner
from chairlift_engine.simulator_profile import ProfileError, open_profile, simulated_kv_tokens
from chairlift_engine.tokenizer import ByteTokenizer, HfTokenizer, Tokenizer
from chairlift_protocol.policy import Policy

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 16
# What a simulated replica has unless told otherwise: room for every slot at this many tokens.
SIMULATED_LENGTH_TOKENS: Final = 4096
USAGE_EXIT_CODE: Final = 2


class StartError(Exception):
    """Nothing can be served like this; the message says what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    exit_code = run(argv)
    if any(thread.name.startswith(THREAD_PREFIX) for thread in threading.enumerate()):
        # A load, a step or a tokenisation still runs and cannot be interrupted, only left.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code


def run(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    options = parser().parse_args(argv)
    logging.basicConfig(
        level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        return asyncio.run(_serve(options))
    except StartError as error:
        print(f"chairlift-engine: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE


async def _serve(options: argparse.Namespace) -> int:
    settings = ServerSettings(
        model_name=options.model_name,
        engine_id=options.engine_id,
        drain_s=options.drain_s,
        admin_token=_token("--admin-token-file", options.admin_token_file),
        internal_token=_token("--internal-token-file", options.internal_token_file),
        bounds=Bounds(options.max_waiting, options.queue_timeout_s),
    )
    clock = MonotonicClock()
    load = partial(_load, options, clock)
    with (
        _bind("--port", options.host, options.port) as public,
        _bind("--admin-port", options.host, options.admin_port) as admin,
    ):
        server = EngineServer(settings, load, clock)
        server.handle_signals()
        return await server.run(public, admin, lambda: _announce(options, public, admin))


def _load(options: argparse.Namespace, clock: Clock) -> LoadedModel:
    """Raise StartError for what the command line or the model's files have to answer for."""
    try:
        simulated = options.runner == "simulator"
        loaded = _load_simulator(options, clock) if simulated else _load_torch(options)
        return replace(loaded, policy=_policy(options.policy_file, loaded.capacity))
    except (ModelSourceError, ProfileError, ValueError, OSError) as error:
        raise StartError(str(error)) from error


def _load_simulator(options: argparse.Namespace, clock: Clock) -> LoadedModel:
    profile, file = open_profile(options.simulator_profile)
    clock.sleep(profile.load_s)
    tokenizer = _local_tokenizer(options.model_source)
    length_tokens = options.max_length or SIMULATED_LENGTH_TOKENS
    kv_tokens = options.kv_tokens or simulated_kv_tokens(length_tokens, options.batch_size)
    return LoadedModel(
        runner=SimulatorRunner(profile, clock, file=file),
        tokenizer=tokenizer,
        capacity=_capacity(options, kv_tokens // BLOCK_TOKENS, length_tokens),
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _local_tokenizer(source: str | None) -> Tokenizer:
    """The model's, where its files lie on this machine: a simulator downloads nothing."""
    if source is not None and not source.startswith("hf://"):
        try:
            return HfTokenizer(resolve(source))
        except (ModelSourceError, ImportError) as error:
            logger.info("byte-level tokens, not the model's: %s", error)
    return ByteTokenizer()


def _load_torch(options: argparse.Namespace) -> LoadedModel:
    if options.model_source is None:
        raise StartError("--model-source: is needed with --runner torch")
    folder = resolve(options.model_source)
    # Waiting threads must not spin: the event loop and the step share the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from chairlift_engine.kv_memory import pick_num_blocks
    from chairlift_engine.models import load_model
    from chairlift_engine.torch_runner import TorchRunner

    torch.set_num_threads(options.threads or min(torch.get_num_threads(), _cpu_quota()))
    loaded = load_model(folder, options.dtype, options.max_length)
    tokenizer = HfTokenizer(folder, loaded.num_embeddings)
    num_blocks = pick_num_blocks(
        loaded.kv_bytes_per_token, BLOCK_TOKENS, loaded.device, options.kv_tokens
    )
    return LoadedModel(
        runner=TorchRunner(loaded, num_blocks, BLOCK_TOKENS),
        tokenizer=tokenizer,
        capacity=_capacity(options, num_blocks, loaded.model_length_tokens),
        eos_token_ids=loaded.eos_token_ids | tokenizer.eos_token_ids,
    )


def _cpu_quota() -> int:
    """Cores that the container may use: torch counts the machine's, and would trip over itself."""
    num_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(num_cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no cgroup of this version, or "max"
        return num_cores


def _capacity(options: argparse.Namespace, num_blocks: int, length_tokens: int) -> Capacity:
    for name, value, minimum in (
        ("--step-tokens", options.step_tokens, BLOCK_TOKENS),
        ("--kv-tokens", num_blocks * BLOCK_TOKENS, BLOCK_TOKENS),
        ("--max-length", length_tokens, 2),  # a token to read and one to say
    ):
        if value < minimum:
            raise StartError(f"{name}: must be at least {minimum}, not {value}")
    return Capacity(
        batch_size=options.batch_size,
        step_tokens=options.step_tokens,
        num_blocks=num_blocks,
        block_tokens=BLOCK_TOKENS,
        model_length_tokens=length_tokens,
        share_prefixes=options.share_prefixes == "yes",
    )


def _policy(path: Path | None, capacity: Capacity) -> Policy | None:
    if path is None:
        return None
    try:
        policy = Policy.from_json(json.loads(path.read_text()))
        check_range(policy, capacity)
    except (OSError, ValueError) as error:
        raise StartError(f"--policy-file: {path}: {error}") from None
    return policy


def _token(option: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{option}: {path} cannot be read: {error}") from None
    if not token:
        raise StartError(f"{option}: {path} is empty; write the token into it")
    return token


def _bind(option: str, host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise StartError(f"{option}: cannot listen on {host}:{port}: {error.strerror}") from None
    return bound


def _announce(options: argparse.Namespace, public: socket.socket, admin: socket.socket) -> None:
    """Tell whoever started this process where it listens; the file is whole whenever it exists."""
    urls = {"url": _url(public), "admin_url": _url(admin)}
    logger.info("listening on %s, admin on %s", urls["url"], urls["admin_url"])
    path: Path | None = options.announce_file
    if path is not None:
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps({**urls, "pid": os.getpid()}))
            unfinished.replace(path)
        except OSError as error:
            raise StartError(f"--announce-file: {path} cannot be written: {error}") from None


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
