"""`chairlift replay`: the decisions of a journal made again, under another spec if wanted.

The same pure plan over the recorded snapshots: what would have been decided, not what would have
come of it.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from chairlift_cli.errors import CliError
from chairlift_cli.moments import moment
from chairlift_operator.decisions import Decision
from chairlift_operator.journal import JournalError, replay

_Change = tuple[str, str, object]


def run_replay(args: argparse.Namespace) -> int:
    try:
        for line in _differences(args.journal, args.settings):
            print(line)
    except JournalError as error:
        raise CliError(str(error)) from error
    return 0


def _differences(path: Path, settings: Sequence[str]) -> Iterator[str]:
    num_ticks = num_differing = 0
    recorded: Counter[str] = Counter()
    replayed: Counter[str] = Counter()
    for step in replay(path, settings):
        num_ticks += 1
        before, after = step.recorded.decisions, step.plan.decisions
        recorded.update(d.field for d in before)
        replayed.update(d.field for d in after)
        was, now = {_what(d) for d in before}, {_what(d) for d in after}
        num_differing += was != now
        at = moment(step.recorded.snapshot.taken_at_s)
        for decisions, others, mark in ((before, now, "-"), (after, was, "+")):
            for decision in decisions:
                if _what(decision) not in others:
                    yield f"{at} {mark} {decision.replica}: {decision.sentence}"
    changed = " under the settings" if settings else ""
    yield (
        f"{num_ticks} ticks, {num_differing} decided differently{changed}: "
        f"recorded {_counted(recorded)}; replayed {_counted(replayed)}"
    )


def _what(decision: Decision) -> _Change:
    return decision.replica, decision.field, decision.after


def _counted(fields: Counter[str]) -> str:
    return ", ".join(f"{count} {field}" for field, count in fields.most_common()) or "nothing"
