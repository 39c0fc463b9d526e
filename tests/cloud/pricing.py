"""Engines whose steps take what a formula says, and what a verifier has learned of them."""

from __future__ import annotations

from collections.abc import Callable

from cloud.cost import EDGES, StepCost


def knee(rows: float, *, at: int = 128, floor_s: float = 0.06) -> float:
    """Flat up to a number of rows, in proportion to them beyond."""
    return floor_s * max(1.0, rows / at)


def line(rows: float, *, fixed_s: float = 0.05, row_s: float = 0.005) -> float:
    return fixed_s + row_s * rows


def learned(seconds: Callable[[float], float], most: int = 512, cost: StepCost | None = None) -> StepCost:
    """After some steps of every number of rows up to `most`."""
    cost = cost or StepCost()
    for _ in range(3):
        for rows in EDGES:
            if rows <= most:
                cost.learn(rows, seconds(rows))
    return cost
