"""A model and what was written before, in one drafter: what the text repeats costs no pass of the model.

Where the end of a text with its guesses occurred before and has gone on in the same way often enough, the next guess is
known without the model: such a row is not evaluated when it is made. The model reads it later, with all that were made
like it before, in one pass: where it has to go on behind them, or while the board has time for second thoughts, or
never. Everywhere else the model is asked, and its candidates are put into one order with what was written before by how
often each kind turned out to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from edge.calibration import FIRST_EDGES, FIRST_PRIOR, Frequency
from edge.drafters.automaton import Match
from edge.drafters.base import Candidate, Drafter
from edge.drafters.recall import Recall, RecallOdds
from protocol.sampling import Sampling

SUREST = 0.99  # what a model's guess is worth where a text repeats itself
# How likely the guess behind a row must be right for the model not to be asked, as long as no price is known.
FREE = 0.95
LEAST_FREE = 0.8
SAVED = 0.4  # of a pass that is not made; found by replaying recorded drafts
SAY = 0.85  # below this what was written before is no guess
FEW = 7  # rows behind the text that are read together with guesses; more are read as a text is, which needs no logits
AGAINST_EDGES = (0.2, 0.4, 0.6, 0.8)
AGAINST_PRIOR = (0.03, 0.06, 0.1, 0.2, 0.35)  # that what was written before is right where the model guesses otherwise


class MixedOdds:
    """What a board has learned of its model and of repeated texts, each alone and both together. It outlives texts."""

    def __init__(self) -> None:
        self.recall = RecallOdds()
        self._agreed = Frequency(FIRST_EDGES, FIRST_PRIOR)
        self._model_against = Frequency(FIRST_EDGES, FIRST_PRIOR)
        self._recall_against = Frequency(AGAINST_EDGES, AGAINST_PRIOR)

    def merge(self, modelled: Sequence[Candidate], recalled: Candidate, n: int) -> list[Candidate]:
        """The model's candidates (at least one) and one that was written before, n of them, best first."""
        best = modelled[0]
        others = [candidate for candidate in modelled if candidate.id != recalled.id]
        if best.id == recalled.id:
            return [Candidate(best.id, self._agreed.at(_either(best, recalled))), *others][:n]
        again = Candidate(recalled.id, self._recall_against.at(recalled.probability))
        if again.probability > self._model_against.at(best.probability):
            return [again, *others][:n]
        place = 1
        while place < len(others) and others[place].probability >= again.probability:
            place += 1
        return [*others[:place], again, *others[place:]][:n]

    def saw(self, best: Candidate, recalled: Candidate, id: int) -> None:
        """`id` came where the model's best and this one were guessed."""
        if best.id == recalled.id:
            self._agreed.saw(_either(best, recalled), best.id == id)
        else:
            self._model_against.saw(best.probability, best.id == id)
            self._recall_against.saw(recalled.probability, recalled.id == id)


def _either(one: Candidate, other: Candidate) -> float:
    return 1 - (1 - one.probability) * (1 - other.probability)


@dataclass(slots=True, eq=False)
class Row:
    """A token of the text or a guess. match: what of the end of the text with it occurred before; inner: the model's
    row, None as long as it has not read it; offer: the best of the model's candidates and the one written before.
    """

    id: int
    position: int
    parent: Row | None
    match: Match
    inner: Any = None
    offer: tuple[Candidate, Candidate] | None = None


class MixedDrafter:
    """A `Drafter` and `Foresees` around another drafter, which nobody else may use. Used by one thread at a time."""

    def __init__(self, model: Drafter, odds: MixedOdds | None = None) -> None:
        self.model, self.info = model, model.info
        self._odds = odds or MixedOdds()
        self._recall = Recall(self._odds.recall)
        self._free = FREE
        self._last: Row | None = None
        self._unread: list[Row] = []  # the text's last tokens, as far as the model has not read them
        self._late: list[Row] = []  # what the latest pass has read that was made before it

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Row:
        """Make `ids` the text. See `Drafter.prefill`."""
        inner = self.model.prefill(ids, progress)
        self._recall.become(ids)
        self._unread = []
        self._last = Row(ids[-1], len(ids) - 1, None, self._recall.end(), inner)
        return self._last

    def extend(self, rows: Sequence[tuple[int, Row | int]]) -> list[Row]:
        """See `Drafter.extend`; the model evaluates what `pass_rows` counts."""
        made, needed = self._plan(rows)
        self._late = []
        if needed:
            self._evaluate(needed)
            self._late = [row for row in self._late if row not in made]
        return made

    def unread(self, row: Row) -> int:
        """See `Foresees.unread`."""
        return len(_branch(row))

    def read(self, row: Row) -> None:
        """See `Foresees.read`."""
        self._late = []
        if needed := _branch(row)[::-1]:
            self._evaluate(needed)

    def read_late(self) -> Sequence[Row]:
        """See `Foresees.read_late`."""
        return self._late

    def pass_rows(self, rows: Sequence[tuple[int, Row | int]]) -> int:
        """See `Foresees.pass_rows`."""
        return len(self._plan(rows)[1])

    def price(self, pass_s: float, miss_s: float) -> None:
        """A guess of its own is worth what it saves while it is wrong more often than the model's by no more than that
        costs. See `Foresees.price`.
        """
        self._free = max(LEAST_FREE, SUREST - SAVED * pass_s / miss_s) if pass_s and miss_s else FREE

    def keep(self, path: Sequence[Row]) -> None:
        """See `Drafter.keep`."""
        if not path:
            return
        if path[0].parent is not self._last or any(b.parent is not a for a, b in pairwise(path)):
            raise ValueError("the path does not follow the text's last row")
        # What the model has read of a path is its beginning, since it reads a row with all that lead to it.
        self.model.keep([row.inner for row in path if row.inner is not None])
        self._unread += [row for row in path if row.inner is None]
        for row in path:
            assert row.parent is not None
            if row.parent.offer is not None:
                self._odds.saw(*row.parent.offer, row.id)
        self._recall.read([row.id for row in path])
        self._become_last(path[-1])

    def candidates(self, row: Row, sampling: Sampling, n: int) -> list[Candidate]:
        """See `Drafter.candidates`. At T > 0 what was written before has no noise; its place is by its probability."""
        recalled = self._recall.candidates(row.match, n)
        if row.inner is None:
            return recalled
        modelled = self.model.candidates(row.inner, sampling, n)
        if not recalled or recalled[0].probability < SAY:
            return modelled
        row.offer = modelled[0], recalled[0]
        return self._odds.merge(modelled, recalled[0], n)

    def room(self) -> int:
        return self.model.room() - len(self._unread)

    def _plan(self, rows: Sequence[tuple[int, Row | int]]) -> tuple[list[Row], list[Row]]:
        """(a row for each item, the rows that the model has to evaluate, parents first)."""
        made: list[Row] = []
        needed: dict[Row, None] = {}
        for id, parent in rows:
            above = made[parent] if isinstance(parent, int) else parent
            match = self._recall.step(above.match, id)
            made.append(row := Row(id, above.position + 1, above, match))
            if self._recall.odds_of(match) < self._free:
                needed.update(dict.fromkeys(reversed(_branch(row))))
        return made, list(needed)

    def _evaluate(self, rows: Sequence[Row]) -> None:
        """Let the model read these rows, parents first; they lead on from the text, so all that is unread is there."""
        assert self._last is not None
        if len(self._unread) > FEW:
            self._last.inner = self.model.prefill(self._recall.text)
            rows = rows[len(self._unread) :]
            self._unread = []
            self._late = [] if rows else [self._last]
        else:
            self._late = list(rows[max(0, len(self._unread) - 1) :])
        index = {row: i for i, row in enumerate(rows)}
        asked = []
        for row in rows:
            assert row.parent is not None
            asked.append((row.id, index.get(row.parent, row.parent.inner)))
        for row, inner in zip(rows, self.model.extend(asked) if asked else (), strict=True):
            row.inner = inner
        self.model.keep([row.inner for row in self._unread])
        self._unread = []
        self._become_last(self._last)

    def _become_last(self, row: Row) -> None:
        row.match = self._recall.end()
        if not self._unread:
            row.parent = None  # the text has no need of its rows, and the last one must not hold them all
        self._last = row


def _branch(row: Row) -> list[Row]:
    """The rows that the model has not read of those that lead to this one, it first."""
    branch = []
    at: Row | None = row
    while at is not None and at.inner is None:
        branch.append(at)
        at = at.parent
    return branch
