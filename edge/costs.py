"""What a pass of the drafter costs on this board, learned from the passes themselves."""

from __future__ import annotations

USUAL_SHARE = 0.25  # of a pass, for each row beyond the first, until this board has shown its own
KEEP = 0.85
LEAST_SHARE = 0.01  # that rows are counted by


class PassCost:
    """Seconds of a pass by its rows, as `first · (1 + share · (rows - 1))`; both follow the board's mood."""

    def __init__(self) -> None:
        self.first_s = 0.0
        self.share = USUAL_SHARE

    def passed(self, rows: int, seconds: float) -> None:
        """A pass over so many rows took this long."""
        if not self.first_s:
            self.first_s = seconds / (1 + self.share * (rows - 1))
        elif rows == 1:
            self.first_s = KEEP * self.first_s + (1 - KEEP) * seconds
        else:
            share = (seconds / self.first_s - 1) / (rows - 1)
            self.share = KEEP * self.share + (1 - KEEP) * min(1.0, max(0.0, share))

    def rows_within(self, passes: float) -> int:
        """The most rows, at least one, of a pass that takes no longer than so many of one row."""
        return 1 + int((passes - 1) / max(self.share, LEAST_SHARE))

    def times(self, rows: int) -> float:
        """How many times as long as one of one row a pass of so many takes."""
        return 1 + self.share * (rows - 1)

    def of(self, rows: int) -> float:
        return self.first_s * self.times(rows)
