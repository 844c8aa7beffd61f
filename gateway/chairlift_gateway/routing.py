"""Which replica gets the next request: a pure choice, and the counts that it is made from.

A replica's load is what this gateway has in flight there plus what others have. The others' share
comes from the load that an engine states in every response: whatever exceeds our own in-flight
count at that moment. A statement ages out: else a replica that is no longer chosen would keep its
last high number, and so never be chosen again.

It knows no HTTP and reads no clock; times are arguments. `upstream` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chairlift_protocol.load import Load
from chairlift_protocol.wire import RequestClass

# A stated load older than this says nothing.
STATEMENT_FRESH_S = 10.0
# How long a replica that failed before its first byte is used only when there is no other.
AVOID_S = 2.0
# Held batch work asks this often whether a replica has begun to lend.
LOOK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Replica:
    """Two replicas of one name but another address are different ones."""

    name: str
    url: str
    request_class: RequestClass = RequestClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class Candidate:
    """`last_turn` orders equals: the one whose last turn is longest ago comes first."""

    replica: Replica
    num_requests: int
    is_avoided: bool
    last_turn: int


def least_loaded(candidates: Sequence[Candidate]) -> Candidate | None:
    """The least loaded of those not avoided, else the least loaded of the avoided."""
    return min(
        candidates,
        key=lambda each: (each.is_avoided, each.num_requests, each.last_turn),
        default=None,
    )


@dataclass(slots=True)
class _Account:
    num_in_flight: int = 0
    num_of_others: int = 0
    lend_share: float = 0.0
    is_draining: bool = False
    stated_at_s: float = float("-inf")
    avoided_until_s: float = float("-inf")
    last_turn: int = 0

    def is_stated(self, now_s: float) -> bool:
        return now_s - self.stated_at_s <= STATEMENT_FRESH_S

    def is_routable(self, now_s: float) -> bool:
        return not (self.is_draining and self.is_stated(now_s))

    def lends(self, now_s: float) -> bool:
        """Whether batch work may borrow it: it has said so lately."""
        return self.lend_share > 0 and self.is_stated(now_s)

    def num_requests(self, now_s: float) -> int:
        return self.num_in_flight + (self.num_of_others if self.is_stated(now_s) else 0)


@dataclass(slots=True)
class Router:
    """The replicas that may be routed to, and what is known of each."""

    _accounts: dict[Replica, _Account] = field(default_factory=dict)
    _listed: tuple[Replica, ...] = ()
    _turn: int = 0

    @property
    def replicas(self) -> tuple[Replica, ...]:
        return self._listed

    def replace(self, replicas: Iterable[Replica]) -> bool:
        """Take a new list and say whether it differs; what is in flight elsewhere stays counted."""
        listed = tuple(replicas)
        changed = set(listed) != set(self._listed)
        self._listed = listed
        self._accounts = {
            replica: account
            for replica, account in self._accounts.items()
            if replica in listed or account.num_in_flight
        }
        for replica in listed:
            self._accounts.setdefault(replica, _Account())
        return changed

    def num_routable(self, request_class: RequestClass, now_s: float) -> int:
        return len(self._candidates(request_class, now_s))

    def choose(
        self, request_class: RequestClass, now_s: float, excluding: Replica | None = None
    ) -> Replica | None:
        """Interactive work goes to interactive replicas only, batch work also to those that
        lend."""
        candidates = self._candidates(request_class, now_s)
        chosen = least_loaded([each for each in candidates if each.replica != excluding])
        return chosen.replica if chosen else None

    def _candidates(self, request_class: RequestClass, now_s: float) -> list[Candidate]:
        found = []
        for replica in self._listed:
            account = self._accounts[replica]
            serves = replica.request_class is request_class or (
                request_class is RequestClass.BATCH and account.lends(now_s)
            )
            if not serves or not account.is_routable(now_s):
                continue
            found.append(
                Candidate(
                    replica=replica,
                    num_requests=account.num_requests(now_s),
                    is_avoided=account.avoided_until_s > now_s,
                    last_turn=account.last_turn,
                )
            )
        return found

    def unstated(self, now_s: float) -> list[Replica]:
        """Interactive replicas of which it is not known whether they lend."""
        return [
            replica
            for replica in self._listed
            if replica.request_class is RequestClass.INTERACTIVE
            and not self._accounts[replica].is_stated(now_s)
        ]

    def begin(self, replica: Replica) -> None:
        """Count a request as in flight; every begin is followed by exactly one end."""
        self._turn += 1
        account = self._accounts.setdefault(replica, _Account())
        account.num_in_flight += 1
        account.last_turn = self._turn

    def end(self, replica: Replica) -> None:
        account = self._accounts[replica]
        account.num_in_flight -= 1
        if not account.num_in_flight and replica not in self._listed:
            del self._accounts[replica]

    def learn(self, replica: Replica, load: Load, now_s: float) -> None:
        """Take what the replica states of itself; call it while our requests count as in flight."""
        account = self._accounts.get(replica)
        if account is None:
            return  # it left the list while it was asked
        stated = load.num_running + load.num_waiting
        account.num_of_others = max(0, stated - account.num_in_flight)
        account.lend_share = load.lend_share
        account.is_draining = load.draining
        account.stated_at_s = now_s

    def avoid(self, replica: Replica, now_s: float) -> None:
        self._accounts[replica].avoided_until_s = now_s + AVOID_S

    def is_draining(self, replica: Replica, now_s: float) -> bool:
        return not self._accounts[replica].is_routable(now_s)

    def num_in_flight(self, replica: Replica) -> int:
        account = self._accounts.get(replica)
        return account.num_in_flight if account else 0
