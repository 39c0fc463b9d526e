"""How many guesses in a row the target agrees with: from one probability, or from a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
        self._survival = _survival(self._hits)
        self.alpha = trace.acceptance

    @property
    def tokens_a_rejection(self) -> float:
        return sum(self._survival)

    def survival(self, num_guesses: int) -> float:
        return self._survival[num_guesses] if num_guesses < len(self._survival) else 0.0

    def tokens_a_round(self, gamma: int) -> float:
        """By playing the rounds over the text: a round ends at a miss or behind `gamma` hits, with one token more. One
        that the text's end cuts off is left out.
        """
        num_rounds = position = 0
        while True:
            ahead = self._hits[position : position + gamma]
            length = ahead.index(False) if False in ahead else gamma
            if position + length >= len(self._hits):
                return position / num_rounds if num_rounds else len(self._hits)
            position += length + 1
            num_rounds += 1


def by_depth(acceptances: Sequence[Acceptance], depth: int) -> list[float]:
    """[<= depth] how often guess 1, 2, … of a chain is right where all before it were: equal numbers where guesses are
    independent, rising ones where misses cluster. Ends where no chain came so far.
    """
    survivals = [sum(a.survival(k) for a in acceptances) for k in range(depth + 1)]
    return [after / before for before, after in pairwise(survivals) if before > 0]


def _survival(hits: Sequence[bool]) -> list[float]:
    """[k] how likely the k guesses behind a miss (or the text's start) are all right.

    The run of hits at the text's end is one whose end nobody saw. It counts as far as it goes: the estimate of Kaplan
    and Meier, Journal of the American Statistical Association 53, 1958.
    """
    *ended, last = (len(run) for run in "".join("x" if hit else "." for hit in hits).split("."))
    survival = [1.0]
    for length in range(max([*ended, last]) + 1):
        at_risk = sum(run >= length for run in ended) + (last > length)
        if not at_risk:
            break
        survival.append(survival[-1] * (1 - ended.count(length) / at_risk))
    return survival
