"""The lines of an exposition that tell of given metrics, found without parsing the rest. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

_AFTER_NAME: Final = ("{", " ", "\t")


def lines_of(text: str, names: Iterable[str]) -> str:
    """Only these are parsed: most of the text are histograms that nobody here asks for.

    All of it where none is found, so that a parser says whether it is an exposition at all.
    """
    return "\n".join(line for name in names for line in _found(text, name)) or text


def _found(text: str, name: str) -> Iterator[str]:
    at = text.find(name)
    while at >= 0:
        end = text.find("\n", at)
        line = text[at:] if end < 0 else text[at:end]
        if (at == 0 or text[at - 1] == "\n") and line[len(name) : len(name) + 1] in _AFTER_NAME:
            yield line
        at = text.find(name, at + len(name))
