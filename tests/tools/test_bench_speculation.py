"""The guesses that the speculation benchmark plays: what was recorded, and the same mended to an acceptance."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tools import traces
from tools.bench.verifier_speculation import chains_of, first_guesses, mended_guesses
from tools.traces import Trace


def trace(guesses: list[int]) -> Trace:
    """A text of zeros and what was proposed for it."""
    n = len(guesses)
    return Trace("say", (0,) * n, tuple((guess, 9) for guess in guesses), ((0.6, 0.2),) * n, (0.5,) * n)


def test_wrong_guesses_are_mended_evenly_up_to_the_acceptance() -> None:
    recorded = trace([0, 1, 0, 1, 0, 1, 0, 1])
    assert first_guesses(recorded) == [0, 1, 0, 1, 0, 1, 0, 1]
    assert mended_guesses(recorded, 0.75) == [0, 0, 0, 1, 0, 0, 0, 1]
    assert mended_guesses(recorded, 1.0) == [0] * 8


def test_a_drafter_that_is_better_than_asked_for_is_left_alone() -> None:
    assert mended_guesses(trace([0, 0, 0, 1]), 0.5) == [0, 0, 0, 1]


def test_behind_a_wrong_guess_all_are_wrong() -> None:
    recorded = trace([0, 0, 7, 0, 0, 0])
    guess = chains_of([recorded], first_guesses, 4)
    assert guess(recorded.target, 0) == [0, 0, 7, 1]
    assert guess(recorded.target, 3) == [0, 0, 0], "a chain ends with the text"


def test_the_shipped_record_is_about_as_good_as_a_drafter_of_the_same_model() -> None:
    recorded = traces.load(traces.RECORDED_SMOLLM2)
    assert len(recorded) == 16
    acceptances = [trace.acceptance for trace in recorded]
    assert min(acceptances) > 0.6 and 0.75 < sum(acceptances) / len(acceptances) < 0.82
