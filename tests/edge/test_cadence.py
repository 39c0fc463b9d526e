"""When a draft leaves, so that it is in time for the verifier's next step and takes along all that is ready by then."""

from __future__ import annotations

from math import inf

import pytest

from edge.cadence import MARGIN_S, Cadence

STEP, TRIP = 0.060, 0.080
BEAT = 1.0  # a commit came then: steps begin, as the board must count them, at BEAT - TRIP + k * STEP


def heard(*, waited: float = 0.0) -> Cadence:
    """A draft was on its way for TRIP in both directions, waited for a step and was certified in one."""
    cadence = Cadence()
    cadence.step_s = STEP
    cadence.sent(1, BEAT - TRIP - waited - STEP)
    cadence.beat(1, round(1000 * (waited + STEP)), BEAT)
    return cadence


@pytest.mark.parametrize("waited", [0.0, 0.013, 0.055])
def test_the_round_trip_is_what_the_verifier_does_not_account_for(waited):
    assert heard(waited=waited).round_trip_s == pytest.approx(TRIP, abs=0.0006)


def test_a_commit_that_knows_of_nothing_new_or_lost_the_latest_says_nothing_of_the_link():
    cadence = heard()
    cadence.beat(1, None, BEAT + 9)
    cadence.sent(2, BEAT + 9.1)
    cadence.sent(3, BEAT + 9.2)
    cadence.beat(4, 60, BEAT + 10)
    assert cadence.round_trip_s == pytest.approx(TRIP)


def test_one_odd_trip_does_not_move_the_rhythm():
    cadence = heard()
    for seq in range(2, 6):
        at = BEAT + seq
        cadence.sent(seq, at)
        cadence.beat(seq, 60, at + STEP + (0.5 if seq == 3 else TRIP))
    assert cadence.round_trip_s == pytest.approx(TRIP)


def test_while_another_pass_ends_in_time_guesses_stay_and_else_they_leave():
    cadence = heard()
    latest = BEAT - TRIP + 2 * STEP
    now = latest - 0.020
    assert cadence.departure(now, pass_s=0.020 - MARGIN_S - 0.001) == inf
    assert cadence.departure(now, pass_s=0.020 - MARGIN_S + 0.001) == now


def test_an_idle_board_waits_for_the_last_safe_moment():
    cadence = heard()
    latest = BEAT - TRIP + 2 * STEP
    assert cadence.departure(latest - 0.030, pass_s=0.0) == pytest.approx(latest - MARGIN_S)


def test_what_is_made_just_before_a_step_leaves_too_and_after_it_waits_for_the_next():
    cadence = heard()
    latest = BEAT - TRIP + 2 * STEP
    assert cadence.departure(latest - MARGIN_S / 2, pass_s=0.001) == latest - MARGIN_S / 2
    assert cadence.departure(latest + 0.001, pass_s=0.010) == inf


def test_before_the_rhythm_is_known_the_first_leaves_at_once_and_the_next_a_step_later():
    cadence = Cadence()
    assert cadence.departure(5.0, 0.0) == 5.0
    cadence.step_s = STEP
    cadence.sent(1, 5.0)
    assert cadence.departure(5.01, 0.0) == pytest.approx(5.0 + STEP)
