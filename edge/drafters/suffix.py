"""A drafter without a model: it guesses what was written before, for boards too small for more.

It needs the tokenizer alone, and never makes a pass. At T > 0 it guesses the same, since there are no logits to which
the noise of a position could be added: what the target draws there is then less often what was written before, and the
probabilities say so as the text shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge.drafters import manifest
from edge.drafters.automaton import Match
from edge.drafters.base import Candidate, DrafterInfo
from edge.drafters.recall import Recall, RecallOdds
from protocol.errors import ModelError
from protocol.sampling import Sampling

LEAST = 0.01  # of the guess where nothing is known: a verifier that waits must hear something


@dataclass(slots=True, eq=False)
class Row:
    """A token of the text or a guess. match: what of the end of the text with it occurred before."""

    id: int
    position: int
    match: Match


class SuffixDrafter:
    """A `Drafter` and `Foresees`: every row is known without a pass. Used by one thread at a time."""

    info: DrafterInfo

    @classmethod
    def load(cls, directory: str | Path, context: int | None = None) -> SuffixDrafter:
        """For the tokenizer of an exported drafter's directory, whatever its runtime; no weights are loaded.

        context: tokens of a text, at most the model's own. Raises ModelError for a directory that cannot be used.
        """
        facts = manifest.read(Path(directory), "drafter")
        return cls(
            DrafterInfo(
                name=f"suffixes, for {facts.name}",
                vocab_size=facts.vocab_size,
                context=min(context or facts.context, facts.context),
                tokenizer_digest=facts.tokenizer_digest,
                weights_digest="",
                compute="none",
                provider="none",
            )
        )

    def __init__(self, info: DrafterInfo, odds: RecallOdds | None = None) -> None:
        self.info = info
        self._recall = Recall(odds)

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> Row:
        """Make `ids` the text. See `Drafter.prefill`."""
        if not ids:
            raise ModelError("an empty text cannot be evaluated", where=self.info.name, remedy="give a prompt")
        if len(ids) > self.info.context:
            raise ModelError(
                f"{len(ids)} tokens do not fit the context of {self.info.context}",
                where=self.info.name,
                remedy="shorten the prompt, or load the drafter with a larger context",
            )
        self._recall.become(ids)
        if progress:
            progress(len(ids), len(ids))
        return Row(ids[-1], len(ids) - 1, self._recall.end())

    def extend(self, rows: Sequence[tuple[int, Row | int]]) -> list[Row]:
        """See `Drafter.extend`."""
        made: list[Row] = []
        for id, parent in rows:
            above = made[parent] if isinstance(parent, int) else parent
            made.append(Row(id, above.position + 1, self._recall.step(above.match, id)))
        return made

    def pass_rows(self, rows: Sequence[tuple[int, Row | int]]) -> int:
        return 0

    def unread(self, row: Row) -> int:
        return 0

    def read(self, row: Row) -> None:
        pass

    def read_late(self) -> Sequence[Row]:
        return ()

    def price(self, pass_s: float, miss_s: float) -> None:
        pass

    def keep(self, path: Sequence[Row]) -> None:
        """See `Drafter.keep`."""
        self._recall.read([row.id for row in path])
        if path:
            path[-1].match = self._recall.end()

    def candidates(self, row: Row, sampling: Sampling, n: int) -> list[Candidate]:
        """At most n guesses, the likeliest first; where nothing is known the row's own token again."""
        return self._recall.candidates(row.match, n) or [Candidate(row.id, LEAST)]

    def room(self) -> int:
        return self.info.context - len(self._recall.text)
