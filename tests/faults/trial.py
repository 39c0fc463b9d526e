"""What a fault costs: how long after it each board that it hit has its next token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.faults.fleet import Child, Fleet
from tests.faults.recoverable import Fault, Struck

BAR_S = 2.0  # p95 of the time to the next token, beyond the fault itself
LIMIT_S = 60.0


@dataclass
class Costs:
    """Of one kind of fault. beyond_s: from its end to the next token; silent_s: the longest time without a token from
    its beginning to there, as a user waits.
    """

    name: str
    seen: str
    absent: str = ""
    beyond_s: list[float] = field(default_factory=list)
    silent_s: list[float] = field(default_factory=list)
    lasted_s: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, fault: Fault) -> Costs:
        return cls(fault.name, fault.seen, fault.absent)

    @property
    def p95_s(self) -> float:
        return percentile(self.beyond_s, 0.95)

    @property
    def missed(self) -> bool:
        return bool(self.beyond_s) and self.p95_s > BAR_S

    def record(self) -> dict[str, object]:
        facts: dict[str, object] = {"fault": self.name, "lost": "nothing", "seen": self.seen}
        if not self.beyond_s:
            return {**facts, "n": 0, "absent": self.absent}
        return {
            **facts,
            "n": len(self.beyond_s),
            "median_s": round(statistics.median(self.beyond_s), 2),
            "p95_s": round(self.p95_s, 2),
            "max_s": round(max(self.beyond_s), 2),
            "silent_median_s": round(statistics.median(self.silent_s), 2),
            "silent_max_s": round(max(self.silent_s), 2),
            "lasted_s": [round(min(self.lasted_s), 1), round(max(self.lasted_s), 1)],
        }

    def note(self, lasted_s: float, beyond_s: float, silent_s: float) -> None:
        self.lasted_s.append(lasted_s)
        self.beyond_s.append(beyond_s)
        self.silent_s.append(silent_s)

    def add(self, fleet: Fleet, struck: Struck, others: Sequence[Struck] = ()) -> None:
        """Wait for the next token of each board that was hit. others: faults that are over by then; a token that one of
        them held back too is counted from where the last of them ended.
        """
        for board in struck.boards:
            at = fleet.await_token(board, struck.ended, LIMIT_S)
            ended = max([struck.ended, *(one.ended for one in others if one.ended < at and board in one.boards)])
            silent_s = fleet.application(board).silent_s(struck.began, at)
            self.note(struck.ended - struck.began, at - ended, silent_s)


def percentile(values: Sequence[float], share: float) -> float:
    """The least of values that so many are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(share * 100) // 100) - 1))]


def victims_of(fleet: Fleet, fault: Fault) -> list[Child | None]:
    """All that it may hit at once."""
    match fault.hits:
        case "broker":
            return [None]
        case "verifier":
            return [fleet.verifier_of(fleet.random.choice(fleet.boards))]
        case "clock":
            return [board for board in fleet.boards if board.faketime is not None]
        case _:
            return list(fleet.boards)


def strike(fleet: Fleet, fault: Fault, seconds: float, costs: Costs) -> None:
    """Once, on all that it may hit at the same time."""
    victims = victims_of(fleet, fault)
    with ThreadPoolExecutor(len(victims)) as pool:
        for struck in pool.map(lambda victim: fault.strike(fleet, victim, seconds), victims):
            costs.add(fleet, struck)


def strike_together(fleet: Fleet, faults: Sequence[Fault], costs: dict[str, Costs]) -> None:
    """Each once, for its shortest time, on a board of its own."""
    free = list(fleet.boards)
    given = []
    for fault in sorted(faults, key=lambda fault: fault.hits != "clock"):
        board = next(b for b in free if fault.hits != "clock" or b.faketime is not None)
        free.remove(board)
        given.append((fault, board))
    with ThreadPoolExecutor(len(given)) as pool:
        done = [(fault, pool.submit(fault.strike, fleet, board, fault.seconds[0])) for fault, board in given]
        for fault, struck in done:
            costs[fault.name].add(fleet, struck.result())


def settle(fleet: Fleet, seconds: float) -> None:
    """Until everybody writes again, and a while longer, so that one fault's cost is not another's."""
    fleet.wait_writing(fleet.boards, LIMIT_S)
    time.sleep(seconds * fleet.random.uniform(0.8, 1.2))
    fleet.wait_writing(fleet.boards, LIMIT_S)
