"""Command line and start-up values of one gateway process; nothing here changes while it runs.

It knows no HTTP. `__main__` calls it; a `ConfigError` is one sentence for the person at the shell.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(ValueError):
    """A start-up value that cannot be used; the message says which one and what to change."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`batch_key_digests` are SHA-256 hex digests, so that no API key lies in a process list.

    Exactly one of `endpoints_path` and `kubernetes_pool` (namespace/name) is set.
    """

    endpoints_path: Path | None
    internal_token: str
    kubernetes_pool: str | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    batch_key_digests: tuple[str, ...] = ()
    hold_s: float = 30.0
    batch_hold_s: float = 600.0  # as long as the openai client waits for an answer
    hold_max: int = 256
    max_body_bytes: int = 10 * 1024 * 1024
    drain_s: float = 600.0
    log_level: str = "info"

    def __repr__(self) -> str:
        source = self.endpoints_path or self.kubernetes_pool
        return f"GatewayConfig({self.host}:{self.port}, endpoints={source})"

    def is_batch_key(self, key: bytes) -> bool:
        """Compare with every digest, in a time that does not tell which one matched."""
        digest = hashlib.sha256(key).hexdigest()
        matches = [hmac.compare_digest(digest, known) for known in self.batch_key_digests]
        return any(matches)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_config(argv: Sequence[str] | None) -> GatewayConfig:
    """Raise ConfigError; `--help` exits by itself."""
    args = _parser().parse_args(argv)
    return GatewayConfig(
        endpoints_path=args.endpoints_file,
        kubernetes_pool=args.kubernetes_pool,
        internal_token=_read_token(args.internal_token_file),
        host=args.host,
        port=args.port,
        batch_key_digests=tuple(args.batch_key_sha256),
        hold_s=args.hold_s,
        batch_hold_s=args.batch_hold_s,
        hold_max=args.hold_max,
        max_body_bytes=args.max_body_bytes,
        drain_s=args.drain_s,
        log_level=args.log_level,
    )


def _parser() -> argparse.ArgumentParser:
    default = {name: field.default for name, field in GatewayConfig.__dataclass_fields__.items()}
    parser = _Parser(
        prog="chairlift-gateway",
        description="One address in front of a pool's engine replicas.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(**{name: default[name] for name in ("host", "port", "log_level")})
    add = parser.add_argument
    add("--host", help="address to listen on")
    add("--port", type=_port, help="port to listen on; 0 picks a free one and prints it")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--endpoints-file", type=Path,
        help='JSON, re-read when replaced: {"replicas": [{"name": ..., "url": ...}]}')  # fmt: skip
    source.add_argument("--kubernetes-pool", type=_pool, metavar="NAMESPACE/NAME",
        help="watch the replicas of this InferencePool, in the cluster of this pod")  # fmt: skip
    add("--internal-token-file", type=Path, required=True, default=argparse.SUPPRESS,
        help="file with the pool's internal token, which engines check")  # fmt: skip
    add("--batch-key-sha256", type=_digest, action="append", default=[], metavar="HEX",
        help="SHA-256 of an API key whose requests are batch class; repeatable")  # fmt: skip
    add("--hold-s", type=_seconds, default=default["hold_s"],
        help="seconds an interactive request may wait for a ready replica")  # fmt: skip
    add("--batch-hold-s", type=_seconds, default=default["batch_hold_s"],
        help="seconds a batch request may wait for a replica that serves batch work")  # fmt: skip
    add("--hold-max", type=_count, default=default["hold_max"],
        help="requests of each class that may wait so at the same time")  # fmt: skip
    add("--max-body-bytes", type=_positive, default=default["max_body_bytes"],
        help="longest request body taken")  # fmt: skip
    add("--drain-s", type=_seconds, default=default["drain_s"],
        help="seconds that requests in flight get to finish after SIGTERM")  # fmt: skip
    add("--log-level", choices=LOG_LEVELS, help="least severe level to log")
    return parser


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--internal-token-file: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--internal-token-file: {path} must hold ASCII text") from error
    if not token or not token.isprintable():
        raise ConfigError(f"--internal-token-file: {path} must hold one line with the token")
    return token


def _pool(text: str) -> str:
    if not re.fullmatch(r"[-a-z0-9]+/[-a-z0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be NAMESPACE/NAME of a pool, not {text!r}")
    return text


def _port(text: str) -> int:
    return _whole(text, 0, 65535)


def _count(text: str) -> int:
    return _whole(text, 0, 1_000_000)


def _positive(text: str) -> int:
    return _whole(text, 1, 2**40)


def _whole(text: str, minimum: int, maximum: int) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text) or not minimum <= int(text) <= maximum:
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {minimum} to {maximum}, not {text!r}"
        )
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to 86400, not {text!r}")
    return seconds


def _digest(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(
            "must be the 64 hex digits of a SHA-256, as `printf %s KEY | sha256sum` prints them"
        )
    return text.lower()
