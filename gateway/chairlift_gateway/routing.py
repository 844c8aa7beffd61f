"""Which replicas may get the next request, and what is known of each; `choice` picks among them.

A replica's load is what this gateway has in flight there plus what others have. The others' share
comes from the load that an engine states in every response: whatever exceeds our own at that
moment. A statement ages out: else a replica that is no longer chosen would keep its last high
number, and so never be chosen again.

It knows no HTTP and reads no clock; times are arguments. `upstream` calls it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from chairlift_gateway.choice import Candidate, Demand, Memory, Replica, Stated, chosen
from chairlift_gateway.ejection import Failures, avoided
from chairlift_gateway.prefixes import Partings
from chairlift_protocol.load import Load
from chairlift_protocol.wire import RequestClass

# A stated load older than this says nothing.
STATEMENT_FRESH_S = 10.0
# Held batch work asks this often whether a replica has begun to lend.
LOOK_AGAIN_S = 1.0

# Prompts whose place is remembered; the longest unasked are forgotten.
MAX_MEMORIES = 20_000


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in flight on a replica. queued_tokens: of its prompt, until its first token."""

    replica: Replica
    request_class: RequestClass
    queued_tokens: int
    is_whole: bool


@dataclass(slots=True)
class _Account:
    """tickets: in the order of their sending. queued_tokens: of theirs, by class.

    sent_tokens: of prompts so far, without what caches held. most_free_tokens: the most KV memory
    that it ever stated to be free, which is about all that its cache can hold; None: not known.
    """

    tickets: dict[Ticket, None] = field(default_factory=dict)
    queued_tokens: dict[RequestClass, int] = field(
        default_factory=lambda: dict.fromkeys(RequestClass, 0)
    )
    failures: Failures = field(default_factory=Failures)
    others: Stated | None = None
    lend_share: float = 0.0
    is_draining: bool = False
    stated_at_s: float = float("-inf")
    last_turn: int = 0
    sent_tokens: int = 0
    most_free_tokens: int | None = None

    def is_stated(self, now_s: float) -> bool:
        return now_s - self.stated_at_s <= STATEMENT_FRESH_S

    def is_full(self, max_unstated: int) -> bool:
        return self.others is None and len(self.tickets) >= max_unstated

    def is_routable(self, now_s: float, max_unstated: int) -> bool:
        is_leaving = self.is_draining and self.is_stated(now_s)
        return not is_leaving and not self.is_full(max_unstated)

    def lends(self, now_s: float) -> bool:
        """Whether batch work may borrow it: it has said so lately."""
        return self.lend_share > 0 and self.is_stated(now_s)

    def has_forgotten(self, memory: Memory) -> bool:
        """Whether so much came since that its cache must have let go of that prompt."""
        since = self.sent_tokens - memory.sent_tokens
        return self.most_free_tokens is not None and since > self.most_free_tokens

    def begun(self, ticket: Ticket) -> None:
        self.queued_tokens[ticket.request_class] -= ticket.queued_tokens
        ticket.queued_tokens = 0

    def begun_at_least(self, waiting_tokens: int) -> None:
        """No more than that waits there, so the oldest of ours whose tokens we do not see began."""
        whole = [each for each in self.tickets if each.is_whole and each.queued_tokens]
        excess = sum(each.queued_tokens for each in whole) - waiting_tokens
        for ticket in whole:
            if excess <= 0:
                return
            excess -= ticket.queued_tokens
            self.begun(ticket)

    def tokens_before(self, request_class: RequestClass) -> int:
        """Of our prompts that come before one of this class, or with it."""
        batch = self.queued_tokens[RequestClass.BATCH]
        interactive = self.queued_tokens[RequestClass.INTERACTIVE]
        return interactive + (batch if request_class is RequestClass.BATCH else 0)


@dataclass(slots=True)
class Router:
    """The replicas that may be routed to, and what is known of each.

    max_unstated: requests at the same time on a replica that never stated its load; one that does
    has a queue of its own and a batch size that somebody tunes.
    """

    max_unstated: int = 256
    _accounts: dict[Replica, _Account] = field(default_factory=dict)
    _listed: tuple[Replica, ...] = ()
    _turn: int = 0
    _partings: Partings = field(default_factory=Partings)
    _memories: OrderedDict[int, Memory] = field(default_factory=OrderedDict)

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
            if replica in listed or account.tickets
        }
        for replica in listed:
            self._accounts.setdefault(replica, _Account())
        return changed

    def demand(
        self,
        request_class: RequestClass,
        prompt_tokens: int,
        prefix_names: Sequence[int] = (),
        is_whole: bool = False,
    ) -> Demand:
        """Of one request; to be made once for each, since what it is known by is learnt here."""
        name = self._partings.own_name(prefix_names)
        return Demand(request_class, prompt_tokens, name, is_whole)

    def num_routable(self, request_class: RequestClass, now_s: float) -> int:
        return len(self._serving(request_class, now_s))

    def num_left_out(self, request_class: RequestClass, now_s: float) -> int:
        """Of those, because they failed."""
        return sum(each.is_avoided for each in self._candidates(request_class, now_s))

    def choose(
        self, demand: Demand, now_s: float, excluding: Replica | None = None
    ) -> Replica | None:
        """Interactive work goes to interactive replicas only, batch work also to those that
        lend."""
        candidates = self._candidates(demand.request_class, now_s)
        allowed = [each for each in candidates if each.replica != excluding]
        found = chosen(allowed, demand, self._memory(demand))
        return found.replica if found else None

    def _serving(self, request_class: RequestClass, now_s: float) -> list[Replica]:
        return [
            replica
            for replica in self._listed
            if (account := self._accounts[replica]).is_routable(now_s, self.max_unstated)
            and (
                replica.request_class is request_class
                or (request_class is RequestClass.BATCH and account.lends(now_s))
            )
        ]

    def _candidates(self, request_class: RequestClass, now_s: float) -> list[Candidate]:
        serving = self._serving(request_class, now_s)
        accounts = [self._accounts[replica] for replica in serving]
        are_avoided = avoided([account.failures for account in accounts], now_s)
        return [
            Candidate(
                replica=replica,
                num_requests=len(account.tickets),
                queued_tokens=account.tokens_before(request_class),
                stated=account.others if account.is_stated(now_s) else None,
                is_avoided=is_avoided,
                last_turn=account.last_turn,
            )
            for replica, account, is_avoided in zip(serving, accounts, are_avoided, strict=True)
        ]

    def unstated(self, now_s: float) -> list[Replica]:
        """Interactive replicas of which it is not known whether they lend."""
        return [
            replica
            for replica in self._listed
            if replica.request_class is RequestClass.INTERACTIVE
            and not self._accounts[replica].is_stated(now_s)
        ]

    def begin(self, replica: Replica, demand: Demand) -> Ticket:
        """Count a request as in flight; every begin is followed by exactly one end."""
        self._turn += 1
        account = self._accounts.setdefault(replica, _Account())
        queued_tokens = self._uncached_tokens(replica, demand)
        ticket = Ticket(replica, demand.request_class, queued_tokens, demand.is_whole)
        account.tickets[ticket] = None
        account.queued_tokens[ticket.request_class] += queued_tokens
        account.sent_tokens += queued_tokens
        account.last_turn = self._turn
        self._remember(replica, demand, account.sent_tokens)
        return ticket

    def _memory(self, demand: Demand) -> Memory | None:
        memory = None if demand.prefix is None else self._memories.get(demand.prefix)
        if memory is None:
            return None
        account = self._accounts.get(memory.replica)
        return None if account is None or account.has_forgotten(memory) else memory

    def _uncached_tokens(self, replica: Replica, demand: Demand) -> int:
        memory = self._memory(demand)
        is_known = memory is not None and memory.replica == replica
        return max(0, demand.prompt_tokens - (memory.prompt_tokens if memory and is_known else 0))

    def _remember(self, replica: Replica, demand: Demand, sent_tokens: int) -> None:
        if demand.prefix is not None:
            self._memories[demand.prefix] = Memory(replica, demand.prompt_tokens, sent_tokens)
            self._memories.move_to_end(demand.prefix)
            if len(self._memories) > MAX_MEMORIES:
                self._memories.popitem(last=False)

    def begun(self, ticket: Ticket) -> None:
        """Its first token came: its prompt does not wait any more."""
        self._accounts[ticket.replica].begun(ticket)

    def end(self, ticket: Ticket) -> bool:
        """Whether a replica that was full takes a request again."""
        account = self._accounts[ticket.replica]
        was_full = account.is_full(self.max_unstated)
        account.begun(ticket)
        del account.tickets[ticket]
        if not account.tickets and ticket.replica not in self._listed:
            del self._accounts[ticket.replica]
        return was_full

    def learn(self, replica: Replica, load: Load, now_s: float) -> None:
        """Take what the replica states of itself; call it while our requests count as in flight."""
        account = self._accounts.get(replica)
        if account is None:
            return  # it left the list while it was asked
        account.begun_at_least(load.waiting_prefill_tokens)
        stated = load.num_running + load.num_waiting
        account.others = Stated(
            num_requests=max(0, stated - len(account.tickets)),
            queued_tokens=max(0, load.waiting_prefill_tokens - sum(account.queued_tokens.values())),
            free_kv_tokens=load.free_kv_tokens,
        )
        account.most_free_tokens = max(account.most_free_tokens or 0, load.free_kv_tokens)
        account.lend_share = load.lend_share
        account.is_draining = load.draining
        account.stated_at_s = now_s

    def failed(self, replica: Replica, now_s: float) -> None:
        """It gave no answer, or not all of one."""
        if (account := self._accounts.get(replica)) is not None:
            account.failures.failed(now_s)

    def succeeded(self, replica: Replica) -> None:
        if (account := self._accounts.get(replica)) is not None:
            account.failures.succeeded()

    def due_for_probe(self, now_s: float) -> list[Replica]:
        """Those that failed so often that only a probe brings them back, and it is time for one."""
        return [each for each in self._listed if self._accounts[each].failures.is_due(now_s)]

    def is_draining(self, replica: Replica, now_s: float) -> bool:
        account = self._accounts[replica]
        return account.is_draining and account.is_stated(now_s)

    def num_in_flight(self, replica: Replica) -> int:
        account = self._accounts.get(replica)
        return len(account.tickets) if account else 0
