"""A drafter over a model with a cache of slots: the text, the tree behind it, and which row lies where.

The text's tokens lie in slots 0 .. L-1 and the rows of the tree behind them in the order they were evaluated, so a
parent always lies before its children. A row sees the text, its ancestors and itself; its position counts its ancestors
only. How rows are computed is a `Forward`'s business, one for each runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.drafters import shortlist
from edge.drafters.base import Candidate, DrafterInfo
from edge.drafters.manifest import Manifest
from edge.drafters.rank import rank
from edge.drafters.shortlist import HeadIds
from protocol.errors import ModelError
from protocol.sampling import Sampling

PREFILL_ROWS = 64  # per pass: larger chunks are not faster a token, and let nothing else run for longer
DEFAULT_CONTEXT = 4096  # tokens; a cache for all that a model could take may not fit on a board
FORGOTTEN = -1

Seen = NDArray[np.bool_]


class Forward(Protocol):
    """A model and its cache of `capacity` slots. provider: what the products run on, for people.

    A pass holds at most PREFILL_ROWS rows without `tree`; with it, as many as the caller lets the tree grow by at once.
    """

    capacity: int
    provider: str

    def run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> NDArray[np.float32]:
        """Evaluate rows [rows] into the slots from `start` on: the logits [wanted, width] behind the wanted rows, which
        the next pass may overwrite.

        tree: bool [rows, start + rows - length], True where the row sees that slot behind the text's `length`, itself
        included; of the text it sees all. None: each row sees everything before it and itself.
        """

    def move(self, slots: Sequence[int], first: int) -> None:
        """Bring what lies at `slots` (ascending, each >= its place) to the slots first, first + 1, …"""


@dataclass(slots=True, eq=False)
class Row:
    """One evaluated token. slot: where its keys and values lie, or FORGOTTEN;
    evaluation, index: which row of which pass it was."""

    id: int
    position: int
    slot: int
    parent: Row | None
    evaluation: int
    index: int


class CachedDrafter:
    """A `Drafter` over any `Forward`. Used by one thread at a time.

    head_ids: [m] what the places in the forward's logits stand for, where these are not all ids in their order.
    """

    info: DrafterInfo

    def __init__(self, forward: Forward, facts: Manifest, head_ids: HeadIds | None = None) -> None:
        self.info = DrafterInfo(
            name=facts.name,
            vocab_size=facts.vocab_size,
            context=forward.capacity,
            tokenizer_digest=facts.tokenizer_digest,
            weights_digest=facts.weights_digest,
            compute=facts.compute,
            provider=forward.provider,
        )
        self._forward, self._head_ids = forward, head_ids
        self._text: list[int] = []
        self._last: Row | None = None
        self._tree: list[Row] = []  # in slot order, which is the order of evaluation
        self._used = 0  # slots
        self._evaluation = 0
        self._logits = np.empty((0, 0), np.float32)  # [rows of the latest pass, width]

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Row:
        """Make `ids` the text. See `Drafter.prefill`."""
        if not ids:
            raise ModelError("an empty text cannot be evaluated", where=self.info.name, remedy="give a prompt")
        self._check_room(len(ids))
        self._check_ids(ids)
        self._keep_common(ids)
        done = min(_common(self._text, ids), len(ids) - 1)  # the last token is evaluated anew, for its logits
        self._forget()
        self._evaluation += 1
        self._text = list(ids[:done])  # grows with each chunk, so that it is true after an error too
        while done < len(ids):
            end = min(done + PREFILL_ROWS, len(ids))
            wanted = [end - done - 1] if end == len(ids) else []
            self._logits = self._forward.run(ids[done:end], range(done, end), done, wanted, None)
            self._text += ids[done:end]
            self._used = done = end
            if progress:
                progress(done, len(ids))
        self._last = Row(ids[-1], len(ids) - 1, len(ids) - 1, None, self._evaluation, 0)
        return self._last

    def extend(self, rows: Sequence[tuple[int, Row | int]]) -> list[Row]:
        """Evaluate rows of the tree in one pass. See `Drafter.extend`."""
        if not rows:
            return []
        self._check_room(self._used + len(rows))
        self._check_ids([id for id, _ in rows])
        new: list[Row] = []
        for index, (id, parent) in enumerate(rows):
            above = new[parent] if isinstance(parent, int) else parent
            if above.slot == FORGOTTEN:
                raise ValueError(f"the parent of row {index} is no longer in the tree")
            new.append(Row(id, above.position + 1, self._used + index, above, self._evaluation + 1, index))
        length = len(self._text)
        seen = np.zeros((len(new), self._used + len(new) - length), np.bool_)
        for row in new:
            seen[row.index, [above.slot - length for above in self._branch(row)]] = True
        ids, positions = [row.id for row in new], [row.position for row in new]
        self._logits = self._forward.run(ids, positions, self._used, range(len(new)), seen)
        self._tree += new
        self._used += len(new)
        self._evaluation += 1
        return new

    def keep(self, path: Sequence[Row]) -> None:
        """Append rows of the tree to the text. See `Drafter.keep`."""
        if not path:
            return
        broken = path[0].slot == FORGOTTEN or path[0].parent is not self._last
        if broken or any(b.parent is not a for a, b in pairwise(path)):
            raise ValueError("the path does not follow the text's last row")
        last = path[-1]
        living = {id(last)}
        survivors = []
        for row in self._tree:
            if id(row.parent) in living:
                living.add(id(row))
                survivors.append(row)
        moved = [*path, *survivors]
        first = len(self._text)
        self._forward.move([row.slot for row in moved], first)
        self._forget()
        for slot, row in enumerate(moved, first):
            row.slot = slot
        for row in path[:-1]:
            row.slot = FORGOTTEN
        last.parent = None  # the text has no need of its rows, and the last one must not hold them all
        self._text += [row.id for row in path]
        self._last, self._tree = last, survivors
        self._used = first + len(moved)

    def candidates(self, row: Row, sampling: Sampling, n: int) -> list[Candidate]:
        """The n likeliest guesses behind `row`. See `Drafter.candidates`."""
        ids, probabilities = rank(self._headed(row), row.position + 1, sampling, n, self._head_ids)
        return [Candidate(int(id), float(p)) for id, p in zip(ids, probabilities, strict=True)]

    def logits(self, row: Row) -> np.ndarray:
        """What the candidates behind `row` are ranked by: float32 [vocab], minus infinity for ids that the head lacks.

        The next pass may overwrite it.
        """
        logits = self._headed(row)
        return logits if self._head_ids is None else shortlist.spread(logits, self._head_ids, self.info.vocab_size)

    def _headed(self, row: Row) -> np.ndarray:
        """Logits of the ids that the head has, by their places; the tokenizer may have fewer than a whole head."""
        if row.evaluation != self._evaluation:
            raise ValueError("only the rows of the latest pass can be asked for candidates or logits")
        return self._logits[row.index, : self.info.vocab_size if self._head_ids is None else self._head_ids.size]

    def room(self) -> int:
        return self.info.context - self._used

    def _keep_common(self, ids: Sequence[int]) -> None:
        """Where `ids` goes on beyond the text along rows of the tree, keep those."""
        if self._last is None or len(ids) <= len(self._text) or list(ids[: len(self._text)]) != self._text:
            return
        path: list[Row] = []
        above = self._last
        for id in ids[len(self._text) :]:
            child = next((row for row in self._tree if row.parent is above and row.id == id), None)
            if child is None:
                break
            path.append(child)
            above = child
        self.keep(path)

    def _forget(self) -> None:
        """Mark the text's last row and the whole tree as gone, so that a caller who kept one is told."""
        for row in self._tree if self._last is None else [self._last, *self._tree]:
            row.slot = FORGOTTEN
        self._last, self._tree = None, []

    def _branch(self, row: Row) -> list[Row]:
        """The row and its ancestors in the tree."""
        branch = [row]
        while (above := branch[-1].parent) is not None and above is not self._last:
            branch.append(above)
        return branch

    def _check_room(self, total: int) -> None:
        if total > self.info.context:
            raise ModelError(
                f"{total} tokens do not fit the context of {self.info.context}",
                where=self.info.name,
                remedy="shorten the prompt, or load the drafter with a larger context",
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not all(0 <= id < self.info.vocab_size for id in ids):
            bad = next(id for id in ids if not 0 <= id < self.info.vocab_size)
            raise ModelError(
                f"id {bad} is not in the vocabulary of {self.info.vocab_size}",
                where=self.info.name,
                remedy="use the tokenizer.json of this drafter",
            )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
