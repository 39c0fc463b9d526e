"""The guard: drafts that lose are cut, and come back slowly once they do not."""

from __future__ import annotations

from itertools import pairwise

from cloud.goodput import ENOUGH, Goodput


def run(guard: Goodput, steps: int, *, accepted: float, row_s: float, most: int = 64) -> list[float]:
    """Steps of 32 roots in 60 ms, and as many draft rows as the guard leaves of `most`, at row_s each."""
    shares = []
    for _ in range(steps):
        drafts = int(most * guard.share)
        if drafts:
            guard.learn(32 + round(accepted * drafts), 0.06 + row_s * drafts, 32, 0.06)
        guard.step()
        shares.append(guard.share)
    return shares


def test_drafts_that_pay_are_left_alone():
    assert set(run(Goodput(), 100, accepted=0.8, row_s=0.0005)) == {1.0}


def test_drafts_that_lose_are_cut_at_once():
    shares = run(Goodput(), ENOUGH + 20, accepted=0.1, row_s=0.003)
    assert shares[ENOUGH - 2] == 1.0 and shares[-1] < 0.2


def test_losing_drafts_cost_next_to_nothing_in_the_long_run():
    guard = Goodput()
    run(guard, 60, accepted=0.1, row_s=0.003)
    tokens = seconds = 0.0
    for _ in range(2000):
        drafts = int(64 * guard.share)
        got, took = 32 + round(0.1 * drafts), 0.06 + 0.003 * drafts
        if drafts:
            guard.learn(got, took, 32, 0.06)
        guard.step()
        tokens, seconds = tokens + got, seconds + took
    assert tokens / seconds > 0.995 * 32 / 0.06


def test_they_come_back_slowly_when_they_pay_again():
    guard = Goodput()
    run(guard, 60, accepted=0.1, row_s=0.003)
    shares = run(guard, 400, accepted=0.8, row_s=0.0005)
    assert shares[-1] == 1.0
    assert all(later - earlier <= 0.021 for earlier, later in pairwise(shares) if later > 0.06)


def test_a_few_bad_steps_are_no_verdict():
    guard = Goodput()
    run(guard, ENOUGH - 1, accepted=0.0, row_s=0.003)
    assert guard.share == 1.0
