"""A run's record over time: what was offered, queued, running and how long gaps were. Pure.

Everything is derived from what clients saw and from the journal. `rush_picture` draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from chairlift_bench.journal_tail import Change
from chairlift_bench.outcomes import Outcome, percentile

Points = list[tuple[float, float]]


def arrivals_per_s(due_s: Iterable[float], bin_s: float) -> Points:
    """At the middle of each bin."""
    counts: dict[int, int] = {}
    for at_s in due_s:
        counts[int(at_s // bin_s)] = counts.get(int(at_s // bin_s), 0) + 1
    last = max(counts, default=-1)
    return [((i + 0.5) * bin_s, counts.get(i, 0) / bin_s) for i in range(last + 2)]


def waiting(outcomes: Iterable[Outcome]) -> Points:
    """Requests without a first token, as steps; one that never came waits until its end."""
    spans = [(o.due_s, o.due_s + (o.elapsed_s if o.ttft_s is None else o.ttft_s)) for o in outcomes]
    return _levels(spans)


def streaming(outcomes: Iterable[Outcome]) -> Points:
    """Requests between first token and end, as steps."""
    begun = [o for o in outcomes if o.ttft_s is not None]
    return _levels([(o.due_s + (o.ttft_s or 0.0), o.due_s + o.elapsed_s) for o in begun])


def gaps_percentile(outcomes: Iterable[Outcome], percent: float, bin_s: float) -> Points:
    """Of the gaps that ended in each bin, in seconds; NaN in bins without gaps."""
    by_bin: dict[int, list[float]] = {}
    for outcome in outcomes:
        if outcome.ttft_s is None:
            continue
        ends_s = itertools.accumulate(outcome.gaps_s, initial=outcome.due_s + outcome.ttft_s)
        for end_s, gap_s in zip(itertools.islice(ends_s, 1, None), outcome.gaps_s, strict=True):
            by_bin.setdefault(int(end_s // bin_s), []).append(gap_s)
    bins = range(min(by_bin, default=0), max(by_bin, default=-1) + 1)
    return [((i + 0.5) * bin_s, percentile(by_bin.get(i, ()), percent)) for i in bins]


def knob(first: float, moves: Iterable[Change], ends_s: float) -> Points:
    """One knob's values as steps: from its first value through its moves to the end."""
    points = [(0.0, first)]
    for move in moves:
        points.append((max(0.0, move.at_s), move.after))
    return [*points, (ends_s, points[-1][1])]


def _levels(spans: Iterable[tuple[float, float]]) -> Points:
    changes = sorted(itertools.chain.from_iterable(((a, 1), (b, -1)) for a, b in spans))
    levels = itertools.accumulate(step for _, step in changes)
    return [
        (0.0, 0.0),
        *((at_s, float(n)) for (at_s, _), n in zip(changes, levels, strict=True)),
    ]
