"""Who has a claim to the next tokens: tenants, what they were served, and their caps. Pure.

Within a class tenants are ordered by virtual token counters (VTC, OSDI'24): a tenant's counter
rises by the cost of what is computed for it over its weight, and who has work and the least counter
goes first. A tenant that comes back is lifted to the least of those that have work, so that being
idle earns nothing. What a preemption makes compute again costs its tenant nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from chairlift_engine.request import Request
from chairlift_protocol.policy import Policy, TenantPolicy
from chairlift_protocol.wire import RequestClass

# The cost of a token. An answer's costs more: a decode reads all weights and context for one.
PROMPT_COST: Final = 1.0
OUTPUT_COST: Final = 2.0
CACHED_COST: Final = 0.1

ANONYMOUS: Final = "anonymous"
MAX_IDLE_TENANTS: Final = 1024  # whose counters are remembered


class Account:
    """What one tenant has, wants and was served in one class."""

    __slots__ = (
        "entry",
        "is_listed",
        "next_waiting",
        "num_decoding",
        "num_running",
        "number",
        "served",
        "tenant",
        "waiting",
    )

    def __init__(self, tenant: Tenant, number: int) -> None:
        self.tenant = tenant
        self.number = number  # settles ties
        self.served = 0.0  # cost over weight
        self.waiting: list[Request] = []  # resumed ones first, then by arrival
        self.num_running = 0
        self.num_decoding = 0
        self.next_waiting = 0  # in the step being planned; those before it were looked at
        self.is_listed = False  # has an entry in the ledger's heap ...
        self.entry = 0  # ... which is this one

    def __repr__(self) -> str:
        return f"Account({self.tenant.name!r}, served {self.served:.1f})"

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.num_running > 0

    @property
    def oldest_arrival_s(self) -> float:
        """Of those waiting: the first resumed one's or the first new one's."""
        first_new = bisect_left(self.waiting, True, key=_is_new)
        return min(
            r.arrival_s for r in (*self.waiting[:1], *self.waiting[first_new : first_new + 1])
        )

    def charge(self, cost: float) -> None:
        self.served += cost / self.tenant.policy.weight


@dataclass(eq=False, slots=True)
class Tenant:
    """num_blocks: KV blocks held by its running requests; a shared one counts for each holder."""

    name: str
    policy: TenantPolicy
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0


class Ledger:
    """The accounts of one class."""

    def __init__(self) -> None:
        self.active: dict[str, Account] = {}
        self.decoding: dict[Account, None] = {}
        self._idle: OrderedDict[str, Account] = OrderedDict()
        self._departed = 0.0  # counter of the account that had work last
        self._num_accounts = 0
        # Accounts with requests waiting, under a lower bound of their counter.
        self._heap: list[tuple[float, int, int, Account]] = []
        self._moved: list[Account] = []

    def account(self, tenant: Tenant) -> Account:
        """The tenant's, which has work from now on."""
        account = self.active.get(tenant.name)
        if account is None:
            account = self._idle.pop(tenant.name, None) or self._open(tenant)
            account.tenant = tenant
            counters = [other.served for other in self.active.values()]
            account.served = max(account.served, min(counters, default=self._departed))
            self.active[tenant.name] = account
        return account

    def enqueue(self, account: Account, request: Request) -> None:
        order = _waiting_order(request)
        index = bisect_left(account.waiting, order, key=_waiting_order)
        account.waiting.insert(index, request)
        account.next_waiting += index < account.next_waiting
        self._enter(account)

    def dequeue(self, account: Account, request: Request) -> None:
        order = _waiting_order(request)
        index = bisect_left(account.waiting, order, key=_waiting_order)
        del account.waiting[index]
        account.next_waiting -= index < account.next_waiting

    def settle(self, account: Account) -> None:
        """Call when a request left: an account without work becomes idle."""
        if not account.has_work:
            self._departed = account.served
            del self.active[account.tenant.name]
            self._idle[account.tenant.name] = account
            if len(self._idle) > MAX_IDLE_TENANTS:
                self._idle.popitem(last=False)

    def refund(self, account: Account, cost: float) -> None:
        account.charge(-cost)
        account.is_listed = False  # its entry is no lower bound any more
        self._enter(account)

    def least_served(self) -> Account | None:
        """Of those with requests waiting that were not looked at in this step."""
        heap = self._heap
        while heap:
            served, number, entry, account = heap[0]
            if not account.is_listed or entry != account.entry:
                heapq.heappop(heap)
            elif account.next_waiting >= len(account.waiting):
                heapq.heappop(heap)
                account.is_listed = False
            elif served != account.served:
                heapq.heapreplace(heap, (account.served, number, entry, account))
            else:
                return account
        return None

    def move_on(self, account: Account, num_requests: int = 1) -> None:
        """Leave the account's next waiting requests alone for the rest of this step."""
        account.next_waiting += num_requests
        self._moved.append(account)

    def begin_step(self) -> None:
        for account in self._moved:
            account.next_waiting = 0
            self._enter(account)
        self._moved.clear()

    def _open(self, tenant: Tenant) -> Account:
        self._num_accounts += 1
        return Account(tenant, self._num_accounts)

    def _enter(self, account: Account) -> None:
        if account.waiting and not account.is_listed:
            account.is_listed = True
            account.entry += 1
            heapq.heappush(self._heap, (account.served, account.number, account.entry, account))


class Tenants:
    """Those with work in either class, and what the policy allows them."""

    def __init__(self, policy: Policy) -> None:
        self.with_work: dict[str, Tenant] = {}
        self.ledgers = {request_class: Ledger() for request_class in RequestClass}
        # Without identities there is nobody to keep a slot free for.
        self._has_names = False
        self.set_policy(policy)

    def set_policy(self, policy: Policy) -> None:
        self._policy = policy
        self._has_names |= any(name != ANONYMOUS for name in policy.tenants)
        for tenant in self.with_work.values():
            tenant.policy = self.policy_of(tenant.name)

    def policy_of(self, name: str) -> TenantPolicy:
        return self._policy.tenants.get(name, _UNNAMED)

    def open_account(self, request: Request) -> Account:
        """Of a request that has just come."""
        tenant = self.with_work.get(request.tenant)
        if tenant is None:
            tenant = Tenant(request.tenant, self.policy_of(request.tenant))
            self.with_work[request.tenant] = tenant
            self._has_names |= request.tenant != ANONYMOUS
        return self.ledgers[request.request_class].account(tenant)

    def account_of(self, request: Request) -> Account:
        """Of a request that waits or runs."""
        return self.ledgers[request.request_class].active[request.tenant]

    def refund(self, request: Request, cost: float) -> None:
        """What was charged for a request and not computed."""
        self.ledgers[request.request_class].refund(self.account_of(request), cost)

    def settle(self, request: Request) -> None:
        """Call when a request has left for good."""
        account = self.account_of(request)
        self.ledgers[request.request_class].settle(account)
        tenant = account.tenant
        if not tenant.num_running and not tenant.num_waiting:
            del self.with_work[tenant.name]

    def num_slots(self, tenant: Tenant) -> int:
        """Most requests of this tenant that run at once: by default never all that can."""
        if tenant.policy.slots is not None:
            return tenant.policy.slots
        batch_size = self._policy.batch_size
        if tenant.name == ANONYMOUS and not self._has_names:
            return batch_size
        return max(1, batch_size - max(1, batch_size // 10))

    def has_slot(self, tenant: Tenant) -> bool:
        return tenant.num_running < self.num_slots(tenant)

    def has_kv(self, tenant: Tenant, num_blocks: int, block_tokens: int) -> bool:
        """Whether its cap leaves room for so many blocks more; one request may always run."""
        kv_tokens = tenant.policy.kv_tokens
        if kv_tokens is None or tenant.num_running == 0:
            return True
        return (tenant.num_blocks + num_blocks) * block_tokens <= kv_tokens


_UNNAMED: Final = TenantPolicy()


def cost_of(request: Request, start: int, end: int) -> float:
    """Of computing the KV of token positions [start, end)."""
    num_prompt = max(0, min(end, request.num_prompt_tokens) - start)
    return PROMPT_COST * num_prompt + OUTPUT_COST * (max(0, end - start) - num_prompt)


def _is_new(request: Request) -> bool:
    return request.num_preemptions == 0


def _waiting_order(request: Request) -> tuple[bool, float, int]:
    return request.num_preemptions == 0, request.arrival_s, request.number
