"""What the runtime needs of a drafter: a text with a tree of guesses behind it, and the guesses that may come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Candidate:
    """A guess for one position. probability: the drafter's own, after temperature, top-k and top-p, in [0, 1]."""

    id: int
    probability: float


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """Facts of a loaded drafter. context: tokens; vocab_size: ids the tokenizer has; digests: hex SHA-256."""

    name: str
    vocab_size: int
    context: int
    tokenizer_digest: str
    weights_digest: str
    compute: str
    provider: str


class Row(Protocol):
    """One evaluated token: the last of the text, or a node of the tree. Opaque but for its position."""

    position: int


class Drafter(Protocol):
    """A causal model with a KV cache that holds one text and a tree of rows behind the text's last token.

    Rows stay valid until `prefill`, or until a `keep` that leaves them out. `candidates` may be asked of the rows
    that the latest `prefill` or `extend` returned, and of no others.
    """

    info: DrafterInfo

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Any:
        """Make `ids` (at least one) the text and return the row of its last token.

        The longest prefix that the cache already holds is reused. progress: called with (rows done, rows in all).
        Raises ModelError when the text is longer than the context.
        """

    def extend(self, rows: Sequence[tuple[int, Any]]) -> list[Any]:
        """Evaluate one row for each (id, parent row) in one pass; a parent is the text's last row, a row of the tree,
        or, to evaluate a chain or a tree at once, the index (int) of an earlier item of the same call.
        """

    def keep(self, path: Sequence[Any]) -> None:
        """Append `path` (rows, each the child of the one before, the first a child of the text's last row) to the
        text. Descendants of its last row survive; every other row of the tree is forgotten. An empty path forgets
        nothing.
        """

    def candidates(self, row: Any, sampling: Sampling, n: int) -> list[Candidate]:
        """The n guesses most likely to be drawn at the position after `row`, best first.

        At T = 0 by probability; at T > 0 by noised score, with the noise of (seed, position) that the target will use.
        """

    def room(self) -> int:
        """Rows that can still be evaluated before the context is full."""


@runtime_checkable
class Foresees(Protocol):
    """A drafter that knows some rows without a pass of a model."""

    def pass_rows(self, rows: Sequence[tuple[int, Any]]) -> int:
        """How many rows a model would evaluate if `extend` were called with these; 0: it would take no time."""

    def unread(self, row: Any) -> int:
        """How many rows a model has to evaluate to have read this one, it and those that lead to it; 0: it has."""

    def read(self, row: Any) -> None:
        """Let the model evaluate a row that was made without a pass, and all that lead to it, in one pass."""

    def read_late(self) -> Sequence[Any]:
        """Rows of which more is known since the latest `extend` than when they were made: `candidates` may be asked of
        them again.
        """

    def price(self, pass_s: float, miss_s: float) -> None:
        """What a pass of the model and a wrong guess cost from now on, in s, 0 where that is not known."""
