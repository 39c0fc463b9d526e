"""What a drafter's probabilities turn out to be worth."""

from __future__ import annotations

import random

import pytest

from edge.calibration import Calibration
from edge.drafters.base import Candidate


def candidates(*probabilities: float) -> list[Candidate]:
    return [Candidate(id, p) for id, p in enumerate(probabilities)]


def teach(calibration: Calibration, ranked: list[Candidate], rate: float, sibling: float, times: int = 300) -> None:
    rng = random.Random(1)
    for _ in range(times):
        draw = rng.random()
        id = 0 if draw < rate else 1 if draw < rate + sibling else 99
        calibration.saw(ranked, rng.randint(1, 6), id)


def test_before_anything_was_seen_the_more_likely_guess_is_worth_more():
    calibration = Calibration()
    worth = [calibration.first(p, 1) for p in (0.1, 0.4, 0.7, 0.95, 0.999)]
    assert worth == sorted(worth) and worth[0] > 0.1 and worth[-1] < 1
    assert calibration.sibling(0.3) < calibration.first(0.3, 1)


def test_it_learns_that_a_drafter_is_surer_than_it_should_be():
    calibration = Calibration()
    teach(calibration, candidates(0.9, 0.1), rate=0.4, sibling=0.05)
    assert calibration.first(0.9, 3) == pytest.approx(0.4, abs=0.08)
    assert calibration.sibling(0.1) == pytest.approx(0.05, abs=0.04)
    assert calibration.first(0.3, 3) < 0.5, "what was not seen keeps its prior"


def test_it_learns_that_a_modest_drafter_is_right_more_often():
    calibration = Calibration()
    teach(calibration, candidates(0.5, 0.28), rate=0.8, sibling=0.15)
    assert calibration.first(0.55, 2) == pytest.approx(0.8, abs=0.08)
    assert calibration.sibling(0.25) == pytest.approx(0.15, abs=0.05)


def test_a_guess_that_fails_deep_behind_the_text_costs_nothing_near_it():
    calibration = Calibration()
    for i in range(400):
        calibration.saw(candidates(0.7), 1, 0 if i % 10 else 99)
        calibration.saw(candidates(0.7), 12, 0 if i % 2 else 99)
    assert calibration.first(0.7, 1) > 1.2 * calibration.first(0.7, 12)


def test_it_follows_a_drafter_that_changes():
    calibration = Calibration()
    teach(calibration, candidates(0.8), rate=0.9, sibling=0.0, times=2000)
    teach(calibration, candidates(0.8), rate=0.3, sibling=0.0, times=800)
    assert calibration.first(0.8, 2) < 0.5
