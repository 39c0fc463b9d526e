"""Which sessions hold KV blocks: who is let in, who has to go, and who comes back when.

A session is resident while blocks are reserved for its text and a whole draft behind it, so that a step never finds
memory short. Where they do not suffice for all:

- sessions that want nothing at the moment go first, the one that has been idle longest before the others; but while
  others keep the engine busy, not before they have been idle for HOLD times as long as evaluating them again will take
  (the break-even rule of ski rental: whoever soon speaks again costs less where it is), and never so many that
  evaluating them again would keep the engine from anything else: an eviction is paid for by WORTH times as long
  without another, but for a burst;
- then those that hold what the engine had kept of an earlier text, but for which nothing is reserved yet;
- then a session may displace one of a tenant that holds more than its own, by weight, and still will;
- at last, sessions take turns: one that waits displaces the one that has worked longest, once that has worked WORTH
  times as long as evaluating its text again will take, so that rebuilding stays a small part of the time.

An evicted session is evaluated again from its ids, and not before it is due.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloud.cost import StepCost
from cloud.engines.base import Engine
from cloud.ledger import Ledger
from cloud.tenants import Tenants

AHEAD = 32  # tokens for which a growing session reserves at once
HOLD = 2.0
WORTH = 8.0
BURST_S = 4.0  # of such pauses, that may be owed
LEAST_TURN = 16  # tokens: before, nobody is displaced by one that only waits for its turn


class Residency:
    """Reservations of blocks by session. evictions: since the start.

    They are kept as lengths of text and counted in blocks when needed, since what a session shares changes meanwhile.
    """

    def __init__(self, engine: Engine, tenants: Tenants) -> None:
        self.evictions = 0
        self._engine, self._tenants = engine, tenants
        self._until: dict[int, int] = {}  # length of the text that blocks are reserved for, by key
        self._waiting: set[int] = set()
        self._owed_until = 0.0  # when the evictions of idle sessions are paid for
        self._free = 0  # blocks that are neither held nor promised, while sessions are admitted

    def is_resident(self, ledger: Ledger) -> bool:
        return ledger.key in self._until

    def waits(self, ledger: Ledger) -> bool:
        """Whether the session found no room in the latest `admit`."""
        return ledger.key in self._waiting

    @property
    def retry_at(self) -> float:
        """Before, no idle session makes room for one that waits."""
        return self._owed_until - BURST_S

    def admit(
        self, ledgers: Sequence[Ledger], now: float, cost: StepCost, crowded: bool
    ) -> tuple[list[Ledger], list[Ledger]]:
        """(the sessions that may be in the next step, those that were evicted for it)."""
        until = self._until
        self._waiting.clear()
        if all(until.get(ledger.key, -1) >= ledger.frontier for ledger in ledgers):
            return list(ledgers), []
        wanting = {ledger.key for ledger in ledgers if self._wants(ledger, now, crowded)}
        evicted: list[Ledger] = []
        self._free = self._count_free()
        grown = [ledger for ledger in ledgers if ledger.key in until and until[ledger.key] < ledger.frontier]
        for ledger in sorted(grown, key=lambda one: one.resident_since):
            if ledger.key in until and ledger.key in wanting:
                self._reserve(ledger, ledgers, wanting, evicted, now, cost)
        waiting = [ledger for ledger in ledgers if ledger.key not in until and ledger.key in wanting]
        behind: set[str] = set()  # tenants of which one waits: none of theirs slips in before it
        for ledger in sorted(waiting, key=lambda one: one.waiting_since):
            if ledger.tenant in behind or not self._reserve(ledger, ledgers, wanting, evicted, now, cost):
                behind.add(ledger.tenant)
        self._waiting.update(ledger.key for ledger in waiting if ledger.key not in until)
        ready = [ledger for ledger in ledgers if until.get(ledger.key, -1) >= ledger.frontier]
        return ready, evicted

    def release(self, ledger: Ledger) -> None:
        """The session's blocks are the engine's again."""
        self._until.pop(ledger.key, None)

    def lost(self, ledger: Ledger, now: float) -> None:
        """The session has no blocks any more, whoever took them."""
        self.release(ledger)
        self.evictions += 1
        ledger.lose_cache(now)

    # -- details --------------------------------------------------------------------------------------------------

    def _wants(self, ledger: Ledger, now: float, crowded: bool) -> bool:
        """Whether the session has something to do: its prompt to read for the first time, or a row that is due."""
        reads = ledger.is_new and self._engine.pending(ledger.key) > 1
        return reads or (ledger.may_run() and ledger.due_at(crowded) <= now)

    def _count_free(self) -> int:
        promised = sum(self._blocks(key) - self._engine.blocks(key) for key in self._until)
        return self._engine.free_blocks - promised

    def _blocks(self, key: int) -> int:
        """Blocks that are held by a session or promised to it. One that goes on from a text that the engine has kept
        holds some before any are reserved for it.
        """
        return max(self._engine.blocks(key), self._engine.blocks(key, self._until.get(key, 0)))

    def _reserve(
        self,
        ledger: Ledger,
        ledgers: Sequence[Ledger],
        wanting: set[int],
        evicted: list[Ledger],
        now: float,
        cost: StepCost,
    ) -> bool:
        """Find the blocks that the session needs, at the expense of others if need be."""
        length = min(ledger.frontier + AHEAD, ledger.end)
        need = self._engine.blocks(ledger.key, length)
        grows = ledger.key in self._until
        held = self._blocks(ledger.key)
        short = need - held - self._free
        victims = self._victims(ledger, ledgers, wanting, need, short, grows, now, cost) if short > 0 else []
        if victims is None:
            return False
        for victim in victims:
            if victim.key not in wanting:
                self._owed_until = max(self._owed_until, now) + WORTH * _rebuild_s(victim, cost)
            self._engine.evict(victim.key)
            self.lost(victim, now)
            evicted.append(victim)
        self._until[ledger.key] = length
        self._free = self._count_free() if victims else self._free - max(0, need - held)
        if not grows:
            ledger.enter_cache(now)
        return True

    def _victims(
        self,
        ledger: Ledger,
        ledgers: Sequence[Ledger],
        wanting: set[int],
        need: int,
        short: int,
        grows: bool,
        now: float,
        cost: StepCost,
    ) -> list[Ledger] | None:
        """Sessions whose blocks make up for what is short; None where nobody has to go for this one."""
        others = [one for one in ledgers if one is not ledger and self._blocks(one.key)]
        idle = sorted((one for one in others if one.key not in wanting), key=lambda one: one.idle_since)
        # Else each of many next turns could hold what another one waits for, and nobody would ever begin.
        early = [one for one in others if one.key in wanting and one.key not in self._until]
        early.sort(key=lambda one: -one.waiting_since)
        busy = [one for one in others if one.key in wanting and one.key in self._until]
        if not grows and now < self.retry_at:
            idle = []
        elif busy and not grows:
            idle = [one for one in idle if now - one.idle_since >= HOLD * _rebuild_s(one, cost)]
        if grows:
            busy.sort(key=lambda one: -one.resident_since)
        else:
            beyond = self._rich(ledger, ledgers, need)
            turns = [one for one in busy if self._had_its_turn(one, cost)]
            turns.sort(key=lambda one: one.resident_since)
            rest = sorted((one for one in busy if one not in turns), key=lambda one: one.frontier)
            busy = turns
            for one in rest:
                left = beyond.get(one.tenant, 0.0) - self._blocks(one.key)
                if left >= 0:
                    beyond[one.tenant] = left
                    busy.append(one)
        chosen: list[Ledger] = []
        for one in [*idle, *early, *busy]:
            if short <= 0:
                break
            chosen.append(one)
            short -= self._blocks(one.key)
        return chosen if short <= 0 else None

    def _rich(self, ledger: Ledger, ledgers: Sequence[Ledger], need: int) -> dict[str, float]:
        """Blocks that tenants hold beyond what the session's own would hold with it, in proportion to their weights:
        what can be taken from them without making them the poorer ones, who would take it back.
        """
        names = {one.tenant for one in ledgers}
        if len(names) == 1:
            return {}
        held = dict.fromkeys(names, 0)
        for one in ledgers:
            held[one.tenant] += self._blocks(one.key)
        weights = self._tenants.weights(names)
        own = (held[ledger.tenant] + need) / weights[ledger.tenant]
        return {name: held[name] - own * weights[name] for name in names}

    @staticmethod
    def _had_its_turn(ledger: Ledger, cost: StepCost) -> bool:
        worked_s, committed = ledger.turn
        return committed >= LEAST_TURN and worked_s >= WORTH * _rebuild_s(ledger, cost)


def _rebuild_s(ledger: Ledger, cost: StepCost) -> float:
    """About how long evaluating a session's text again takes; long where nothing is known of prefill yet."""
    return ledger.frontier * (cost.per_prefill_row or cost.seconds(1))
