"""How many replicas a load needs: queue time between two bounds (pure)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica says of itself. queue_s: how long the root rows of its sessions wait for their step; step_us: a
    step's time; serving: whether the broker sends it sessions; silence_s: since its loop last turned.
    """

    serving: bool = False
    sessions: int = 0
    queue_s: float = 0.0
    step_us: int = 0
    silence_s: float = 0.0


def queue_s(loads: Collection[Load]) -> float:
    """The queue time of the mean session, in s; 0 where there is none."""
    sessions = sum(load.sessions for load in loads)
    return sum(load.queue_s * load.sessions for load in loads) / sessions if sessions else 0.0


class Autoscale:
    """One replica more where sessions have queued for longer than `high_s` all through `settle_s`, one fewer where they
    have queued for less than `low_s`. Each change starts the time over: what it brings is seen before the next one.
    """

    def __init__(self, least: int, most: int, *, high_s: float, low_s: float, settle_s: float) -> None:
        self.least, self.most, self.wanted = least, most, least
        self._high_s, self._low_s, self._settle_s = high_s, low_s, settle_s
        self._side, self._since = 0, 0.0

    def look(self, loads: Collection[Load], now: float) -> int:
        """The number of replicas wanted, given the loads of all that serve.

        Nothing is concluded while another number serves than is wanted: sessions move then, and queues with them.
        """
        side = self._compare(queue_s(loads)) if len(loads) == self.wanted else 0
        if side != self._side:
            self._side, self._since = side, now
        if side and now - self._since >= self._settle_s:
            self.wanted += side
            self._side = 0
        return self.wanted

    def _compare(self, queue_s: float) -> int:
        """1: more are needed; -1: fewer would do; 0: neither, or the bound is reached."""
        if queue_s > self._high_s:
            return int(self.wanted < self.most)
        if queue_s < self._low_s:
            return -int(self.wanted > self.least)
        return 0
