"""What the next step should hold: root rows of due sessions first, then prefill chunks, then draft rows. A part of the
step is kept for prefill where there is any, so that a full house does not starve who comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cloud.engines.base import Plan, Work
from cloud.ledger import Ledger
from protocol.tree import Node

PREFILL_PART = 4  # a fourth of the step


@dataclass(frozen=True, slots=True)
class Scheduler:
    """The plain policy. rows: most rows of one step; prefill_chunk: most rows of one session's prefill in a step."""

    rows: int = 64
    prefill_chunk: int = 64

    def plan(self, ledgers: Iterable[Ledger], pending: Callable[[int], int], now: float) -> Plan:
        """pending: ids of a session's text that the engine has not evaluated. Longest waiting sessions come first."""
        due: list[Ledger] = []
        prefills: list[tuple[Ledger, int]] = []
        for ledger in sorted(ledgers, key=lambda ledger: ledger.idle_since):
            is_due = ledger.may_run() and ledger.due_at() <= now
            left = pending(ledger.key)
            if left == 1:
                if is_due:
                    due.append(ledger)
            elif not ledger.finish:
                # The root row draws a token, so it is left out where the session's patience is not over.
                prefills.append((ledger, left if is_due else left - 1))
        wanted = sum(min(left, self.prefill_chunk) for _, left in prefills)
        roots = due[: max(1, self.rows - min(wanted, self.rows // PREFILL_PART))]
        budget = self.rows - len(roots)
        work: list[Work] = []
        for ledger, left in prefills:
            rows = min(left, self.prefill_chunk, budget)
            if rows:
                work.append(Work(ledger.key, rows))
                budget -= rows
        shares = self._share(roots, budget)
        work.extend(rows_of(ledger, share) for ledger, share in zip(roots, shares, strict=True))
        return Plan(work)

    def draft_rows(self, sessions: int) -> int:
        """Draft rows that a step has for each of so many sessions, roots paid for."""
        return max(0, self.rows // max(1, sessions) - 1)

    @staticmethod
    def _share(roots: list[Ledger], budget: int) -> list[int]:
        """Draft rows for each root, one at a time round the sessions until the budget or the guesses run out."""
        wishes = [len(ledger.draft_rows(budget)) for ledger in roots]
        shares = [0] * len(roots)
        while budget:
            hungry = [i for i, wish in enumerate(wishes) if shares[i] < wish][:budget]
            if not hungry:
                break
            for i in hungry:
                shares[i] += 1
            budget -= len(hungry)
        return shares


def rows_of(ledger: Ledger, most: int) -> Work:
    """A root row with up to `most` draft rows behind it."""
    nodes = ledger.draft_rows(most)
    index: dict[Node | None, int] = {node: i for i, node in enumerate(nodes)}
    return Work(ledger.key, 1, [node.id for node in nodes], [index.get(node.parent, -1) for node in nodes])
