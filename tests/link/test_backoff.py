"""Pauses between attempts: quick at first, bounded, spread out, and quick again only after a success."""

from __future__ import annotations

from link.backoff import Backoff


def test_the_first_two_attempts_are_within_a_second_and_a_half() -> None:
    for seed in range(50):
        backoff = Backoff(30.0, seed)
        assert 0.25 <= backoff.pause_s(0.0) <= 0.5
        assert 0.5 <= backoff.pause_s(0.0) <= 1.0


def test_pauses_grow_to_the_ceiling_and_no_further() -> None:
    backoff = Backoff(30.0, seed=1)
    pauses = [backoff.pause_s(0.0) for _ in range(20)]
    assert max(pauses) <= 30.0
    assert all(pause >= 15.0 for pause in pauses[7:])


def test_an_outage_of_a_minute_costs_a_second_more() -> None:
    for seed in range(50):
        backoff, waited_s = Backoff(30.0, seed, quick_for_s=60.0), 0.0
        while waited_s < 60.0:
            pause_s = backoff.pause_s(0.0)
            assert pause_s <= 1.0
            waited_s += pause_s
        assert max(backoff.pause_s(0.0) for _ in range(10)) > 15.0


def test_a_second_outage_soon_after_the_first_costs_no_more() -> None:
    for seed in range(50):
        backoff = Backoff(30.0, seed, quick_for_s=60.0)
        for came_up_for_s in (0.5, 3.0, 1.0):
            waited_s = backoff.pause_s(came_up_for_s)
            while waited_s < 59.0:
                pause_s = backoff.pause_s(0.0)
                assert pause_s <= 1.0
                waited_s += pause_s


def test_connections_that_end_at_once_are_not_hammered() -> None:
    backoff = Backoff(30.0, seed=1, quick_for_s=60.0)
    pauses = [backoff.pause_s(0.5) for _ in range(10)]
    assert max(pauses[:4]) <= 1.0, "a broker that dies twice within seconds is no reason"
    assert pauses[-1] > 15.0 and backoff.pause_s(0.0) > 15.0


def test_a_fleet_does_not_come_back_at_once() -> None:
    pauses = sorted(Backoff(30.0).pause_s(0.0) for _ in range(200))
    assert pauses[-20] - pauses[20] > 0.1


def test_only_a_connection_that_lasted_makes_it_quick_again() -> None:
    backoff = Backoff(30.0, seed=1)
    for _ in range(8):
        backoff.pause_s(0.0)
    assert backoff.pause_s(1.0) > 10.0
    assert backoff.pause_s(60.0) <= 0.5
