"""When a draft leaves, so that it is in time for the verifier's next step and takes along all that is ready by then."""

from __future__ import annotations

from itertools import pairwise

import pytest

from edge.cadence import MARGIN_S, Cadence

STEP, TRIP, PASS = 0.060, 0.080, 0.010


def heard(*, delay: float = 0.0) -> Cadence:
    """A draft left at 0; the step that took it began when it arrived plus `delay`, its commit came a step later."""
    cadence = Cadence()
    cadence.step_s, cadence.cost.first_s = STEP, PASS
    cadence.sent(1, 0.0)
    cadence.beat(1, TRIP + delay + STEP)
    return cadence


def test_the_round_trip_is_the_least_that_was_heard():
    cadence = heard(delay=0.03)
    assert cadence.round_trip_s == pytest.approx(TRIP + 0.03)
    cadence.sent(2, 1.0)
    cadence.sent(3, 1.05)
    cadence.beat(3, 1.05 + TRIP + STEP)
    assert cadence.round_trip_s == pytest.approx(TRIP)
    cadence.beat(3, 2.0)
    assert cadence.round_trip_s == pytest.approx(TRIP), "a commit that knows of nothing new says nothing of the link"


def test_it_leaves_in_time_for_a_step_and_no_earlier_than_a_pass_before():
    cadence = heard()
    beat = TRIP + STEP
    now = beat + 0.001
    leaves = cadence.departure(now)
    arrives_for = leaves + PASS + MARGIN_S + TRIP
    steps = (arrives_for - beat) / STEP
    assert steps == pytest.approx(round(steps)), "with one more pass it would still reach the beginning of a step"
    assert now - PASS <= leaves <= now + STEP


def test_it_leaves_once_a_step():
    cadence = heard()
    now, departures = 0.2, []
    for seq in range(2, 12):
        now = max(now, cadence.departure(now))
        cadence.sent(seq, now)
        departures.append(now)
        now += 0.001
    gaps = [b - a for a, b in pairwise(departures)]
    assert all(gap == pytest.approx(STEP) for gap in gaps[1:])


def test_before_the_rhythm_is_known_the_first_leaves_at_once_and_the_next_a_step_later():
    cadence = Cadence()
    assert cadence.departure(5.0) == 5.0
    cadence.step_s = STEP
    cadence.sent(1, 5.0)
    assert cadence.departure(5.01) == pytest.approx(5.0 + STEP)


def test_a_pass_is_learned_smoothly():
    cadence = Cadence()
    cadence.passed(1, 0.010)
    cadence.passed(1, 0.020)
    assert 0.010 < cadence.cost.first_s < 0.015
