"""The verifier's rhythm as the board hears it, and when a draft must leave to be in time for its next step."""

from __future__ import annotations

from collections import deque
from math import ceil, inf
from statistics import median

from edge.costs import PassCost

MARGIN_S = 0.004  # a message's own way through broker and gateway, and what the clock of a busy board is late by


class Cadence:
    """Seconds throughout. step_s: of the verifier; cost: of the drafter's passes; sent_at, beat_at: when the last draft
    left and the last commit came.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self.cost = PassCost()
        self.sent_at = -inf
        self.round_trip_s: float | None = None
        self.beat_at = -inf
        self._waiting: deque[tuple[int, float]] = deque(maxlen=64)
        self._trips: deque[float] = deque(maxlen=15)

    def prices(self) -> tuple[float, float]:
        """(a pass of the drafter, a guess that turns out to be wrong), in s; 0 where that is not known yet."""
        return self.cost.first_s, self.step_s + self.round_trip_s if self.round_trip_s is not None else 0.0

    def sent(self, seq: int, now: float) -> None:
        """Draft `seq` (counted up, not modulo anything) has left."""
        self.sent_at = now
        self._waiting.append((seq, now))

    def beat(self, seq: int, age_ms: int | None, now: float) -> None:
        """A commit has come that knows of all drafts up to `seq`, the last of which the verifier had for `age_ms`."""
        self.beat_at = now
        sent_at: float | None = None
        while self._waiting and self._waiting[0][0] <= seq:
            number, left_at = self._waiting.popleft()
            sent_at = left_at if number == seq else None
        if sent_at is not None and age_ms is not None:
            self._trips.append(max(0.0, now - sent_at - age_ms / 1000))
            self.round_trip_s = median(self._trips)

    def departure(self, now: float, pass_s: float) -> float:
        """When gathered guesses should leave to be in time for a step of a verifier that steps without pause.

        pass_s: of the pass that begins now, 0 when none does. Where it would end too late for the next step, what there
        is leaves now; what is made just before the step's last moment may be in time and leaves too. Before the rhythm
        is known, one draft a step leaves.
        """
        trip = self.round_trip_s
        if trip is None or not self.step_s:
            return max(now, self.sent_at + self.step_s)
        # Steps begin at the verifier at beat + k * step, seen from here: what leaves a round trip earlier is in time.
        first = self.beat_at - trip
        latest = first + ceil((now - first) / self.step_s) * self.step_s
        if now >= latest - MARGIN_S or (pass_s and now + pass_s > latest - MARGIN_S):
            return now
        return inf if pass_s else latest - MARGIN_S
