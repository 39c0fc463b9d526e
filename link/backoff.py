"""How long to wait before the next attempt to connect (pure)."""

from __future__ import annotations

import random

FIRST_PAUSE_S = 0.5
STABLE_S = 5.0  # a connection that lasted this long was a success


class Backoff:
    """Pauses that double up to `ceiling_s`, each shortened by up to a half at random, so that a fleet spreads out.

    The first is at most 0.5 s. They start over only after a connection that lasted: a broker that accepts and then
    ends each connection, as for a client id used twice, must not be hammered.
    """

    def __init__(self, ceiling_s: float, seed: int | None = None) -> None:
        self._ceiling_s = ceiling_s
        self._next_s = FIRST_PAUSE_S
        self._random = random.Random(seed)

    def pause_s(self, lasted_s: float) -> float:
        """Seconds to wait after a connection that was up for lasted_s; 0 for one that never was."""
        if lasted_s >= STABLE_S:
            self._next_s = FIRST_PAUSE_S
        pause_s = min(self._next_s, self._ceiling_s)
        self._next_s = min(self._next_s * 2, self._ceiling_s)
        return pause_s * self._random.uniform(0.5, 1.0)
