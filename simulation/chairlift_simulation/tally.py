"""Keeps the book of a run: every request from its arrival to its end, and what each second saw.

Fed with each step's report once it is known. Knows no gateway and no fleet; `pool_run` asks it.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from chairlift_engine.engine import StepReport
from chairlift_operator.spec import Slo
from chairlift_protocol.wire import RequestClass
from chairlift_simulation.records import Journey, SecondCounts
from chairlift_simulation.replica import VirtualRequest

INTERACTIVE = RequestClass.INTERACTIVE


@dataclass(slots=True)
class Told:
    """Of one step: who got a first token, and who ended how (None: with all tokens)."""

    began: list[Journey] = field(default_factory=list)
    ended: list[tuple[Journey, str | None]] = field(default_factory=list)


class Tally:
    def __init__(self, slo: Slo, keeps_gaps: bool) -> None:
        self.journeys: list[Journey] = []
        self.seconds = SecondCounts()
        self.num_open = 0
        self._ttft_s = slo.time_to_first_token.threshold_s
        self._itl_s = slo.inter_token_latency.threshold_s
        self._keeps_gaps = keeps_gaps

    def begin(self, request: VirtualRequest, now_s: float) -> Journey:
        journey = Journey(request, gaps_s=array("d") if self._keeps_gaps else None)
        self.journeys.append(journey)
        self.num_open += 1
        if request.request_class is INTERACTIVE:
            self.seconds.arrivals[self.seconds.reach(now_s)] += 1
        return journey

    def end(self, journey: Journey, now_s: float, error: str | None) -> None:
        journey.ended_s, journey.error = now_s, error
        self.num_open -= 1

    def take(self, report: StepReport, is_open: dict[str, Journey]) -> Told:
        """is_open: the replica's requests by id; those that end are taken out."""
        told = Told()
        if not report.tokens and not report.ended:
            return told
        now_s, itl_s, keeps_gaps = report.now_s, self._itl_s, self._keeps_gaps
        num_gaps = num_late = 0
        for request, _, gap_s, reason, _ in report.tokens:  # hundreds of thousands of times
            if gap_s is None:
                journey = is_open[request.id]
                self._first_token(journey, now_s)
                told.began.append(journey)
            else:
                is_own = request.request_class is INTERACTIVE
                num_gaps += is_own
                if gap_s > itl_s:
                    is_open[request.id].num_late_gaps += 1
                    num_late += is_own
                if keeps_gaps and (kept := is_open[request.id].gaps_s) is not None:
                    kept.append(gap_s)
            if reason is not None:
                journey = is_open.pop(request.id)
                journey.num_tokens = request.num_output_tokens
                told.ended.append((journey, None))
        for request, ended in report.ended:
            journey = is_open.pop(request.id)
            journey.num_tokens = request.num_output_tokens
            told.ended.append((journey, str(ended)))
        seconds, second = self.seconds, self.seconds.reach(now_s)
        seconds.tokens[second] += len(report.tokens)
        seconds.gaps[second] += num_gaps
        seconds.late_gaps[second] += num_late
        return told

    def _first_token(self, journey: Journey, now_s: float) -> None:
        journey.first_s = now_s
        if journey.request.request_class is INTERACTIVE:
            second = self.seconds.reach(now_s)
            self.seconds.first_tokens[second] += 1
            self.seconds.late_first_tokens[second] += now_s - journey.request.due_s > self._ttft_s
