"""The engine is measured before anybody is served, in bounded time, and nothing is left behind."""

from __future__ import annotations

import pytest

from cloud.engines.base import Outcome, Plan
from cloud.probe import LENGTH, PROMPT, SESSIONS, SIZES, probe
from tests.cloud.pricing import line
from tests.toys import BLOCK, ToyEngine


class Measured(ToyEngine):
    """Steps that take `line` seconds on a clock of their own."""

    def __init__(self, num_blocks: int = 1 << 20) -> None:
        super().__init__(num_blocks=num_blocks)
        self.now, self.sizes = 0.0, list[int]()

    def step(self, plan: Plan) -> Outcome:
        outcome = super().step(plan)
        rows = sum(work.rows + len(work.draft) for work in plan.work)
        outcome.seconds = line(rows)
        self.now += outcome.seconds
        self.sizes.append(rows)
        return outcome


def test_steps_of_several_sizes_are_measured():
    engine = Measured()
    cost = probe(engine, 60.0, draft_rows=48, clock=lambda: engine.now)
    assert set(SIZES) <= set(engine.sizes)
    assert cost.per_prefill_row == pytest.approx(0.005, rel=0.2)
    for rows in SIZES:
        assert cost.seconds(rows) == pytest.approx(line(rows), rel=0.05)
    assert not engine.sessions


def test_no_step_begins_after_the_time_is_up():
    engine = Measured()
    probe(engine, 0.5, draft_rows=48, clock=lambda: engine.now)
    assert 0.4 < engine.now - line(SESSIONS * PROMPT) < 0.5 + line(max(SIZES))
    skipped = Measured()
    assert probe(skipped, 0.0, draft_rows=48, clock=lambda: skipped.now).seconds(1) == 0.0
    assert not skipped.sizes


def test_an_engine_with_room_for_one_is_measured_as_far_as_it_goes():
    engine = Measured(LENGTH // BLOCK)
    cost = probe(engine, 60.0, draft_rows=48, clock=lambda: engine.now)
    assert cost.seconds(8) > 0
    assert not engine.sessions
