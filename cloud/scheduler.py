"""What the next step should hold: who is due, a part for who comes in, and the guesses that are worth a row.

Each due session's root row comes first: it always yields a token. Draft rows follow, the likeliest first, as far as
they raise the tokens that the step commits a second. With E the tokens expected of the rows taken so far and T the
step's time, `m` further rows of chances p raise E / T just where

    (E + sum p) / T(n + m) > E / T(n),   that is   sum p / (T(n + m) - T(n)) > E / T(n):

their expected commits a second must beat the step's average so far. Rows within the knee of T are free and any chance
is worth one; where T is proportional to the rows, a draft row costs as much as the root row that is sure of its token,
and hardly any chance is worth one. Chances fall from row to row but T may rise in stairs, so the best n is the one of
the greatest E / T over all n, not the first at which it falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest

from cloud.cost import EDGES, StepCost
from cloud.engines.base import Plan, Work
from cloud.ledger import Ledger
from protocol.tree import Node

PREFILL_PART = 4  # a fourth of the step
PREFILL_STRETCH = 0.5  # of the time of a step's other rows
CAUTION = 1.15  # draft rows must earn a little more than they are thought to cost
SURE = 0.98  # no chance is taken to be better
LEAST = 0.01  # a chance below is not worth a row even where it is free: nobody knows costs so exactly
LOOKAHEAD = 64  # rows past the best so far in which a better one is looked for


@dataclass(frozen=True, slots=True)
class Step(Plan):
    """A plan and what it rests on. roots, drafts: rows that draw tokens; prefill: the others; context: the lengths of
    the due sessions' texts, summed; price: the chance that a draft row needed to be worth it, 0 where all were.
    """

    roots: int = 0
    drafts: int = 0
    prefill: int = 0
    context: int = 0
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Scheduler:
    """rows: most rows of one step; prefill_chunk: most rows of one session's prefill in a step."""

    rows: int = 512
    prefill_chunk: int = 64

    def plan(
        self,
        ledgers: Iterable[Ledger],
        pending: Callable[[int], int],
        now: float,
        cost: StepCost,
        *,
        share: float = 1.0,
        crowded: bool = False,
    ) -> Step:
        """pending: ids of a session's text that the engine has not evaluated; share: of the draft rows that pay, those
        that are taken; crowded: whether sessions are held as long as their tenant's contract allows.
        """
        due: list[Ledger] = []
        prefills: list[tuple[Ledger, int, bool]] = []
        for ledger in ledgers:
            is_due = ledger.may_run() and ledger.due_at(crowded) <= now
            left = pending(ledger.key)
            if left == 1:
                if is_due:
                    due.append(ledger)
            elif not ledger.finish:
                # The root row draws a token, so it is left out where the session's patience is not over.
                prefills.append((ledger, left if is_due else left - 1, is_due))
        wanted = sum(min(left, self.prefill_chunk) for _, left, _ in prefills)
        most = max(1, self.rows - min(wanted, self.rows // PREFILL_PART))
        roots = due if len(due) <= most else nsmallest(most, due, key=_waiting_since)
        context = sum(ledger.frontier for ledger in roots)
        room = self.rows - len(roots)
        if prefills and roots:
            room = min(room, self._prefill_room(cost, len(roots), context))
        work: list[Work] = []
        prefill = drawing = 0
        for ledger, left, is_due in sorted(prefills, key=lambda one: one[0].idle_since):
            rows = min(left, self.prefill_chunk, room - prefill)
            if rows > 0:
                work.append(Work(ledger.key, rows))
                prefill += rows
                drawing += is_due and rows == left
        prefill -= drawing
        budget = self.rows - len(roots) - prefill - drawing
        chosen, price = self._drafts(roots, budget, cost, context, prefill, drawing, share)
        work.extend(rows_of(ledger, nodes) for ledger, nodes in zip(roots, chosen, strict=True))
        drafts = sum(map(len, chosen))
        return Step(work, len(roots) + drawing, drafts, prefill, context, price)

    def _prefill_room(self, cost: StepCost, roots: int, context: int) -> int:
        """Prefill rows beside so many roots: a chunk at least, more as long as nobody waits much longer for them, but
        never more than twice what was ever tried.
        """
        tried = max(self.prefill_chunk, 2 * cost.most_prefill)
        if not cost.per_prefill_row:
            return min(tried, self.rows)
        quick = int(min(self.rows, PREFILL_STRETCH * cost.seconds(roots, context) / cost.per_prefill_row))
        return min(max(self.prefill_chunk, quick), tried)

    def _drafts(
        self,
        roots: list[Ledger],
        budget: int,
        cost: StepCost,
        context: int,
        prefill: int,
        drawing: int,
        share: float,
    ) -> tuple[list[list[Node]], float]:
        """The draft rows of each root, parents first, and the price: see `Step`."""
        chosen: list[list[Node]] = [[] for _ in roots]
        base = len(roots) + drawing
        plain_s = cost.seconds(base, context, prefill)
        if not (roots and plain_s):
            return chosen, 0.0

        def rate(tokens: float, drafts: int) -> float:
            seconds = plain_s + CAUTION * (cost.seconds(base + drafts, context, prefill) - plain_s)
            return tokens / seconds

        best_rate = rate(base, 0)
        if all(rate(base + SURE * more, more) <= best_rate for more in _sizes(base, budget)):
            return chosen, 1.0
        candidates = [
            (-chance, i, j, node)
            for i, ledger in enumerate(roots)
            for j, (chance, node) in enumerate(ledger.guesses_behind(ledger.tree.root))
        ]
        heapify(candidates)
        order = len(candidates)
        taken: list[tuple[float, int, Node]] = []
        tokens, best = float(base), 0
        while candidates and len(taken) < budget and len(taken) < best + LOOKAHEAD:
            negative, i, _, node = heappop(candidates)
            path = -negative
            if path < LEAST:
                break
            taken.append((path, i, node))
            tokens += path
            reached = rate(tokens, len(taken))
            if reached > best_rate:
                best_rate, best = reached, len(taken)
            for chance, child in roots[i].guesses_behind(node):
                heappush(candidates, (-path * chance, i, order, child))
                order += 1
        if share < 1.0:
            best = int(best * share + 0.5)
        for _, i, node in taken[:best]:
            chosen[i].append(node)
        if best < len(taken):
            return chosen, taken[best][0]
        return chosen, -candidates[0][0] if candidates else 0.0


def _sizes(base: int, budget: int) -> list[int]:
    """Numbers of draft rows at which the price of a row may change."""
    return [*(edge - base for edge in EDGES if base < edge < base + budget), budget]


def _waiting_since(ledger: Ledger) -> float:
    return ledger.idle_since


def rows_of(ledger: Ledger, nodes: Sequence[Node]) -> Work:
    """A root row with draft rows behind it, parents first."""
    index: dict[Node | None, int] = {node: i for i, node in enumerate(nodes)}
    return Work(ledger.key, 1, [node.id for node in nodes], [index.get(node.parent, -1) for node in nodes])
