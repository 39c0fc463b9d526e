"""The verifier's rhythm as the board hears it, and when a draft must leave to be in time for its next step."""

from __future__ import annotations

from collections import deque
from math import ceil, inf

from edge.costs import PassCost

MARGIN_S = 0.004  # a message's own way through broker and gateway, and what the clock of a busy board is late by


class Cadence:
    """Seconds throughout. step_s: of the verifier; cost: of the drafter's passes; sent_at: when the last draft left.

    round_trip_s: time from a draft to the first commit that knows of it, less a step; the lower quartile, since some
    waited for a step to end and some steps are shorter than told. None until one was heard.
    """

    def __init__(self) -> None:
        self.step_s = 0.0
        self.cost = PassCost()
        self.sent_at = -inf
        self._beat_at = -inf
        self._waiting: deque[tuple[int, float]] = deque(maxlen=64)
        self._trips: deque[float] = deque(maxlen=32)

    @property
    def round_trip_s(self) -> float | None:
        return sorted(self._trips)[len(self._trips) // 4] if self._trips else None

    def passed(self, rows: int, seconds: float) -> None:
        """A pass of the drafter over so many rows took this long."""
        self.cost.passed(rows, seconds)

    def sent(self, seq: int, now: float) -> None:
        """Draft `seq` (counted up, not modulo anything) has left."""
        self.sent_at = now
        self._waiting.append((seq, now))

    def beat(self, seq: int, now: float) -> None:
        """A commit has come that knows of all drafts up to `seq`."""
        self._beat_at = now
        latest: float | None = None
        while self._waiting and self._waiting[0][0] <= seq:
            latest = self._waiting.popleft()[1]
        if latest is not None:
            self._trips.append(max(0.0, now - latest - self.step_s))

    def departure(self, now: float) -> float:
        """When gathered guesses should leave to be in time for a step of a verifier that steps without pause: as late
        as the next pass allows, and once a step. Now, while the rhythm is not known.
        """
        trip = self.round_trip_s
        if trip is None or not self.step_s:
            return max(now, self.sent_at + self.step_s)
        lead = trip + MARGIN_S
        # Steps begin at the verifier at beat + k * step, seen from here: what leaves `trip` earlier is in time for one.
        first = self._beat_at - lead
        k = ceil((max(now, self.sent_at + self.cost.first_s + MARGIN_S) - first) / self.step_s)
        return first + k * self.step_s - self.cost.first_s
