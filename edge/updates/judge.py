"""Whether a release on trial drafts as well as what it replaces: a sequential test, looked at after every session.

Each judged position is a number in [0, 1]: 1 where the verifier's token was guessed, 0 where it was missed. Around the
mean of n of them lies an interval that covers the mean of their conditional expectations at all n at once with
probability 1 - ALPHA, whatever their dependence and however often one looks: the two-sided normal mixture bound with
v = n / 4, by Hoeffding's lemma (Howard, Ramdas, McAuliffe, Sekhon, "Time-uniform, nonparametric, nonasymptotic
confidence sequences", Annals of Statistics 49, 2021, eq. 14).
"""

from __future__ import annotations

from math import inf, log, sqrt
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

ALPHA = 0.02
TIGHTEST_AT = 250.0  # v at which the interval is about tightest for its n: a thousand positions
MEMORY = 1 << 16  # positions of the old one that are remembered: texts change, and so does what they allow

Verdict: TypeAlias = Literal["commit", "reject", "wait"]
Count: TypeAlias = Annotated[int, Meta(ge=0)]


class Score(msgspec.Struct, frozen=True):
    """What was verified. rounds: commits; hits, misses: positions that had guesses, by whether one was right."""

    rounds: Count = 0
    hits: Count = 0
    misses: Count = 0

    @property
    def judged(self) -> int:
        return self.hits + self.misses

    @property
    def mean(self) -> float:
        return self.hits / self.judged if self.judged else 0.0

    def plus(self, more: Score) -> Score:
        return Score(self.rounds + more.rounds, self.hits + more.hits, self.misses + more.misses)

    def faded(self) -> Score:
        """Half of it once it has grown beyond MEMORY."""
        if self.judged <= MEMORY:
            return self
        return Score(self.rounds // 2, self.hits // 2, self.misses // 2)


class Rule(msgspec.Struct, frozen=True):
    """rounds: fewest before a commit; margin: of acceptance that a release may cost; most: times `rounds` after which
    the means decide what the bound has not.
    """

    rounds: Annotated[int, Meta(ge=1)] = 200
    margin: Annotated[float, Meta(ge=0, lt=1)] = 0.05
    most: Annotated[int, Meta(ge=1)] = 20


def radius(count: int) -> float:
    """Half the width of the interval around a mean of so many; inf for none."""
    if count == 0:
        return inf
    v = count / 4 + TIGHTEST_AT
    return sqrt(v * log(v / (ALPHA * ALPHA * TIGHTEST_AT))) / count


def judge(new: Score, old: Score, rule: Rule) -> Verdict:
    """Surely worse than the margin: rejected at once. Surely not: committed, after the fewest rounds.

    Where the old one was never judged for as many rounds there is nothing to compare with, and the rounds are enough.
    """
    enough = new.rounds >= rule.rounds
    if old.judged < rule.rounds:
        return "commit" if enough else "wait"
    spread = radius(new.judged) + radius(old.judged)
    gap = old.mean - rule.margin - new.mean
    if gap > spread:
        return "reject"
    if enough and gap <= -spread:
        return "commit"
    if new.rounds < rule.rounds * rule.most:
        return "wait"
    return "commit" if new.judged and gap <= 0 else "reject"
