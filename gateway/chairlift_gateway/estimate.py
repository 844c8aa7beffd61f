"""What a request will probably use, before an engine has seen it. Pure.

Only what is reserved is guessed: what was used is settled later. So the body is not parsed, and one
that misleads the guess gains nothing. Where an engine cannot say what was used, a bound is charged
(`most_answer_tokens`), and for that it is parsed.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict, deque
from typing import Any, Final

# English and code have about four bytes to a token; token ids in JSON about five.
BYTES_PER_TOKEN: Final = 4
# Of a tenant that has had no answers yet.
FIRST_ANSWER_TOKENS: Final = 256
QUANTILE: Final = 0.8
NUM_REMEMBERED: Final = 50
MAX_HOLDERS: Final = 10_000
MAX_CHOICES: Final = 128
# Of one choice, on engines that cannot be asked: hardly any is faster.
FASTEST_TOKENS_PER_S: Final = 200

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


def most_answer_tokens(body: bytes, elapsed_s: float) -> int:
    """Of an answer that comes as a whole, what may have been made by now; none of a stream, whose
    tokens are seen."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(asked, dict) or asked.get("stream") is True:
        return 0
    each = math.ceil(max(0.0, elapsed_s) * FASTEST_TOKENS_PER_S)
    if bound := _most(asked, "max_tokens", "max_completion_tokens"):
        each = min(each, bound)
    return each * max(1, _most(asked, "n", "best_of")) * _num_prompts(asked.get("prompt"))


def _most(asked: dict[str, Any], *names: str) -> int:
    """0 where none of them is a number."""
    values = [asked.get(name) for name in names]
    return max((value for value in values if isinstance(value, int)), default=0)


def _num_prompts(prompt: Any) -> int:
    """A list of numbers is one prompt."""
    is_many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if is_many else 1


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
