"""How a session's guesses are thought to fare, and what is asked of its board because of it."""

from __future__ import annotations

import random

import pytest

from cloud.acceptance import Rates
from cloud.advice import DWELL, Advice
from protocol.tree import DraftTree, Node

MOST = 48


def siblings(*ids: int) -> dict[int, Node]:
    tree = DraftTree(0, 1, 7)
    for id in ids:
        tree.add(tree.root, id)
    return tree.root.children


def judged(rates: Rates, chance: float, times: int = 300, seed: int = 0) -> Rates:
    rng = random.Random(seed)
    for _ in range(times):
        for depth in range(3):
            rates.judge(depth, siblings(5), 5 if rng.random() < chance else 6)
    return rates


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.95])
def test_what_is_seen_of_a_session_is_believed(chance):
    rates = judged(Rates(Rates(), fade=0.99), chance)
    assert rates.rate(0, 0) == pytest.approx(chance, abs=0.12)
    assert rates.rate(9, 0) == pytest.approx(chance, abs=0.12)


def test_a_new_session_is_thought_to_fare_like_the_others():
    fleet = Rates()
    judged(Rates(fleet, fade=0.97), 0.4)
    assert Rates(fleet, fade=0.97).rate(0, 0) == pytest.approx(0.4, abs=0.08)


def test_siblings_share_what_their_elders_leave():
    rates = Rates()
    for drawn in [1, 2, 1, 9] * 50:
        rates.judge(0, siblings(1, 2, 3), drawn)
    chances = [chance for chance, _ in rates.of_children(0, siblings(1, 2, 3))]
    assert chances == pytest.approx([0.5, 0.25, 0.0], abs=0.06)
    assert sum(chances) <= 1


def test_a_guess_alone_is_another_thing_than_the_first_of_several():
    """A board that adds siblings is unsure."""
    rates = Rates()
    for _ in range(100):
        rates.judge(0, siblings(1), 1)
        rates.judge(0, siblings(1, 2), 2)
    assert rates.of_children(0, siblings(1))[0][0] > 0.9
    assert rates.of_children(0, siblings(1, 2))[0][0] < 0.2


def settle(advice: Advice, rates: Rates, price: float) -> int:
    for _ in range(3 * DWELL):
        rows = advice.update(rates, price, MOST)
    return rows


def test_advice_falls_with_the_price_of_a_row_and_rises_again():
    rates, advice = judged(Rates(), 0.8), Advice()
    free, dear, nothing = (settle(advice, rates, price) for price in (0.0, 0.6, 1.0))
    assert free >= 8 and 1 <= dear <= 3 and nothing == 0
    assert settle(advice, rates, 0.0) == free, "0 is no trap"


def test_a_session_whose_guesses_fail_gets_less():
    good, bad = judged(Rates(), 0.9), judged(Rates(), 0.2)
    assert settle(Advice(), good, 0.1) > 4 * settle(Advice(), bad, 0.1)


def test_where_rows_are_free_even_bad_guesses_are_looked_at():
    assert settle(Advice(), judged(Rates(), 0.1), 0.0) >= 1


def test_a_session_that_was_told_to_stop_is_invited_again_after_a_while():
    """Its guesses were bad, and no more come: what was known of them fades."""
    rates, advice = judged(Rates(Rates(), fade=0.97), 0.05), Advice()
    fleet = rates._prior
    assert fleet is not None
    judged(fleet, 0.8, times=3000)
    assert settle(advice, rates, 0.4) == 0
    commits = 0
    while not advice.update(rates, 0.4, MOST) and commits < 2000:
        rates.age()
        commits += 1
    assert 100 < commits < 1500


def test_advice_does_not_follow_every_wave():
    """A price that wavers by a tenth, and a rate that does by chance, change it seldom: each change costs bytes."""
    rng = random.Random(4)
    rates, advice, changes = judged(Rates(), 0.8), Advice(), 0
    told = advice.update(rates, 0.4, MOST)
    for _ in range(1000):
        rates.judge(0, siblings(5), 5 if rng.random() < 0.8 else 6)
        rows = advice.update(rates, 0.4 * rng.uniform(0.9, 1.1), MOST)
        changes += rows != told
        told = rows
    assert changes <= 5
