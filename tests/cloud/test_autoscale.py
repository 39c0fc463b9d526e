"""How many replicas are wanted, on a scripted clock."""

from __future__ import annotations

import pytest

from cloud.autoscale import Autoscale, Load, queue_s

SETTLE_S = 10.0


def autoscale(least: int = 1, most: int = 4) -> Autoscale:
    return Autoscale(least, most, high_s=0.2, low_s=0.05, settle_s=SETTLE_S)


def loads(number: int, queue_s: float, sessions: int = 4) -> list[Load]:
    return [Load(True, sessions, queue_s)] * number


def test_the_queue_is_that_of_the_mean_session():
    assert queue_s([Load(True, 9, 0.1), Load(True, 1, 1.1), Load(True, 0, 50.0)]) == pytest.approx(0.2)
    assert queue_s([]) == queue_s([Load(True)]) == 0.0


def test_a_queue_that_lasts_brings_one_more_each_time_up_to_most():
    scale = autoscale(most=3)
    seen = [scale.look(loads(scale.wanted, 0.5), float(now)) for now in range(60)]
    assert seen.count(1) == SETTLE_S and seen[-1] == 3
    assert sorted(seen) == seen


def test_a_short_rush_changes_nothing():
    scale = autoscale()
    for now in range(100):
        rush = now % 10 < 8
        assert scale.look(loads(1, 0.5 if rush else 0.1), float(now)) == 1


def test_between_the_bounds_nothing_changes_and_below_it_shrinks_down_to_least():
    scale = autoscale(least=2)
    scale.wanted = 4
    assert {scale.look(loads(4, 0.1), float(now)) for now in range(50)} == {4}
    seen = [scale.look(loads(scale.wanted, 0.01), 50.0 + now) for now in range(60)]
    assert seen[-1] == 2 and seen.count(3) == pytest.approx(SETTLE_S, abs=1)


def test_nothing_is_concluded_before_the_new_one_serves():
    scale = autoscale()
    for now in range(12):
        scale.look(loads(1, 0.5), float(now))
    assert scale.wanted == 2
    for now in range(12, 100):
        assert scale.look(loads(1, 0.5), float(now)) == 2, "the second one is still loading"
    assert [scale.look(loads(2, 0.5), 100.0 + now) for now in range(12)][-1] == 3
