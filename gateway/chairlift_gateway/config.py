"""Command line and start-up values of one gateway process; nothing here changes while it runs.

It knows no HTTP. `__main__` calls it; a `ConfigError` is one sentence for the person at the shell.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from chairlift_gateway.quota.connection import RedisAddress, RedisUrlError
from chairlift_gateway.quota.keeper import OnRedisFailure
from chairlift_protocol.wire import RequestClass

LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(ValueError):
    """A start-up value that cannot be used; the message says which one and what to change."""


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """`batch_key_digests` are SHA-256 hex digests, so that no API key lies in a process list.

    Exactly one of `endpoints_path` and `kubernetes_pool` (namespace/name) is set, and at most one
    of `tenants_path` and `kubernetes_tenants` (a ConfigMap's name). Without `redis` tenants have no
    quotas.
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
    replica_concurrency: int = 256
    max_body_bytes: int = 10 * 1024 * 1024
    batch_max_body_bytes: int = 10 * 1024 * 1024
    drain_s: float = 600.0
    log_level: str = "info"
    tenants_path: Path | None = None
    kubernetes_tenants: str | None = None
    serves_anonymous: bool = True
    trusted_tenant_header: bytes | None = None
    redis: RedisAddress | None = None
    quota_pool: str = ""
    on_redis_failure: OnRedisFailure = OnRedisFailure.LOCAL

    def body_limit_bytes(self, request_class: RequestClass) -> int:
        is_batch = request_class is RequestClass.BATCH
        return self.batch_max_body_bytes if is_batch else self.max_body_bytes

    def __repr__(self) -> str:
        source = self.endpoints_path or self.kubernetes_pool
        return f"GatewayConfig({self.host}:{self.port}, endpoints={source})"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_config(argv: Sequence[str] | None) -> GatewayConfig:
    """Raise ConfigError; `--help` exits by itself."""
    args = _parser().parse_args(argv)
    if args.kubernetes_tenants is not None and args.kubernetes_pool is None:
        raise ConfigError("--kubernetes-tenants: needs --kubernetes-pool, to know the namespace")
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
        replica_concurrency=args.replica_concurrency,
        max_body_bytes=args.max_body_bytes,
        batch_max_body_bytes=args.batch_max_body_bytes,
        drain_s=args.drain_s,
        log_level=args.log_level,
        tenants_path=args.tenants_file,
        kubernetes_tenants=args.kubernetes_tenants,
        serves_anonymous=(args.anonymous or _usual_anonymous(args)) == "serve",
        trusted_tenant_header=args.trusted_tenant_header,
        redis=_redis(args),
        quota_pool=args.quota_pool or args.kubernetes_pool or "",
        on_redis_failure=OnRedisFailure(args.quota_on_redis_failure),
    )


def _usual_anonymous(args: argparse.Namespace) -> str:
    """Whoever tells tenants apart means to know them."""
    told = (args.tenants_file, args.kubernetes_tenants, args.trusted_tenant_header)
    return "refuse" if any(told) else "serve"


def _redis(args: argparse.Namespace) -> RedisAddress | None:
    if args.quota_redis is None:
        return None
    if not (args.quota_pool or args.kubernetes_pool):
        raise ConfigError("--quota-redis: needs --quota-pool, to know whose limits to read")
    try:
        return RedisAddress(
            args.quota_redis,
            args.quota_redis_user,
            args.quota_redis_password_file,
            args.quota_redis_ca_file,
        )
    except RedisUrlError as error:
        raise ConfigError(f"--quota-redis: {error}") from error


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
    add("--replica-concurrency", type=_positive, default=default["replica_concurrency"],
        help="requests at the same time on a replica that never states its load")  # fmt: skip
    add("--max-body-bytes", type=_positive, default=default["max_body_bytes"],
        help="longest body taken of an interactive request")  # fmt: skip
    add("--batch-max-body-bytes", type=_positive, default=default["batch_max_body_bytes"],
        help="longest body taken of a batch request")  # fmt: skip
    add("--drain-s", type=_seconds, default=default["drain_s"],
        help="seconds that requests in flight get to finish after SIGTERM")  # fmt: skip
    add("--log-level", choices=LOG_LEVELS, help="least severe level to log")
    _add_tenants(parser)
    _add_quotas(parser)
    return parser


def _add_tenants(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who is served")
    add = group.add_argument
    known = group.add_mutually_exclusive_group()
    known.add_argument("--tenants-file", type=Path, metavar="FILE",
        help="JSON, re-read when replaced: tenants and the SHA-256 of their API keys")  # fmt: skip
    known.add_argument("--kubernetes-tenants", type=_name, metavar="CONFIGMAP",
        help="watch the same JSON in this ConfigMap, in the namespace of the pool")  # fmt: skip
    add("--anonymous", choices=("serve", "refuse"),
        help="requests without a known tenant; refused where tenants are told apart")  # fmt: skip
    add("--trusted-tenant-header", type=_header, metavar="NAME",
        help="header in which a gateway in front of this one names the tenant; clients must not "
        "be able to go past that")  # fmt: skip


def _add_quotas(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tenants' quotas").add_argument
    add("--quota-redis", metavar="URL", help="redis://host:port/db, or rediss:// for TLS")
    add("--quota-redis-user", metavar="NAME", help="ACL user")
    add("--quota-redis-password-file", type=Path, metavar="FILE",
        help="re-read for each connection")  # fmt: skip
    add("--quota-redis-ca-file", type=Path, metavar="FILE",
        help="who signed Redis' certificate, if not an authority of the system")  # fmt: skip
    add("--quota-pool", type=_pool, metavar="NAMESPACE/NAME",
        help="whose limits; that of --kubernetes-pool unless given")  # fmt: skip
    add("--quota-on-redis-failure", choices=[each.value for each in OnRedisFailure],
        default=OnRedisFailure.LOCAL.value,
        help="local: this gateway's share of the limits; allow: everybody, charged afterwards; "
        "deny: nobody")  # fmt: skip


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


def _header(text: str) -> bytes:
    if not re.fullmatch(r"[A-Za-z0-9-]+", text):
        raise argparse.ArgumentTypeError(f"must be a header's name, not {text!r}")
    return text.lower().encode()


def _pool(text: str) -> str:
    if not re.fullmatch(r"[-a-z0-9]+/[-a-z0-9]+", text):
        raise argparse.ArgumentTypeError(f"must be NAMESPACE/NAME of a pool, not {text!r}")
    return text


def _name(text: str) -> str:
    if not re.fullmatch(r"[-.a-z0-9]{1,253}", text):
        raise argparse.ArgumentTypeError(f"must be the name of a ConfigMap, not {text!r}")
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
