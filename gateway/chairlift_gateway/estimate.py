"""What a request will probably use, before an engine has seen it. Pure.

Only what is reserved is guessed: what was used is settled later. So the body is not parsed, and one
that misleads the guess gains nothing. Where an engine cannot say what was used, a bound is charged
(`most_answer_tokens`), and for that it is parsed, unless it is so large that others would wait.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict, deque
from itertools import islice
from typing import Any, Final

# English and code have about four bytes to a token; token ids in JSON about five.
BYTES_PER_TOKEN: Final = 4
# Of a tenant that has had no answers yet.
FIRST_ANSWER_TOKENS: Final = 256
QUANTILE: Final = 0.8
NUM_REMEMBERED: Final = 50
MAX_HOLDERS: Final = 10_000
# What an engine takes at most, of one prompt and of one request.
MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 1024
# Some 10 ms of the event loop.
MAX_PARSED_BYTES: Final = 1024 * 1024
# Of one choice, on engines that cannot be asked: hardly any is faster.
FASTEST_TOKENS_PER_S: Final = 200

_MAX_TOKENS: Final = re.compile(rb'"max_(?:completion_)?tokens"\s*:\s*(\d{1,9})\b')
_CHOICES: Final = re.compile(rb'"(?:n|best_of)"\s*:\s*(\d{1,9})\b')
_STREAM: Final = re.compile(rb'"stream"\s*:\s*true\b')
_PROMPTS: Final = re.compile(rb'"prompt"\s*:\s*\[\s*["\[]')
_NEXT_PROMPT: Final = re.compile(rb'"\s*,\s*"|\]\s*,\s*\[')


def prompt_tokens(body: bytes) -> int:
    return -(-len(body) // BYTES_PER_TOKEN)


def answer_tokens(body: bytes, usual: int) -> int:
    """What is usual for the tenant, unless the request allows less; for each choice."""
    bounds = [int(bound) for bound in _MAX_TOKENS.findall(body)]
    choices = max((int(number) for number in _CHOICES.findall(body)), default=1)
    return min([usual, *bounds]) * _within(choices, MAX_CHOICES)


def is_stream(body: bytes) -> bool:
    return _STREAM.search(body) is not None


def most_answer_tokens(body: bytes, elapsed_s: float) -> int:
    """Of an answer of which nothing has come, what may have been made by now; none of a stream,
    whose tokens are seen, unless the body is too large to be sure that it asks for one."""
    each = math.ceil(max(0.0, elapsed_s) * FASTEST_TOKENS_PER_S)
    if len(body) > MAX_PARSED_BYTES:
        bounds = [int(bound) for bound in _MAX_TOKENS.findall(body)]
        choices = max((int(number) for number in _CHOICES.findall(body)), default=1)
        return _all_of(each, max(bounds, default=0), choices, _num_prompts_found(body))
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(asked, dict) or asked.get("stream") is True:
        return 0
    bound = _most(asked, "max_tokens", "max_completion_tokens")
    return _all_of(each, bound, _most(asked, "n", "best_of"), _num_prompts(asked.get("prompt")))


def _all_of(each: int, bound: int, choices: int, prompts: int) -> int:
    """bound: of each, if it is positive."""
    if bound > 0:
        each = min(each, bound)
    return each * _within(choices, MAX_CHOICES) * _within(prompts, MAX_PROMPTS)


def _within(number: int, at_most: int) -> int:
    return max(1, min(at_most, number))


def _most(asked: dict[str, Any], *names: str) -> int:
    """0 where none of them is a number."""
    values = [asked.get(name) for name in names]
    return max((value for value in values if isinstance(value, int)), default=0)


def _num_prompts(prompt: Any) -> int:
    """A list of numbers is one prompt."""
    is_many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if is_many else 1


def _num_prompts_found(body: bytes) -> int:
    """Without parsing; rather too many."""
    if _PROMPTS.search(body) is None:
        return 1
    return 1 + sum(1 for _ in islice(_NEXT_PROMPT.finditer(body), MAX_PROMPTS))


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
