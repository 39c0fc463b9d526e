"""What a board learns of its own passes."""

from __future__ import annotations

import pytest

from edge.costs import PassCost


def test_the_price_of_a_row_is_learned_from_passes_of_several():
    cost = PassCost()
    for _ in range(60):
        cost.passed(1, 0.020)
        cost.passed(3, 0.040)
    assert cost.share == pytest.approx(0.5, rel=0.05)
    assert cost.of(1) == pytest.approx(0.020) and cost.of(5) == pytest.approx(0.060, rel=0.05)


def test_it_follows_slowly_and_is_not_fooled_by_one_odd_pass():
    cost = PassCost()
    for _ in range(20):
        cost.passed(1, 0.010)
    cost.passed(1, 0.050)
    assert 0.010 < cost.first_s < 0.020
    cost.passed(2, 0.001)
    assert cost.share >= 0.0


def test_a_first_pass_of_several_rows_is_scaled_down():
    cost = PassCost()
    cost.passed(5, 0.100)
    assert cost.first_s == pytest.approx(0.050)


def test_the_rows_of_a_pass_that_may_take_so_long():
    cost = PassCost()
    cost.share = 0.5
    assert [cost.rows_within(passes) for passes in (1.0, 1.4, 3.0)] == [1, 1, 5]
    assert cost.times(cost.rows_within(3.0)) <= 3.0
    cost.share = 0.0
    assert cost.rows_within(3.0) > 100
