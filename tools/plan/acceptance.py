"""How many guesses in a row the target agrees with: from one probability, or from a recorded trace."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

from protocol.errors import ConfigError
from tools.traces import Trace


class Acceptance(Protocol):
    """A chain of guesses starts behind a token that the target decided against the drafter (or behind the prompt)."""

    @property
    def alpha(self) -> float:
        """The share of positions at which the drafter's first guess is the target's token."""

    @property
    def tokens_a_rejection(self) -> float:
        """Tokens of text for each guess that the target decided against, that one's correction included."""

    def survival(self, num_guesses: int) -> float:
        """The probability that the first `num_guesses` guesses of a chain are all right; 1 for 0."""

    def tokens_a_round(self, gamma: int) -> float:
        """E[A]: tokens that a round of `gamma` guesses yields, the target's own token behind them included."""


@dataclass(frozen=True)
class Independent:
    """Each guess is right with the same probability, whatever came before it."""

    alpha: float

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"an acceptance of {self.alpha} is no probability below 1", remedy="Give 0 to 0.99")

    @property
    def tokens_a_rejection(self) -> float:
        """1 / (1 - alpha), the mean of a geometric run and the token that ends it."""
        return 1 / (1 - self.alpha)

    def survival(self, num_guesses: int) -> float:
        return self.alpha**num_guesses

    def tokens_a_round(self, gamma: int) -> float:
        """(1 - alpha^(gamma+1)) / (1 - alpha): Leviathan, Kalman and Matias, arXiv 2211.17192, equation 1."""
        return (1 - self.alpha ** (gamma + 1)) / (1 - self.alpha)


class Recorded:
    """The drafter's hits and misses on one text: their order tells more than their share, since misses cluster."""

    def __init__(self, trace: Trace) -> None:
        self._hits = [ids[0] == id for ids, id in zip(trace.draft_ids, trace.target, strict=True)]
        self._runs = sorted(_runs(self._hits))
        self.alpha = trace.acceptance

    @property
    def tokens_a_rejection(self) -> float:
        return len(self._hits) / len(self._runs)

    def survival(self, num_guesses: int) -> float:
        return 1 - bisect_left(self._runs, num_guesses) / len(self._runs)

    def tokens_a_round(self, gamma: int) -> float:
        """By playing the rounds over the text: a round ends at a miss or behind `gamma` hits, with one token more."""
        num_rounds = position = 0
        while position < len(self._hits):
            ahead = self._hits[position : position + gamma]
            position += (ahead.index(False) if False in ahead else len(ahead)) + 1
            num_rounds += 1
        return len(self._hits) / num_rounds


def by_depth(acceptances: Sequence[Acceptance], depth: int) -> list[float]:
    """[<= depth] how often guess 1, 2, … of a chain is right where all before it were: equal numbers where guesses are
    independent, rising ones where misses cluster. Ends where no chain came so far.
    """
    survivals = [sum(a.survival(k) for a in acceptances) for k in range(depth + 1)]
    return [after / before for before, after in pairwise(survivals) if before > 0]


def _runs(hits: Sequence[bool]) -> list[int]:
    """Lengths of the runs of hits that end at a miss (0 for a miss behind a miss), and of the last one at the text's
    end.
    """
    runs: list[int] = []
    ahead = 0
    for hit, group in groupby(hits):
        length = sum(1 for _ in group)
        if hit:
            ahead = length
        else:
            runs += [ahead] + [0] * (length - 1)
            ahead = 0
    return [*runs, ahead] if ahead else runs
