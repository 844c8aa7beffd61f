"""Whose tokens per minute are lowered in a round: `rates`, by what Redis tells of tenants. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from chairlift_operator.quotas.ledger import Ledger, Use
from chairlift_operator.quotas.rates import Asker, Lowered, Strain, lower
from chairlift_operator.quotas.roster import Roster
from chairlift_protocol.quota import DEFAULT_TENANT, Limits, default_holder
from chairlift_protocol.wire import RequestClass


class Lowering:
    """Of one pool under one leadership."""

    def __init__(self) -> None:
        self._lowered = Lowered()
        self._in_force: Mapping[str, int] = {}
        self._limits: Mapping[str, str] = {}

    def turn(
        self,
        roster: Roster,
        ledger: Ledger,
        strain: Strain | None,
        now_s: float,
        every_s: float,
    ) -> Mapping[str, int]:
        """Tokens a minute by holder, of those that may use fewer than set for now. strain: None
        where it is not known. every_s: how often each holder is measured. Costs nothing while no
        interactive request waits."""
        self._limits = roster.limits
        if not ledger.is_fresh(now_s):
            strain = None
        is_needed = bool(self._lowered.rates) or (strain is not None and strain.is_crowded)
        askers = list(_askers(roster, ledger, now_s, every_s)) if is_needed else []
        self._lowered = lower(askers, strain, self._lowered, now_s)
        # What was told holds on for as long as its rates are kept.
        if self._lowered.told or not self._lowered.rates or self._lowered.at_s == now_s:
            self._in_force = self._lowered.told
        return self._lowered.told

    def rate(self, holder: str) -> int | None:
        """None where it is as set: for it, or for all that have no limits of their own."""
        own = holder if holder in self._limits else f"{DEFAULT_TENANT}/{_class_of(holder)}"
        return self._in_force.get(own)

    @property
    def classes(self) -> frozenset[RequestClass]:
        """Those of which a tenant's rate is lowered."""
        return frozenset(RequestClass(_class_of(holder)) for holder in self._in_force)


def _askers(roster: Roster, ledger: Ledger, now_s: float, every_s: float) -> Iterable[Asker]:
    """Those with a limit of tokens to be lowered. Tenants without a quota, of which nobody knows
    how many there are, count as one that asks for all that is set."""
    for holder in (*ledger.asking(), *(default_holder(c) for c in RequestClass)):
        text = roster.limits.get(holder)
        limit = Limits.from_json(text).tokens_per_minute if text is not None else None
        if limit:
            weight = roster.weights.get(holder.rpartition("/")[0], 1.0)
            request_class = RequestClass(_class_of(holder))
            demand = _demand(ledger.use(holder, now_s, every_s))
            yield Asker(holder, request_class, limit, demand, weight)


def _class_of(holder: str) -> str:
    return holder.rpartition("/")[2]


def _demand(use: Use) -> float | None:
    """Tokens a minute: what was used, and what its requests still hold. Who was refused wants more
    than it gets, and how much more is not known."""
    if use.num_used is None or use.num_reserved is None or use.num_refused:
        return None
    return float(use.num_used + use.num_reserved)
