"""What a step is thought to cost, on engines of several shapes."""

from __future__ import annotations

import random

import pytest

from cloud.cost import EDGES, StepCost
from tests.cloud.pricing import knee, learned, line


@pytest.mark.parametrize("seconds", [knee, line, lambda rows: 0.03 * -(-rows // 16)], ids=["knee", "line", "tiles"])
def test_engines_of_several_shapes_are_known_after_a_few_steps(seconds):
    cost = learned(seconds)
    for rows in EDGES:
        if rows <= 512:
            assert cost.seconds(rows) == pytest.approx(seconds(rows), rel=0.02)


def test_nothing_is_known_before_the_first_step():
    assert StepCost().seconds(1) == 0.0


def test_rows_that_nobody_has_tried_are_never_free():
    cost = learned(knee, most=64)
    assert cost.seconds(cost.frontier) == pytest.approx(0.06)
    beyond = cost.frontier + 1
    assert cost.seconds(beyond) >= 0.06 * beyond / 64
    assert cost.seconds(500) >= 0.06 * 500 / 64


def test_fewer_rows_than_ever_seen_are_not_thought_to_cost_the_same():
    """Else a verifier that starts with a crowd would never find out that a plain step for few is quick."""
    cost = StepCost()
    for _ in range(4):
        cost.learn(64, 0.06)
    assert cost.seconds(8) < 0.6 * cost.seconds(64)


def test_it_looks_upward_step_by_step():
    cost, before = StepCost(), 1
    for _ in range(60):
        assert cost.frontier <= before * (2 if before <= 8 else 1.5)
        cost.learn(cost.frontier, knee(cost.frontier))
        before = max(before, cost.frontier)
    assert before >= 512, "a flat engine is known within sixty steps"


def test_steps_of_unequal_size_lead_upward_too():
    rng = random.Random(8)
    cost = StepCost()
    for _ in range(200):
        rows = rng.randint(1, cost.frontier)
        cost.learn(rows, knee(rows))
    assert cost.frontier >= 256


def test_a_hiccup_moves_little_and_closes_no_door():
    cost = learned(knee)
    cost.learn(64, 5.0)
    assert cost.seconds(64) < 0.067
    young = learned(knee, most=48)
    young.learn(64, 5.0)  # the very first step of 64 rows
    for _ in range(2):
        assert young.seconds(64) < 0.09
        young.learn(64, 0.06)
    assert young.seconds(64) == pytest.approx(0.06, rel=0.02)


def test_a_machine_that_grows_slower_does_so_at_every_number_of_rows():
    cost = learned(knee)
    for _ in range(150):
        cost.learn(48, 2 * knee(48))
    assert cost.seconds(48) == pytest.approx(0.12, rel=0.05)
    assert cost.seconds(256) == pytest.approx(0.24, rel=0.15), "though only 48 rows were seen since"


def test_more_rows_are_never_thought_quicker():
    rng = random.Random(5)
    cost = StepCost()
    for _ in range(600):
        rows = rng.choice([1, 3, 9, 20, 40, 64, 100, 130, 200])
        cost.learn(rows, knee(rows) * rng.lognormvariate(0, 0.3))
        times = [cost.seconds(rows) for rows in range(1, 300)]
        assert times == sorted(times)


def test_context_has_a_price_of_its_own():
    rng = random.Random(1)
    cost = StepCost()
    for _ in range(2000):
        rows, context = rng.choice([8, 16, 32]), rng.randrange(1_000, 200_000)
        cost.learn(rows, (knee(rows) + 2e-7 * context) * rng.uniform(0.98, 1.02), context)
    assert cost.per_context == pytest.approx(2e-7, rel=0.2)
    assert cost.seconds(16, 100_000) == pytest.approx(0.08, rel=0.05)


def test_short_texts_whose_rows_happen_to_grow_with_them_teach_no_price_of_context():
    rng = random.Random(2)
    cost = StepCost()
    for _ in range(500):
        rows = rng.randint(120, 200)
        cost.learn(rows, knee(rows), context=40 * rows)
    assert cost.per_context < 1e-7


def test_prefill_rows_are_priced_beside_the_others():
    rng = random.Random(3)
    cost = StepCost()
    for _ in range(300):
        rows, prefill = rng.choice([16, 32, 64]), rng.choice([0, 0, 16, 64])
        cost.learn(rows, knee(rows) + 0.0002 * prefill, prefill=prefill)
    assert cost.seconds(32, prefill=100) == pytest.approx(0.08, rel=0.03)
    assert cost.seconds(32) == pytest.approx(0.06, rel=0.02)


def test_steps_that_always_hold_some_prefill_teach_what_rows_cost():
    """A verifier to which somebody comes all the time."""
    rng = random.Random(6)
    cost = StepCost()
    for _ in range(300):
        rows, prefill = rng.choice([32, 64, 128, 192, 256]), rng.randint(40, 80)
        cost.learn(rows, knee(rows) + 0.0002 * prefill, prefill=prefill)
    assert cost.seconds(256) - cost.seconds(128) == pytest.approx(0.06, rel=0.1)


def test_prefill_alone_teaches_nothing():
    cost = StepCost()
    cost.learn(0, 0.1, prefill=64)
    assert cost.seconds(1) == cost.per_prefill_row == 0.0
