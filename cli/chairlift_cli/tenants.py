"""Tenants on one machine: what the gateway is told of them, and their limits written into Redis.

Files take the place of what a cluster has: TenantQuotas, API keys and Redis' password. The law of
who may use what is the operator's. `local` checks, `supervisor` runs it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from chairlift_cli.children import options
from chairlift_cli.errors import CliError
from chairlift_cli.pool_file import left_unlimited, read_quotas, read_text
from chairlift_gateway.identity import TenantsError, TenantsFile
from chairlift_gateway.quota.local_law import UNLEARNT
from chairlift_operator.congestion import strain_of
from chairlift_operator.control_loop import Tick
from chairlift_operator.gateway_arguments import gateway_arguments
from chairlift_operator.quota_spec import TenantQuota
from chairlift_operator.quotas.idle import has_idle_capacity
from chairlift_operator.quotas.ledger import Ledger
from chairlift_operator.quotas.lowering import Lowering
from chairlift_operator.quotas.rates import Strain
from chairlift_operator.quotas.roster import Claim, Roster, roster_of
from chairlift_operator.quotas.store import QuotaStore, RedisAccess, RedisStore, StoreError
from chairlift_operator.spec import InferencePool
from chairlift_operator.spec_pods import Gateway

ROUND_S: Final = 2.0
SEEN_S: Final = 15.0  # three ticks
PASSWORD_OPTION: Final = "--redis-password-file"


@dataclass(frozen=True, slots=True)
class TenantFiles:
    """keys: a file of tenants, as `chairlift key create` keeps it. quotas: TenantQuotas.
    password, ca: what the pool's Secrets hold on a cluster."""

    keys: Path | None = None
    quotas: Path | None = None
    password: Path | None = None
    ca: Path | None = None


def check_tenants(pool: InferencePool, files: TenantFiles) -> list[str]:
    """What to say of them that is no error; raise CliError where they do not fit the pool."""
    if files.keys is not None:
        _check_keys(files.keys)
    if pool.spec.quotas is None:
        if files.quotas is not None:
            raise CliError("--tenant-quotas: the pool keeps none: add spec.quotas.redis.url to it")
        return []
    redis = pool.spec.quotas.redis
    if redis.password_secret is not None and files.password is None:
        raise CliError(f"quotas.redis.passwordSecret is for clusters: give {PASSWORD_OPTION}")
    if redis.ca_secret is not None and files.ca is None:
        raise CliError("quotas.redis.caSecret is for clusters: give --redis-ca-file")
    for option, path in ((PASSWORD_OPTION, files.password), ("--redis-ca-file", files.ca)):
        _text(option, path)
    text = _quotas_text(files.quotas)
    roster_in(pool, files.quotas, text)
    return left_unlimited(_quotas_of(pool, files.quotas, text))


def _check_keys(path: Path) -> None:
    try:
        TenantsFile(path)
    except TenantsError as error:
        raise CliError(
            f"--tenants-file: {error}; `chairlift key create TENANT -f FILE` makes one"
        ) from error


def tenant_arguments(pool: InferencePool, files: TenantFiles) -> list[str]:
    """For the gateway's command line."""
    values: dict[str, object] = {}
    quotas = pool.spec.quotas
    if files.keys is not None:
        values["--tenants-file"] = files.keys
    if quotas is not None:
        values["--quota-redis"] = quotas.redis.url
        values["--quota-pool"] = _name(pool)
        values["--quota-on-redis-failure"] = quotas.on_redis_failure.lower()
        given = {
            "--quota-redis-user": quotas.redis.user,
            "--quota-redis-password-file": files.password,
            "--quota-redis-ca-file": files.ca,
        }
        values |= {option: value for option, value in given.items() if value is not None}
    return options(values | gateway_arguments(pool.spec.gateway))


def gateway_fields_for_clusters(gateway: Gateway) -> bool:
    """Whether it says more than a gateway here is told."""
    rest = replace(
        gateway,
        anonymous=None,
        trusted_tenant_header=None,
        replica_concurrency=None,
        batch_max_body_bytes=None,
    )
    return rest != Gateway()


def roster_in(pool: InferencePool, path: Path | None, text: str) -> Roster:
    """The limits of this pool's TenantQuotas in the text of a file; raise CliError."""
    # Secrets are a cluster's: keys come from a file of tenants.
    own = _quotas_of(pool, path, text)
    if path is not None and not own:
        # An empty file is more often a half-written one than a pool that shall limit nobody.
        raise CliError(
            f"{path}: holds no TenantQuota of pool {pool.name} (spec.poolRef.name); to limit "
            "nobody, give one for tenant '*' without limits"
        )
    # Secrets are a cluster's: keys come from a file of tenants.
    roster = roster_of([Claim(q.name, "", replace(q.spec, keys=())) for q in own], {})
    for name, verdict in roster.verdicts.items():
        if verdict.tenant is None:
            raise CliError(f"{path}: TenantQuota {name}: {verdict.accepted.message}")
    return roster


def _quotas_of(pool: InferencePool, path: Path | None, text: str) -> list[TenantQuota]:
    quotas = read_quotas(path, text) if path is not None else []
    return [quota for quota in quotas if quota.spec.pool_ref.name == pool.name]


def without_redis(pool: InferencePool) -> str:
    """What holds while it is away, and what to do."""
    assert pool.spec.quotas is not None
    held, first = pool.spec.quotas.on_redis_failure, UNLEARNT
    holds = {
        "Local": (
            "the gateway goes by the limits it last knew, and for a tenant of whom it knew none by "
            f"{first.tokens_per_minute} tokens and {first.requests_per_minute} requests a minute "
            f"and {first.concurrency} requests at the same time"
        ),
        "Allow": "the gateway admits everybody and charges afterwards",
        "Deny": "the gateway refuses every request with 503",
    }[held]
    url = pool.spec.quotas.redis.url
    return (
        f"until it is back, {holds} (quotas.onRedisFailure: {held}); start a Redis at {url}, or "
        "name another by --set quotas.redis.url=URL"
    )


def open_store(pool: InferencePool, files: TenantFiles) -> QuotaStore | None:
    """None for a pool without quotas."""
    if pool.spec.quotas is None:
        return None
    redis = pool.spec.quotas.redis
    password = _text(PASSWORD_OPTION, files.password)
    ca = _text("--redis-ca-file", files.ca)
    return RedisStore(RedisAccess(redis.url, redis.user, password, ca, PASSWORD_OPTION))


class LocalQuotas:
    """Keeps the limits of one pool in Redis while it is served."""

    def __init__(
        self,
        pool: InferencePool,
        files: TenantFiles,
        store: QuotaStore | None,
        say: Callable[[str], None],
    ) -> None:
        self._pool, self._files, self._store, self._say = pool, files, store, say
        self._roster: Roster | None = None
        self._seen: str | None = None
        self._idle_until_s = 0.0
        self._strain: Strain | None = None
        self._ledger, self._lowering = Ledger(), Lowering()
        self._said: str | None = None
        self._is_away = False  # Redis, at the last round

    def weights(self) -> Mapping[str, float] | None:
        """Of the tenants, for the engines; None where quotas say nothing of them."""
        return self._roster.weights if self._roster is not None else None

    def saw(self, tick: Tick) -> None:
        if self._store is None:
            return
        made, gateway, now_s = tick.plan, tick.snapshot.gateway, time.monotonic()
        is_idle = has_idle_capacity(made.replicas, gateway, made.conditions)
        self._idle_until_s = now_s + SEEN_S if is_idle else 0.0
        self._strain = strain_of(self._pool, made.replicas, made.memory, gateway, now_s)

    async def begin(self) -> None:
        """Before the gateway starts, which would go by its own limits until it finds some."""
        if self._store is not None:
            await self.round(self._store)

    async def run(self) -> None:
        """Until cancelled; nothing to do for a pool without quotas."""
        while self._store is not None:
            await self.round(self._store)
            await asyncio.sleep(ROUND_S)

    async def round(self, store: QuotaStore) -> None:
        trouble, is_away = None, False
        try:
            self._reread()
        except CliError as error:
            trouble = f"quotas stay as they were: {error}"
        try:
            if self._roster is not None:
                await self._sync(store, self._roster)
        except StoreError as error:
            is_away = True
            trouble = f"{str(error).rstrip('.')}; {without_redis(self._pool)}"
        if self._is_away and not is_away:
            self._say("quotas are in force again")
        if trouble is not None and trouble != self._said:
            self._say(trouble)
        self._said, self._is_away = trouble, is_away

    async def _sync(self, store: QuotaStore, roster: Roster) -> None:
        now_s = time.monotonic()
        rates = self._lowering.turn(roster, self._ledger, self._strain, now_s, ROUND_S)
        is_idle, pool = now_s < self._idle_until_s, _name(self._pool)
        holders = roster.holders(roster.verdicts)
        counts = await store.sync(pool, roster.limits, holders, is_idle=is_idle, rates=rates)
        self._ledger.note(time.monotonic(), counts)

    def _reread(self) -> None:
        """Follow what two rounds in a row have read: a file that is being written may end between
        two quotas, and tenants whose quotas are not there yet would have none. Raise CliError."""
        text = _quotas_text(self._files.quotas)
        is_settled, self._seen = text == self._seen, text
        roster = roster_in(self._pool, self._files.quotas, text)
        if is_settled or self._roster is None:
            self._roster = roster

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


def _name(pool: InferencePool) -> str:
    return f"{pool.namespace}/{pool.name}"


def _quotas_text(path: Path | None) -> str:
    return read_text(path) if path is not None else ""


def _text(option: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"{option}: cannot read {path}: {error}; name a readable file") from error
