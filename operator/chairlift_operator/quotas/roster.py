"""A pool's tenants: whose limits and keys are in force, and what is said to each quota. Pure.

Of several quotas for one tenant the oldest counts, and a key that two tenants name is that of the
older quota: a newcomer takes nothing from anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from chairlift_operator.decisions import Condition, Truth
from chairlift_operator.quota_spec import TenantQuotaSpec
from chairlift_operator.quotas.key_secrets import KeyTrouble, SecretKeys
from chairlift_protocol.quota import DEFAULT_TENANT, Limits, default_holder, holder_of
from chairlift_protocol.wire import RequestClass

ACCEPTED: Final = "Accepted"
KEYS_MISSING: Final = "KeysMissing"
# A ConfigMap holds 1 MiB, and a key takes up to 190 bytes of it.
MOST_KEYS: Final = 5000


@dataclass(frozen=True, slots=True)
class Claim:
    """A `TenantQuota` as it is in the cluster. created: sorts by age. spec: None where it cannot be
    followed, and trouble says why."""

    name: str
    created: str
    spec: TenantQuotaSpec | None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """On one quota. tenant: whose accounts tell what it uses; None where it is not in force."""

    accepted: Condition
    keys_missing: Condition
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Roster:
    """limits: as Redis shall hold them, by holder. tenants: the gateways' file of tenants. weights:
    by tenant, of those whose weight is not 1."""

    limits: Mapping[str, str]
    tenants: str
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def holders(self) -> tuple[str, ...]:
        """Who has an account that tells what a quota's tenant uses."""
        known = {verdict.tenant for verdict in self.verdicts.values() if verdict.tenant}
        known.discard(DEFAULT_TENANT)
        return tuple(holder_of(tenant, c) for tenant in sorted(known) for c in RequestClass)


def roster_of(claims: Sequence[Claim], secrets: Mapping[str, SecretKeys | None]) -> Roster:
    """secrets: by name; None where the API server could not be asked yet."""
    limits = {default_holder(c): Limits().to_json() for c in RequestClass}
    keys = _KeyRing()
    first: dict[str, str] = {}
    verdicts, weights = {}, {}
    for claim in sorted(claims, key=lambda claim: (claim.created, claim.name)):
        spec = claim.spec
        if spec is None:
            verdicts[claim.name] = _refused("Refused", claim.trouble)
            continue
        holder = first.setdefault(spec.tenant, claim.name)
        if holder != claim.name:
            told = (
                f"TenantQuota {holder} is older and has tenant {spec.tenant} of this pool: merge "
                "the two, or name another tenant"
            )
            verdicts[claim.name] = _refused("TenantTaken", told)
            continue
        for request_class in RequestClass:
            if (own := spec.of(request_class)) is not None:
                limits[holder_of(spec.tenant, request_class)] = own.limits().to_json()
        if spec.weight != 1.0:
            weights[spec.tenant] = spec.weight
        told = f"Its limits hold for tenant {spec.tenant}."
        accepted = Condition(ACCEPTED, Truth.TRUE, "Followed", told)
        verdicts[claim.name] = Verdict(accepted, keys.add(spec, secrets), spec.tenant)
    return Roster(limits, keys.document(), verdicts, weights)


def all_refused(claims: Sequence[Claim], reason: str, message: str) -> Mapping[str, Verdict]:
    """Quotas of a pool that has none in force; one that is wrong in itself is told that first."""
    return {
        claim.name: _refused("Refused", claim.trouble)
        if claim.spec is None
        else _refused(reason, message)
        for claim in claims
    }


def _refused(reason: str, message: str) -> Verdict:
    accepted = Condition(ACCEPTED, Truth.FALSE, reason, f"{message.rstrip('.')}.")
    told = "Its keys are not looked at before it is accepted."
    return Verdict(accepted, Condition(KEYS_MISSING, Truth.UNKNOWN, "NotAccepted", told))


class _KeyRing:
    """Keys of tenants, each of one tenant only."""

    def __init__(self) -> None:
        self._tenants: dict[str, dict[str, str]] = {}  # class by digest, by tenant
        self._whose: dict[str, str] = {}

    def add(self, spec: TenantQuotaSpec, secrets: Mapping[str, SecretKeys | None]) -> Condition:
        """What is to be said of the keys."""
        own = self._tenants.setdefault(spec.tenant, {})
        troubles, unasked = [], []
        for source in spec.keys:
            read = secrets.get(source.secret)
            if read is None:
                unasked.append(source.secret)
                continue
            if read.trouble is not None:
                troubles.append(read.trouble)
            for digest in read.digests:
                taken = self._whose.get(digest, spec.tenant) != spec.tenant
                is_full = len(self._whose) >= MOST_KEYS and digest not in self._whose
                if taken or is_full:
                    troubles.append(_left_out(source.secret, taken))
                    continue
                self._whose[digest] = spec.tenant
                own.setdefault(digest, source.request_class)
        return _keys_missing(spec, troubles, unasked, len(own))

    def document(self) -> str:
        listed = [
            {"tenant": tenant, "keys": [{"sha256": d, "class": c} for d, c in sorted(keys.items())]}
            for tenant, keys in sorted(self._tenants.items())
            if keys
        ]
        return json.dumps({"tenants": listed}, separators=(",", ":"))


def _left_out(secret: str, is_taken: bool) -> KeyTrouble:
    if is_taken:
        told = f"Secret {secret} holds a key of another tenant, which keeps it: make another key"
        return KeyTrouble("KeyTaken", told)
    told = f"Secret {secret}: the pool has {MOST_KEYS} keys, and no room for more: remove old ones"
    return KeyTrouble("TooManyKeys", told)


def _keys_missing(
    spec: TenantQuotaSpec, troubles: list[KeyTrouble], unasked: list[str], num_keys: int
) -> Condition:
    if troubles:
        told = "; ".join(trouble.message for trouble in troubles)
        return Condition(KEYS_MISSING, Truth.TRUE, troubles[0].reason, f"{told}.")
    if unasked:
        told = f"Secret {unasked[0]} has not been read yet."
        return Condition(KEYS_MISSING, Truth.UNKNOWN, "NotRead", told)
    if not spec.keys:
        told = "It names no Secrets: requests are known by a trusted header, or by no key."
        return Condition(KEYS_MISSING, Truth.FALSE, "NoneNamed", told)
    return Condition(KEYS_MISSING, Truth.FALSE, "AllRead", f"Gateways know {num_keys} keys.")
