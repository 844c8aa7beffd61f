"""The policy as it was set, the limit on it, and what is in force: desired and effective. Pure."""

from __future__ import annotations

from chairlift_engine.config import Capacity
from chairlift_engine.memory_limit import MemoryLimit
from chairlift_protocol.policy import Policy


class StalePolicy(ValueError):
    """A policy whose generation is not newer than the one in force."""


class PolicyOutOfRange(ValueError):
    """A policy that the start-up capacity cannot hold."""


class LivePolicy:
    """desired: as it was set. limit: what it may not exceed for now, when memory was too little."""

    def __init__(self, capacity: Capacity, policy: Policy) -> None:
        check_range(policy, capacity)
        self._capacity = capacity
        self.desired = policy
        self.limit: MemoryLimit | None = None

    @property
    def effective(self) -> Policy:
        return self.desired if self.limit is None else self.limit.applied_to(self.desired)

    def set(self, policy: Policy) -> None:
        """The desired policy again is no error. Raises StalePolicy or PolicyOutOfRange."""
        if policy == self.desired:
            return
        if policy.generation <= self.desired.generation:
            raise StalePolicy(
                f"generation {policy.generation.to_json()} is not newer than "
                f"{self.desired.generation.to_json()}, which is in force"
            )
        check_range(policy, self._capacity)
        self.desired = policy


def check_range(policy: Policy, capacity: Capacity) -> None:
    """Raise PolicyOutOfRange, naming the field and the capacity, unless the policy fits."""
    for name, value, minimum, maximum in (
        ("batch_size", policy.batch_size, 1, capacity.batch_size),
        ("step_tokens", policy.step_tokens, capacity.block_tokens, capacity.step_tokens),
        ("chunk_tokens", policy.chunk_tokens, capacity.block_tokens, capacity.step_tokens),
    ):
        if value < minimum:
            raise PolicyOutOfRange(
                f"{name}: {value} is below {minimum}, the least this engine can work with"
            )
        if value > maximum:
            raise PolicyOutOfRange(
                f"{name}: {value} is above this engine's capacity of {maximum}; lower it, or "
                f"restart the engine with more"
            )
