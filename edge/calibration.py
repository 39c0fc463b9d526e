"""From a drafter's probabilities to what they are worth: how often such a guess is what the target writes.

A drafter is seldom as sure as it should be (a small model's .55 may be right three times of four), and siblings less
often than their probability says. Verdicts tell, so the board counts: by probability and rank, corrected by how deep
behind the text the guess was made.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from edge.drafters.base import Candidate

FIRST_EDGES = (0.3, 0.45, 0.6, 0.75, 0.88, 0.96, 0.99)
FIRST_PRIOR = (0.3, 0.42, 0.6, 0.75, 0.87, 0.95, 0.98, 0.995)
SIBLING_EDGES = (0.03, 0.07, 0.14, 0.22, 0.3)
SIBLING_PRIOR = (0.02, 0.05, 0.1, 0.17, 0.25, 0.35)
DEPTH_EDGES = (1, 2, 4, 8)
PRIOR_WEIGHT = 4.0  # observations that the prior counts as
DEPTH_WEIGHT = 40.0
SUREST = 0.999
HOPELESS, EVIDENCE = 0.2, 32  # first candidates right, of about so many of the latest
MEMORY = 400.0  # observations of one kind after which the older half fades


class Frequency:
    """Acceptance by the bin that a probability falls in, each a posterior mean of its prior and what was seen."""

    __slots__ = ("_edges", "_hits", "_seen", "rates")

    def __init__(self, edges: Sequence[float], prior: Sequence[float]) -> None:
        self._edges = edges
        self._hits = [PRIOR_WEIGHT * rate for rate in prior]
        self._seen = [PRIOR_WEIGHT] * len(prior)
        self.rates = list(prior)

    def at(self, probability: float) -> float:
        return self.rates[bisect(self._edges, probability)]

    def saw(self, probability: float, hit: bool) -> None:
        i = bisect(self._edges, probability)
        if self._seen[i] > MEMORY:
            self._seen[i] /= 2
            self._hits[i] /= 2
        self._seen[i] += 1
        self._hits[i] += hit
        self.rates[i] = self._hits[i] / self._seen[i]


class Calibration:
    """What one board has learned of its drafter against its target. Greedy and sampled texts need one each: at T > 0
    both draw with the same noise, and a first candidate is right more often than its probability.
    """

    def __init__(self) -> None:
        self._first = Frequency(FIRST_EDGES, FIRST_PRIOR)
        self._sibling = Frequency(SIBLING_EDGES, SIBLING_PRIOR)
        self._hits = [DEPTH_WEIGHT] * (len(DEPTH_EDGES) + 1)
        self._expected = [DEPTH_WEIGHT] * (len(DEPTH_EDGES) + 1)
        self._by_depth = [1.0] * (len(DEPTH_EDGES) + 1)
        self._judged = 0
        self._right = 0.0

    def first(self, probability: float, depth: int) -> float:
        """How often a first candidate of this probability is right, `depth` tokens behind the text, if what leads to
        it is.
        """
        share = self._first.at(probability) * self._by_depth[bisect(DEPTH_EDGES, depth - 1)]
        return share if share < SUREST else SUREST

    def sibling(self, probability: float) -> float:
        """How often another than the first candidate is right, if what leads to it is."""
        return self._sibling.at(probability)

    def hopeless(self) -> bool:
        """Whether first candidates have hardly ever been right of late."""
        return self._judged >= EVIDENCE and self._right < HOPELESS

    def saw(self, candidates: Sequence[Candidate], depth: int, id: int) -> None:
        """The target wrote `id` where these candidates were guessed, `depth` tokens behind the text of then."""
        best = candidates[0]
        self._judged += 1
        self._right += (float(best.id == id) - self._right) * max(1 / self._judged, 1 / EVIDENCE)
        i = bisect(DEPTH_EDGES, depth - 1)
        self._expected[i] += self._first.at(best.probability)
        self._hits[i] += best.id == id
        self._by_depth[i] = self._hits[i] / self._expected[i]
        self._first.saw(best.probability, best.id == id)
        for candidate in candidates[1:]:
            self._sibling.saw(candidate.probability, candidate.id == id)
