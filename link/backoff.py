"""How long to wait before the next attempt to connect (pure)."""

from __future__ import annotations

import random

FIRST_PAUSE_S = 0.5
QUICK_PAUSE_S = 1.0
STABLE_S = 2.0  # a connection that lasted this long was a success
SOON_ENDED = 4  # so many in a row that did not are no coincidence


class Backoff:
    """Pauses that double up to `ceiling_s`, each shortened by up to a half at random, so that a fleet spreads out.

    The first is at most 0.5 s. For `quick_for_s` of pauses from the latest connection on the next are at most 1 s, so
    that an outage of that length costs hardly more than itself; but not where one connection after the other is made
    and soon ended, as for a client id used twice: that must not be hammered. They start over only after a connection
    that lasted.
    """

    _next_s: float
    _paused_s: float
    _soon_ended: int

    def __init__(self, ceiling_s: float, seed: int | None = None, *, quick_for_s: float = 0.0) -> None:
        self._ceiling_s, self._quick_for_s = ceiling_s, quick_for_s
        self._next_s, self._paused_s, self._soon_ended = FIRST_PAUSE_S, 0.0, 0
        self._random = random.Random(seed)

    def pause_s(self, lasted_s: float) -> float:
        """Seconds to wait after a connection that was up for lasted_s; 0 for one that never was."""
        if lasted_s >= STABLE_S:
            self._next_s, self._paused_s, self._soon_ended = FIRST_PAUSE_S, 0.0, 0
        elif lasted_s > 0:
            self._soon_ended += 1
            self._paused_s = 0.0
        pause_s = min(self._next_s, self._ceiling_s) * self._random.uniform(0.5, 1.0)
        self._paused_s += pause_s
        quick = self._paused_s < self._quick_for_s and self._soon_ended < SOON_ENDED
        longest_s = QUICK_PAUSE_S if quick else self._ceiling_s
        self._next_s = min(self._next_s * 2, longest_s)
        return pause_s
