"""What the next step should hold: who is due, a part for who comes in, and the guesses that are worth a row.

Each due session's root row comes first: it always yields a token. Draft rows follow, the likeliest first, as far as
they raise the tokens that the step commits a second. With E the tokens expected of the rows taken so far and T the
step's time, `m` further rows of chances p raise E / T just where

    (E + sum p) / T(n + m) > E / T(n),   that is   sum p / (T(n + m) - T(n)) > E / T(n):

their expected commits a second must beat the step's average so far. Rows within the knee of T are free and any chance
is worth one; where T is proportional to the rows, a draft row costs as much as the root row that is sure of its token,
and hardly any chance is worth one. Chances fall from row to row but T may rise in stairs, so the best n is the one of
the greatest E / T over all n, not the first at which it falls.

Tenants share by weight. Each is owed its part of the tokens a second that its sessions would get alone (generalised
processor sharing). Where a step made as above gives one less, the step is made anew: it takes no longer than every
tenant's part allows, and holds the rows of each tenant's step alone, in turns (deficit round robin).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from math import inf

from cloud.cost import EDGES, StepCost
from cloud.engines.base import Plan, Work
from cloud.fairness import shares
from cloud.ledger import Ledger
from cloud.tenants import Tenants
from protocol.tree import Node

PREFILL_PART = 4  # a fourth of the step
PREFILL_STRETCH = 0.5  # of the time of a step's other rows
CAUTION = 1.15  # draft rows must earn a little more than they are thought to cost
SURE = 0.98  # no chance is taken to be better
LEAST = 0.01  # a chance below is not worth a row even where it is free: nobody knows costs so exactly
RESERVE = 1.2  # of its part is what a tenant is given, where there is so much: forecasts err
UNEVEN = 1.1  # tenants that get as much of their parts as each other are left alone
LOOKAHEAD = 64  # rows past the best so far in which a better one is looked for


@dataclass(frozen=True, slots=True)
class Step(Plan):
    """A plan and what it rests on. roots, drafts: rows that draw tokens; prefill: the others; context: the lengths of
    the roots' texts, summed; price: the chance that a draft row needed to be worth it, 0 where all were; due: root
    rows that there would have been if all had fitted; shared: it holds what each tenant's part has room for.
    """

    roots: int = 0
    drafts: int = 0
    prefill: int = 0
    context: int = 0
    price: float = 0.0
    due: int = 0
    shared: bool = False


@dataclass(slots=True)
class Choice:
    """The draft rows for some roots: `order`, the likeliest first, each as (index of its root, node); tokens: that are
    expected of each root with them; price: see `Step`.
    """

    order: list[tuple[int, Node]]
    tokens: list[float]
    price: float

    def by_root(self) -> list[list[Node]]:
        """Parents first."""
        nodes: list[list[Node]] = [[] for _ in self.tokens]
        for i, node in self.order:
            nodes[i].append(node)
        return nodes


@dataclass(frozen=True, slots=True)
class Scheduler:
    """rows: most rows of one step; prefill_chunk: most rows of one session's prefill in a step; step_s: a step is kept
    below so many seconds as far as its rows decide that, inf for no such bound.
    """

    rows: int = 512
    prefill_chunk: int = 64
    step_s: float = inf

    def plan(
        self,
        ledgers: Iterable[Ledger],
        pending: Callable[[int], int],
        now: float,
        cost: StepCost,
        *,
        tenants: Tenants | None = None,
        crowded: bool = False,
    ) -> Step:
        """ledgers: that have room in the KV cache; pending: ids of a session's text that the engine has not evaluated;
        crowded: whether sessions are held as long as their tenant's contract allows.
        """
        tenants = tenants or Tenants()
        due: list[Ledger] = []
        prefills: list[tuple[Ledger, int, bool]] = []
        for ledger in ledgers:
            if tenants[ledger.tenant].ready_at() > now:
                continue
            is_due = ledger.may_run() and ledger.due_at(crowded) <= now
            left = pending(ledger.key)
            if left == 1:
                if is_due:
                    due.append(ledger)
            elif not ledger.finish:
                # The root row draws a token, so it is left out where the session's patience is not over.
                prefills.append((ledger, left if is_due else left - 1, is_due))
        limit = fitting(cost, self.step_s, self.rows) if self.step_s < inf else self.rows
        wanted = sum(min(left, self.prefill_chunk) for _, left, _ in prefills)
        most = max(1, limit - min(wanted, limit // PREFILL_PART))
        roots = _first_in_turn(due, most, tenants)
        context = sum(ledger.frontier for ledger in roots)
        room = limit - len(roots)
        if prefills and roots:
            room = min(room, self._prefill_room(cost, len(roots), context))
        work, drawing = self._prefill(prefills, room, tenants)
        prefill = sum(one.rows for one in work) - drawing
        budget = limit - len(roots) - prefill - drawing
        freely = choice = choose(roots, budget, cost, context, prefill, drawing)
        if len({ledger.tenant for ledger in roots}) > 1:
            roots, choice = share_out(roots, choice, budget, cost, prefill, drawing, tenants)
            context = sum(ledger.frontier for ledger in roots)
        order = _guarded(roots, choice.order, tenants)
        chosen = Choice(order, choice.tokens, 0.0).by_root()
        work.extend(rows_of(ledger, nodes) for ledger, nodes in zip(roots, chosen, strict=True))
        return Step(
            work,
            roots=len(roots) + drawing,
            drafts=len(order),
            prefill=prefill,
            context=context,
            price=choice.price,
            due=len(due) + drawing,
            shared=choice is not freely,
        )

    def _prefill(self, prefills: list[tuple[Ledger, int, bool]], room: int, tenants: Tenants) -> tuple[list[Work], int]:
        """Chunks of at most `room` rows, of those that came first among each tenant's; and how many draw a token."""
        work: list[Work] = []
        drawing = 0
        wanted: dict[str, int] = {}
        for ledger, left, _ in prefills:
            wanted[ledger.tenant] = wanted.get(ledger.tenant, 0) + min(left, self.prefill_chunk)
        granted = tenants.prefill_turns.grant(wanted, tenants.weights(wanted), max(0, room))
        for ledger, left, is_due in sorted(prefills, key=lambda one: one[0].idle_since):
            rows = min(left, self.prefill_chunk, granted[ledger.tenant])
            if rows > 0:
                work.append(Work(ledger.key, rows))
                granted[ledger.tenant] -= rows
                drawing += is_due and rows == left
        return work, drawing

    def _prefill_room(self, cost: StepCost, roots: int, context: int) -> int:
        """Prefill rows beside so many roots: a chunk at least, more as long as nobody waits much longer for them, but
        never more than twice what was ever tried.
        """
        tried = max(self.prefill_chunk, 2 * cost.most_prefill)
        if not cost.per_prefill_row:
            return min(tried, self.rows)
        quick = int(min(self.rows, PREFILL_STRETCH * cost.seconds(roots, context) / cost.per_prefill_row))
        return min(max(self.prefill_chunk, quick), tried)


def choose(
    roots: Sequence[Ledger], budget: int, cost: StepCost, context: int, prefill: int = 0, drawing: int = 0
) -> Choice:
    """At most `budget` draft rows for `roots`, beside rows of prefill of which `drawing` draw a token, too."""
    tokens = [1.0] * len(roots)
    base = len(roots) + drawing
    plain_s = cost.seconds(base, context, prefill)
    if not (roots and plain_s):
        return Choice([], tokens, 0.0)

    def rate(expected: float, drafts: int) -> float:
        seconds = plain_s + CAUTION * (cost.seconds(base + drafts, context, prefill) - plain_s)
        return expected / seconds

    best_rate = rate(base, 0)
    if all(rate(base + SURE * more, more) <= best_rate for more in _sizes(base, budget)):
        return Choice([], tokens, 1.0)
    candidates = [
        (-chance, i, j, node)
        for i, ledger in enumerate(roots)
        for j, (chance, node) in enumerate(ledger.guesses_behind(ledger.tree.root))
    ]
    heapify(candidates)
    order = len(candidates)
    taken: list[tuple[float, int, Node]] = []
    expected, best = float(base), 0
    while candidates and len(taken) < budget and len(taken) < best + LOOKAHEAD:
        negative, i, _, node = heappop(candidates)
        path = -negative
        if path < LEAST:
            break
        taken.append((path, i, node))
        expected += path
        reached = rate(expected, len(taken))
        if reached > best_rate:
            best_rate, best = reached, len(taken)
        for chance, child in roots[i].guesses_behind(node):
            heappush(candidates, (-path * chance, i, order, child))
            order += 1
    for path, i, _ in taken[:best]:
        tokens[i] += path
    left_out = [path for path, _, _ in taken[best : best + 1]] or [-entry[0] for entry in candidates[:1]]
    return Choice([(i, node) for _, i, node in taken[:best]], tokens, left_out[0] if left_out else 0.0)


def share_out(
    roots: list[Ledger],
    choice: Choice,
    budget: int,
    cost: StepCost,
    prefill: int,
    drawing: int,
    tenants: Tenants,
) -> tuple[list[Ledger], Choice]:
    """`roots` and `choice` if every tenant gets what it is owed by them, else those of a step that gives it."""
    own: dict[str, list[Ledger]] = {}
    tokens: dict[str, float] = {}
    for ledger, expected in zip(roots, choice.tokens, strict=True):
        own.setdefault(ledger.tenant, []).append(ledger)
        tokens[ledger.tenant] = tokens.get(ledger.tenant, 0.0) + expected
    weights = tenants.weights(own)
    context = sum(ledger.frontier for ledger in roots)
    step_s = cost.seconds(len(roots) + drawing + len(choice.order), context, prefill)
    alone: dict[str, Choice] = {}
    least_s: dict[str, float] = {}  # of a step that gives the tenant just its part
    given: dict[str, float] = {}  # of that part
    for name, share in shares(weights).items():
        part = min(share * RESERVE, 1 - (1 - share) / RESERVE)
        mine = sum(ledger.frontier for ledger in own[name])
        alone[name] = best = choose(own[name], budget, cost, mine)
        # A step that is smaller than any that was seen is not thought to be quicker.
        alone_s = cost.seconds(max(cost.fewest, len(own[name]) + len(best.order)), mine)
        if not alone_s:
            return roots, choice
        least_s[name] = alone_s / part
        given[name] = tokens[name] / step_s / (part * sum(best.tokens) / alone_s)
    low = min(given.values())
    if low >= 1.0 or max(given.values()) < UNEVEN * low:
        return roots, choice
    rows = max(len(own), fitting(cost, min(least_s.values()), len(roots) + budget, context, prefill) - drawing)
    wanted = {name: len(own[name]) + len(alone[name].order) for name in own}
    granted = tenants.turns.grant(wanted, weights, rows)
    kept: list[Ledger] = []
    order: list[tuple[int, Node]] = []
    tokens_of: list[float] = []
    for name, ledgers in own.items():
        first = nsmallest(granted[name], ledgers, key=_waiting_since)
        at = {ledger.key: len(kept) + i for i, ledger in enumerate(first)}
        if len(first) == len(ledgers):
            drafts = alone[name].order[: granted[name] - len(first)]
            order += [(at[ledgers[i].key], node) for i, node in drafts]
        kept += first
        tokens_of += [1.0] * len(first)
    return kept, Choice(order, tokens_of, max(best.price for best in alone.values()))


def fitting(cost: StepCost, limit_s: float, most: int, context: int = 0, prefill: int = 0) -> int:
    """The most rows, 1 to `most`, of a step of at most `limit_s`."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        if cost.seconds(middle, context, prefill) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def _first_in_turn(due: list[Ledger], most: int, tenants: Tenants) -> list[Ledger]:
    """At most so many of those that are due, the longest waiting of each tenant, tenants in turns."""
    if len(due) <= most:
        return due
    own: dict[str, list[Ledger]] = {}
    for ledger in due:
        own.setdefault(ledger.tenant, []).append(ledger)
    granted = tenants.turns.grant({name: len(own[name]) for name in own}, tenants.weights(own), most)
    return [one for name, ledgers in own.items() for one in nsmallest(granted[name], ledgers, key=_waiting_since)]


def _guarded(roots: Sequence[Ledger], order: list[tuple[int, Node]], tenants: Tenants) -> list[tuple[int, Node]]:
    """The draft rows that each tenant's guard lets pass, the likeliest of them."""
    if all(tenants[ledger.tenant].goodput.share == 1.0 for ledger in roots):
        return order
    left: dict[str, int] = {}
    for i, _ in order:
        left[roots[i].tenant] = left.get(roots[i].tenant, 0) + 1
    left = {name: int(count * tenants[name].goodput.share + 0.5) for name, count in left.items()}
    passed: list[tuple[int, Node]] = []
    for i, node in order:
        if left[roots[i].tenant] > 0:
            left[roots[i].tenant] -= 1
            passed.append((i, node))
    return passed


def _sizes(base: int, budget: int) -> list[int]:
    """Numbers of draft rows at which the price of a row may change."""
    return [*(edge - base for edge in EDGES if base < edge < base + budget), budget]


def _waiting_since(ledger: Ledger) -> float:
    return ledger.idle_since


def rows_of(ledger: Ledger, nodes: Sequence[Node]) -> Work:
    """A root row with draft rows behind it, parents first."""
    index: dict[Node | None, int] = {node: i for i, node in enumerate(nodes)}
    return Work(ledger.key, 1, [node.id for node in nodes], [index.get(node.parent, -1) for node in nodes])
