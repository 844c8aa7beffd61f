"""What a request will probably use, before an engine has seen it. Pure.

Only what is reserved is guessed: what was used is settled later. So the body is not parsed, and one
that misleads the guess gains nothing.
"""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from typing import Final

# English and code have about four bytes to a token; token ids in JSON about five.
BYTES_PER_TOKEN: Final = 4
# Of a tenant that has had no answers yet.
FIRST_ANSWER_TOKENS: Final = 256
QUANTILE: Final = 0.8
NUM_REMEMBERED: Final = 50
MAX_HOLDERS: Final = 10_000
MAX_CHOICES: Final = 128

_MAX_TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d{1,9})\b')
_CHOICES: Final = re.compile(rb'"n"\s*:\s*(\d{1,4})\b')
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true\b')


def prompt_tokens(body: bytes) -> int:
    return -(-len(body) // BYTES_PER_TOKEN)


def answer_tokens(body: bytes, usual: int) -> int:
    """What is usual for the tenant, unless the request allows less; for each choice."""
    bounds = [int(bound) for bound in _MAX_TOKENS.findall(body)]
    choices = max((int(number) for number in _CHOICES.findall(body)), default=1)
    return min([usual, *bounds]) * max(1, min(MAX_CHOICES, choices))


def is_stream(body: bytes) -> bool:
    return _STREAM.search(body) is not None


class UsualAnswers:
    """By holder, the length that four of five recent answers did not exceed."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, deque[int]] = OrderedDict()

    def of(self, holder: str) -> int:
        recent = self._recent.get(holder)
        if not recent:
            return FIRST_ANSWER_TOKENS
        return sorted(recent)[int(QUANTILE * (len(recent) - 1))]

    def note(self, holder: str, num_tokens: int) -> None:
        self._recent.setdefault(holder, deque(maxlen=NUM_REMEMBERED)).append(num_tokens)
        self._recent.move_to_end(holder)
        if len(self._recent) > MAX_HOLDERS:
            self._recent.popitem(last=False)
