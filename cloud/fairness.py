"""Rows for several tenants: deficit round robin (Shreedhar and Varghese 1995), and what each is due of a step."""

from __future__ import annotations

from collections.abc import Mapping


class RoundRobin:
    """Grants rows in turns, as many a turn as a tenant's weight; what is left of a turn is kept for the next."""

    def __init__(self) -> None:
        self._deficit: dict[str, float] = {}
        self._last = ""

    def grant(self, wanted: Mapping[str, int], weights: Mapping[str, float], budget: int) -> dict[str, int]:
        """Rows of each tenant, at most what it wants and in all at most `budget`; those that were served last come
        last, so that over several calls each has its weight's part of what was contended for.
        """
        granted = dict.fromkeys(wanted, 0)
        names = sorted(wanted)
        start = next((i for i, name in enumerate(names) if name > self._last), 0)
        queue = [name for name in names[start:] + names[:start] if wanted[name]]
        if sum(wanted.values()) <= budget:
            self._deficit.clear()
            return dict(wanted)
        heaviest = max(weights[name] for name in queue)
        while budget > 0 and queue:
            name = queue.pop(0)
            credit = self._deficit.get(name, 0.0) + weights[name] / heaviest
            rows = min(int(credit), wanted[name] - granted[name], budget)
            granted[name] += rows
            budget -= rows
            self._deficit[name] = credit - rows
            if rows:
                self._last = name
            if granted[name] < wanted[name]:
                queue.append(name)
            else:
                del self._deficit[name]
        return granted


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Each tenant's part of the whole."""
    whole = sum(weights.values())
    return {name: weight / whole for name, weight in weights.items()}
