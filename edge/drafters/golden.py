"""Guesses that a drafter made where it was exported, so that a board can tell whether it computes as it should.

Another processor adds in another order, and where two tokens are nearly as likely it may prefer the other one. So each
guess is made behind the same text everywhere, and only those are compared of which the drafter was sure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edge.drafters.base import Candidate, Drafter
from edge.drafters.manifest import Golden
from protocol.errors import ModelError
from protocol.sampling import Sampling

GUESSES = 16
SURE = 2.0  # times as likely as the next: logits that differ by 0.7, far more than rounding ever makes


def record(drafter: Drafter, prompt: Sequence[int]) -> Golden:
    """The drafter's own text behind `prompt`, and the places in it where it was sure. Raises as `Drafter.prefill`."""
    ids, sure = [], []
    row = drafter.prefill(prompt)
    for place in range(GUESSES):
        best, second = drafter.candidates(row, Sampling(), 2)
        ids.append(best.id)
        if best.probability >= SURE * second.probability:
            sure.append(place)
        (row,) = drafter.extend([(best.id, row)])
    return Golden(tuple(prompt), tuple(ids), tuple(sure))


def check(drafter: Drafter, golden: Golden, where: str) -> None:
    """Raises ModelError for a drafter that guesses otherwise; where: its directory."""
    if places := wrong(drafter, golden):
        raise ModelError(
            f"{len(places)} of the {len(golden.sure)} guesses in the manifest are others here",
            where=where,
            remedy="This board's ONNX Runtime computes it wrongly: install another version of it, or export again",
        )


def wrong(drafter: Drafter, golden: Golden) -> list[int]:
    """The sure places where this drafter guesses otherwise. Raises as `Drafter.prefill`."""
    best = list(_guesses(drafter, golden))
    return [place for place in golden.sure if best[place].id != golden.ids[place]]


def _guesses(drafter: Drafter, golden: Golden) -> Iterator[Candidate]:
    row = drafter.prefill(golden.prompt)
    for id in golden.ids:
        yield drafter.candidates(row, Sampling(), 1)[0]
        (row,) = drafter.extend([(id, row)])
