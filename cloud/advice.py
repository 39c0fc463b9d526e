"""How many draft rows a step are welcome from a session: said seldom, since each change costs bytes."""

from __future__ import annotations

from cloud.acceptance import DEPTHS, Rates

LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LEAST_PATH = 0.05  # a chain that is less likely to be right as a whole is not welcome even where rows are free
CLEARLY = 1.25  # the price may move by this factor before the advice does
DWELL = 8  # commits between two looks


class Advice:
    """The advice that a session's device follows. 0 asks it to draft no more, until it is told more again."""

    def __init__(self) -> None:
        self.rows: int | None = None
        self._kept = 0

    @property
    def is_due(self) -> bool:
        """Whether the next update looks at the rates, and does not only count."""
        return self.rows is None or self._kept == DWELL - 1

    def update(self, rates: Rates, price: float, most: int) -> int:
        """rates: how the session's guesses fare; price: the chance that a row needs to be worth a step's time."""
        if self.rows is None:
            self.rows = _level(_worth(rates, price, most))
        self._kept += 1
        if self._kept == DWELL:
            self._kept = 0
            if not self._holds(rates, price, most):
                self.rows = _level(_worth(rates, price, most))
        return self.rows

    def _holds(self, rates: Rates, price: float, most: int) -> bool:
        assert self.rows is not None
        following = next((level for level in LEVELS if level > self.rows), most + 1)
        return _worth(rates, price / CLEARLY, most) >= self.rows and _worth(rates, price * CLEARLY, most) < following


def _level(rows: int) -> int:
    return max(level for level in LEVELS if level <= rows)


def _worth(rates: Rates, price: float, most: int) -> int:
    """Guesses of a chain, up to `most`, that are as likely to be right, all of them, as a row must be."""
    chances = [rates.rate(depth, 0) for depth in range(DEPTHS)]
    least, path = max(price, LEAST_PATH), 1.0
    for rows in range(most):
        path *= chances[min(rows, DEPTHS - 1)]
        if path < least:
            return rows
    return most
