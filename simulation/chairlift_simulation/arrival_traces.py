"""When requests arrive and how long they are: production traces, whole, and how to scale them.

A trace is a CSV file, gzipped if its name says so: `arrival_s` or `gap_ms` (to the one before),
`prompt_tokens`, `output_tokens`, and optionally `prefix_blocks`, the ids of the prompt's blocks of
512 tokens (equal ids have equal content; runs are written a-b). Pure but for reading files.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

PREFIX_BLOCK_TOKENS: Final = 512
_LENGTHS: Final = ("prompt_tokens", "output_tokens")
_FOLDER: Final = Path(__file__).parent / "traces"
NAMES: Final = ("azure-conv", "azure-code", "mooncake-conversation", "mooncake-synthetic")


class TraceError(ValueError):
    """A trace that cannot be read or does not reach; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; arrival_s counts from the trace's start.

    prefix_blocks: ids of the prompt's blocks; empty when it has nothing in common with another's.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()


def read_trace(name: str) -> list[Arrival]:
    """One of `NAMES`, or a file. Raises TraceError."""
    path = _FOLDER / f"{name}.csv.gz" if name in NAMES else Path(name)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TraceError(
            f"trace {name!r}: cannot be read ({error.strerror}); name a file or one of "
            f"{', '.join(NAMES)}"
        ) from error
    try:
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        arrivals = list(_parsed(csv.DictReader(io.StringIO(text))))
    except (ValueError, EOFError, gzip.BadGzipFile, csv.Error) as error:
        raise TraceError(f"trace {name!r}: {error}") from error
    if not arrivals:
        raise TraceError(f"trace {name!r}: holds no request")
    return arrivals


def _parsed(rows: csv.DictReader[str]) -> Iterator[Arrival]:
    """Raise ValueError, which says in which line and column."""
    columns = rows.fieldnames or ()
    when = "arrival_s" if "arrival_s" in columns else "gap_ms"
    if missing := [name for name in (when, *_LENGTHS) if name not in columns]:
        wanted = f"arrival_s (or gap_ms), {' and '.join(_LENGTHS)}"
        raise ValueError(f"must be CSV with {wanted}; its first line lacks {', '.join(missing)}")
    at_s = 0.0
    for row in rows:
        line, before_s = f"line {rows.line_num}", at_s
        told = _number(line, when, row[when])
        at_s = told if when == "arrival_s" else at_s + told / 1e3
        if at_s < before_s:
            raise ValueError(f"{line}, {when}: times must not fall, and {at_s:g} s is before "
                             f"{before_s:g} s")  # fmt: skip
        lengths = [_number(line, name, row[name]) for name in _LENGTHS]
        for name, length in zip(_LENGTHS, lengths, strict=True):
            if length < 1 or length != int(length):
                raise ValueError(f"{line}, {name}: must be 1 or more whole tokens, not {row[name]}")
        blocks = _blocks(f"{line}, prefix_blocks", row.get("prefix_blocks") or "")
        yield Arrival(at_s, int(lengths[0]), int(lengths[1]), tuple(blocks))


def _number(line: str, column: str, text: str | None) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        told = f"{text!r:.40}" if text else "nothing"
        raise ValueError(f"{line}, {column}: must be a number, not {told}")
    return number


def _blocks(where: str, text: str) -> Iterator[int]:
    for run in text.split():
        first, dash, last = run.partition("-")
        last = last if dash else first
        if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
            raise ValueError(f"{where}: must be ids or runs a-b between blanks, not {run!r:.40}")
        yield from range(int(first), int(last) + 1)


def at_mean_rate(
    arrivals: Sequence[Arrival], requests_per_s: float, duration_s: float
) -> list[Arrival]:
    """The trace's first `requests_per_s * duration_s` requests, time stretched to last duration_s.

    Every gap is multiplied by the same factor, so bursts and lulls keep their relative size.
    """
    num_requests = max(1, round(requests_per_s * duration_s))
    if num_requests >= len(arrivals):
        raise TraceError(
            f"{num_requests} requests and the gap after them are wanted, but the trace holds "
            f"{len(arrivals)}: lower the rate or the duration"
        )
    start_s = arrivals[0].arrival_s
    stretch = duration_s / (arrivals[num_requests].arrival_s - start_s)
    return [
        replace(arrival, arrival_s=(arrival.arrival_s - start_s) * stretch)
        for arrival in arrivals[:num_requests]
    ]


def repeated(arrivals: Sequence[Arrival], num_laps: int) -> list[Arrival]:
    """The trace num_laps times over; between two laps lies a mean gap."""
    lap_s = _lap_s(arrivals)
    return [
        replace(arrival, arrival_s=arrival.arrival_s + lap * lap_s)
        for lap in range(num_laps)
        for arrival in arrivals
    ]


def rotated(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The same trace from another request on, by seed; from its first with seed 0."""
    first = Random(seed).randrange(len(arrivals)) if seed else 0
    start_s, lap_s = arrivals[first].arrival_s, _lap_s(arrivals)
    later = [_moved(a, a.arrival_s - start_s) for a in arrivals[first:]]
    return later + [_moved(a, a.arrival_s - start_s + lap_s) for a in arrivals[:first]]


@dataclass(frozen=True, slots=True)
class Stretch:
    """requests_per_s in the mean, for a while."""

    duration_s: float
    requests_per_s: float


def at_rates(arrivals: Sequence[Arrival], stretches: Sequence[Stretch]) -> list[Arrival]:
    """One stretch after the other, each of the trace's next requests; over again if it ends."""
    count, lap_s = len(arrivals), _lap_s(arrivals)

    def time_of(index: int) -> float:
        return arrivals[index % count].arrival_s + index // count * lap_s

    found: list[Arrival] = []
    start_s = 0.0
    for stretch in stretches:
        first = len(found)
        end = first + max(1, round(stretch.requests_per_s * stretch.duration_s))
        from_s = time_of(first)
        scale = stretch.duration_s / max(1e-6, time_of(end) - from_s)
        found += [
            _moved(arrivals[i % count], start_s + scale * (time_of(i) - from_s))
            for i in range(first, end)
        ]
        start_s += stretch.duration_s
    return found


def _moved(arrival: Arrival, arrival_s: float) -> Arrival:
    return Arrival(arrival_s, arrival.prompt_tokens, arrival.output_tokens, arrival.prefix_blocks)


def mean_rate_per_s(arrivals: Sequence[Arrival]) -> float:
    return len(arrivals) / _lap_s(arrivals)


def _lap_s(arrivals: Sequence[Arrival]) -> float:
    """With the mean gap that would come after the last request."""
    last_s = arrivals[-1].arrival_s - arrivals[0].arrival_s
    return last_s * len(arrivals) / max(1, len(arrivals) - 1) or 1.0
