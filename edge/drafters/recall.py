"""What was written before, as a guess of what is written now: a suffix automaton, and how far to believe it.

How likely a text repeats itself depends on how much of it has just been repeated, on whether it has always gone on in
the same way from there, and on how the answer itself last went on behind a shorter end of the same text: where a
variable is renamed, otherwise than the prompt. So matches are put into classes by these, and each class counts how
often its guess was right. Every token that the text grows by judges what would have been guessed there, so the prompt
teaches too.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from edge.drafters.automaton import Continuation, Match, SuffixAutomaton
from edge.drafters.base import Candidate

LENGTH_EDGES = (2, 3, 4, 5, 7, 10, 16)  # tokens that match, of the classes behind the first
SILENT, CONFIRMED, CONTESTED, MOSTLY, SOMETIMES = range(5)
SHORTEST, MOST_SHORTER = 2, 8  # tokens of a shorter end that counts for or against a guess; how many are looked at

# By length and evidence, as chat models of 135M and 1.5B parameters repeat prompts and themselves.
PRIOR = (
    (0.20, 0.20, 0.20, 0.20, 0.10),
    (0.45, 0.60, 0.40, 0.30, 0.10),
    (0.50, 0.70, 0.45, 0.50, 0.20),
    (0.70, 0.80, 0.55, 0.60, 0.30),
    (0.85, 0.90, 0.65, 0.65, 0.40),
    (0.89, 0.95, 0.70, 0.75, 0.50),
    (0.95, 0.98, 0.80, 0.80, 0.60),
    (0.97, 0.99, 0.90, 0.90, 0.70),
)
OTHERS_PRIOR = 0.3  # that one of the other continuations comes where the best one does not
TEXT_WEIGHT = 0.2  # misses that a text must show before it is half believed to be harder than others
SURE = 0.8  # a guess that is likelier counts for how hard a text is
PRIOR_WEIGHT = 8.0  # observations that the prior counts as
MEMORY = 400.0  # observations of a class after which the older half fades


class Share:
    """How often something happens: the posterior mean of a prior and what was seen."""

    __slots__ = ("_hits", "_seen")

    def __init__(self, prior: float) -> None:
        self._hits, self._seen = PRIOR_WEIGHT * prior, PRIOR_WEIGHT

    @property
    def mean(self) -> float:
        return self._hits / self._seen

    def saw(self, hit: bool) -> None:
        if self._seen > MEMORY:
            self._hits, self._seen = self._hits / 2, self._seen / 2
        self._hits += hit
        self._seen += 1


class RecallOdds:
    """What a board has learned of how texts repeat themselves. It outlives them."""

    def __init__(self) -> None:
        self._best = [[Share(prior) for prior in row] for row in PRIOR]
        self._others = [Share(OTHERS_PRIOR) for _ in PRIOR]

    def best(self, length: int, evidence: int) -> float:
        """How likely the first continuation of a match of this length comes next."""
        return self._best[bisect(LENGTH_EDGES, length)][evidence].mean

    def candidates(self, length: int, evidence: int, found: Sequence[Continuation], n: int) -> list[Candidate]:
        """The first n continuations with what each is worth."""
        first = self.best(length, evidence)
        rest = (1 - first) * self._others[bisect(LENGTH_EDGES, length)].mean
        total = sum(one.times for one in found[1:])
        return [Candidate(one.id, first if i == 0 else rest * one.times / total) for i, one in enumerate(found[:n])]

    def saw(self, length: int, evidence: int, found: Sequence[Continuation], id: int) -> None:
        """`id` came next."""
        right = found[0].id == id
        i = bisect(LENGTH_EDGES, length)
        self._best[i][evidence].saw(right)
        if not right and len(found) > 1:
            self._others[i].saw(any(one.id == id for one in found[1:]))


class Recall:
    """One text and what may be guessed from it. A match is the longest end of a text that occurred in it before."""

    def __init__(self, odds: RecallOdds | None = None) -> None:
        self.odds = odds or RecallOdds()
        self._automaton = SuffixAutomaton()
        self._misses = self._expected_misses = TEXT_WEIGHT
        self._start = 0  # of what was written behind the prompt

    @property
    def text(self) -> Sequence[int]:
        return self._automaton.text

    def become(self, ids: Sequence[int]) -> None:
        """Make `ids` the text; one that goes on from the present text is only read from there on."""
        text = self._automaton.text
        if list(ids[: len(text)]) != text:
            self._automaton = SuffixAutomaton()
            text = self._automaton.text
        self._start = len(ids)
        for id in ids[len(text) :]:
            self._read(id)
        self._misses = self._expected_misses = TEXT_WEIGHT

    def read(self, ids: Sequence[int]) -> None:
        """Let the text grow by what was written."""
        for id in ids:
            said, right = self._read(id)
            if said >= SURE:
                self._expected_misses += 1 - said
                self._misses += not right

    def _read(self, id: int) -> tuple[float, bool]:
        """(how likely the best guess was said to be right, whether it was)."""
        automaton = self._automaton
        match = automaton.longest()
        said, right = 0.0, False
        if found := automaton.continuations(match):
            evidence = self._evidence(match, found)
            said, right = self.odds.best(match.length, evidence), found[0].id == id
            self.odds.saw(match.length, evidence, found, id)
        automaton.append(id)
        return said, right

    def end(self) -> Match:
        """The match at the text's end."""
        return self._automaton.longest()

    def step(self, match: Match, id: int) -> Match:
        """The match behind a guess of `id` where `match` stood."""
        return self._automaton.step(match, id)

    def odds_of(self, match: Match) -> float:
        """How likely the best guess at a match is right; 0 where there is none."""
        found = self._automaton.continuations(match)
        if not found:
            return 0.0
        hardness = max(1.0, self._misses / self._expected_misses)
        return 1 - (1 - self.odds.best(match.length, self._evidence(match, found))) * hardness

    def candidates(self, match: Match, n: int) -> list[Candidate]:
        """At most n guesses at a match, best first."""
        found = self._automaton.continuations(match)
        return self.odds.candidates(match.length, self._evidence(match, found), found, n) if found else []

    def _evidence(self, match: Match, found: Sequence[Continuation]) -> int:
        """What speaks for the first continuation: where there are several, how many times of all it came; else what
        came last behind a shorter end, if the answer has gone on from one already.
        """
        if len(found) > 1:
            return MOSTLY if 2 * found[0].times > sum(one.times for one in found) else SOMETIMES
        for _ in range(MOST_SHORTER):
            match = self._automaton.shorter(match)
            if match.length < SHORTEST:
                break
            latest = max(self._automaton.continuations(match), key=_end, default=found[0])
            if latest.end >= self._start:
                return CONFIRMED if latest.id == found[0].id else CONTESTED
        return SILENT


def _end(one: Continuation) -> int:
    return one.end
