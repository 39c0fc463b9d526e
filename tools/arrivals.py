"""What an application sees of a text: deliveries, each a time in s and how many tokens it brought."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Arrivals = Sequence[tuple[float, int]]


def gaps_ms(arrivals: Arrivals) -> list[float]:
    """Time between tokens: the wait for each delivery, shared among the tokens that it brought."""
    gaps: list[float] = []
    for (earlier, _), (later, tokens) in pairwise(arrivals):
        gaps += [(later - earlier) * 1e3 / tokens] * tokens
    return gaps


def mean_gap_ms(arrivals: Arrivals) -> float:
    """From the first delivery to the last, over the tokens behind the first; 0 where all came at once."""
    (first_at, _), (last_at, _) = arrivals[0], arrivals[-1]
    later = sum(tokens for _, tokens in arrivals[1:])
    return (last_at - first_at) * 1e3 / later if later else 0.0


def p95(values: Sequence[float]) -> float:
    """0 where there is none."""
    return sorted(values)[int(0.95 * (len(values) - 1))] if values else 0.0
