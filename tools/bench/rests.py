"""A clock that stands still for a while in each period, in all processes alike: room to measure something else."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rests:
    """From `start`, in `time.monotonic()` seconds, on, each period ends with a rest of `rest_s`."""

    start: float
    period_s: float
    rest_s: float

    def __call__(self) -> float:
        """Seconds since `start`, rests not counted."""
        periods, phase = divmod(time.monotonic() - self.start, self.period_s)
        work_s = self.period_s - self.rest_s
        return periods * work_s + min(phase, work_s)

    def real(self, at: float) -> float:
        """When this clock shows `at`, in `time.monotonic()` seconds."""
        periods, phase = divmod(at, self.period_s - self.rest_s)
        return self.start + periods * self.period_s + phase

    def sleep_until(self, at: float) -> None:
        left = self.real(at) - time.monotonic()
        if left > 0:
            time.sleep(left)

    def rested_s(self) -> float:
        """How long the rest under way has lasted; negative while there is none."""
        return (time.monotonic() - self.start) % self.period_s - (self.period_s - self.rest_s)
