"""Which of the replicas that may serve a request gets it: the least predicted wait, and among
about equal ones the one that has seen its prompt before. Pure.

A wait is given in tokens of prefill: what must be computed before the request's first token. How
long a token takes is the same for all of a class, so it does not matter here. What nobody has
stated is taken to be what the others state in the mean: unknown is not idle.

The order of affinity is rendezvous hashing: when a replica leaves, only what was its own moves.
With bounded load: a replica over its share is passed over, and the next in that order taken.
`routing` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from chairlift_protocol.wire import RequestClass

# Mirrokni, Thorup, Zadimoghaddam 2018: how far over the mean an affine replica may be.
LOAD_FACTOR: Final = 1.25
# Tokens that need not be computed spare the request that wait, and those behind it as well.
WORTH: Final = 2.0
# A running sequence takes a token of each step, and a prompt takes some tens of steps.
RUNNING_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Replica:
    """Two replicas of one name but another address are different ones."""

    name: str
    url: str
    request_class: RequestClass = RequestClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class Demand:
    """What is known of a request before an engine has seen it.

    prefix: what its prompt is known by (`prefixes`), None where it has no like. is_whole: its
    answer comes at once, so that its first token is not seen.
    """

    request_class: RequestClass
    prompt_tokens: int = 0
    prefix: int | None = None
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Where a prompt of that name went last, and how long it was: so much may lie in the cache.

    sent_tokens: of prompts that had gone there in all by then, which tells what came since.
    """

    replica: Replica
    prompt_tokens: int
    sent_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stated:
    """What a replica said of others' work there, lately enough to be believed.

    num_requests: running or waiting. queued_tokens: of prompts that wait. free_kv_tokens: as of
    then.
    """

    num_requests: int
    queued_tokens: int
    free_kv_tokens: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """num_requests, queued_tokens: of this gateway's own requests there; the latter until their
    first token. last_turn orders equals: the one whose last turn is longest ago comes first.
    """

    replica: Replica
    num_requests: int
    queued_tokens: int
    stated: Stated | None
    is_avoided: bool = False
    last_turn: int = 0


def chosen(
    candidates: Sequence[Candidate], demand: Demand, memory: Memory | None = None
) -> Candidate | None:
    """None without candidates; an avoided one only where all are."""
    usable = [each for each in candidates if not each.is_avoided] or list(candidates)
    if not usable:
        return None
    waits = predicted_waits(usable, demand)
    bound = LOAD_FACTOR * fmean(waits)
    if memory is not None:
        worth = WORTH * min(memory.prompt_tokens, demand.prompt_tokens)
        for each, wait in zip(usable, waits, strict=True):
            if each.replica == memory.replica and wait <= bound + worth:
                return each
    if demand.prefix is not None:
        prefix = demand.prefix
        near = [each for each, wait in zip(usable, waits, strict=True) if wait <= bound]
        return max(near, key=lambda each: affinity(prefix, each.replica.name))
    ranked = zip(waits, (each.last_turn for each in usable), range(len(usable)), strict=True)
    return usable[min(ranked)[2]]


def predicted_waits(candidates: Sequence[Candidate], demand: Demand) -> list[float]:
    """Of each, in tokens of prefill."""
    others = [_others_tokens(each, demand) for each in candidates]
    known = [tokens for tokens in others if tokens is not None]
    usual = fmean(known) if known else 0.0
    return [
        each.queued_tokens
        + RUNNING_TOKENS * each.num_requests
        + (usual if tokens is None else tokens)
        for each, tokens in zip(candidates, others, strict=True)
    ]


def affinity(prefix: int, name: str) -> int:
    """How much that replica is the prompt's own; the same in every gateway."""
    text = b"%d/%s" % (prefix, name.encode())
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def _others_tokens(candidate: Candidate, demand: Demand) -> int | None:
    """What others have there, and the memory that somebody must give back first; None: unknown.

    Prompts that wait take memory before this one does.
    """
    stated = candidate.stated
    if stated is None:
        return None
    before = stated.queued_tokens + candidate.queued_tokens
    missing = max(0, before + demand.prompt_tokens - stated.free_kv_tokens)
    return stated.queued_tokens + RUNNING_TOKENS * stated.num_requests + missing
