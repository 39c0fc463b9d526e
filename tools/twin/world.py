"""Boards, verifiers and a broker in one thread on a virtual clock: one heap of events, and messages that take time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from cloud.cost import StepCost
from cloud.engines.base import Engine, Outcome
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.runtime import Pass, SessionRun
from edge.session import Send
from protocol import topics
from protocol.messages import AnyMessage, decode, encode

TICK_S = 1e-4  # a clock's grain: who asks to be woken at once is woken after it
PUMP_S = 0.25  # how often a board that reads its prompt looks at its timers


@dataclass(slots=True)
class Traffic:
    """Application payloads of one device. up: from the board to the verifier."""

    messages_up: int = 0
    messages_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


class World:
    """Everything between a board and its verdict. Links keep their order; nothing is lost (see `delays`)."""

    def __init__(self, *, one_way_s: float = 0.04) -> None:
        self.now = 0.0
        self.one_way_s = one_way_s
        self.verifiers: dict[str, Cloud] = {}
        self.boards: dict[str, Board] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._count = itertools.count()
        self._turn = itertools.count()

    def at(self, time: float, what: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._heap, (time, next(self._count), what, arguments))

    def run(self, until: Callable[[], bool], limit_s: float = inf) -> None:
        """Let events happen until `until()` holds."""
        heap = self._heap
        while not until():
            assert heap, "nothing will ever happen again"
            self.now, _, what, arguments = heapq.heappop(heap)
            assert self.now < limit_s, f"not finished after {limit_s} virtual seconds"
            what(*arguments)

    def delays(self, topic: str, message: AnyMessage) -> Sequence[float]:
        """Extra delays, in s, of the copies of a message that arrive."""
        return (0.0,)

    def publish(self, topic: str, message: AnyMessage) -> int:
        """Send a message; returns its payload's bytes."""
        payload = encode(message)
        for delay in self.delays(topic, message):
            self.at(self.now + self.one_way_s + delay, self._deliver, topic, payload)
        return len(payload)

    def _deliver(self, topic: str, payload: bytes) -> None:
        where = topics.parse(topic)
        match where.kind:
            case "verdict":
                if board := self.boards.get(where.device):
                    board.receive(decode(payload), len(payload))
            case "verifier":
                message = decode(payload)
                for board in list(self.boards.values()):
                    board.receive(message, len(payload))
            case _ if verifier := self.verifiers.get(where.name) or self._next_of(where.name):
                verifier.receive_payload(topic, payload)
            case "open":
                if board := self.boards.get(where.device):
                    board.run.unserved()

    def _next_of(self, target: str) -> Cloud | None:
        """The shared subscription of a target: its verifiers take turns."""
        share = [cloud for cloud in self.verifiers.values() if cloud.engine.info.id == target and not cloud.draining]
        return share[next(self._turn) % len(share)] if share else None


class Cloud(Verifier):
    """A verifier that steps on the world's clock."""

    def __init__(
        self,
        world: World,
        name: str,
        engine: Engine,
        scheduler: Scheduler,
        bounds: Bounds,
        cost: StepCost | None = None,
    ) -> None:
        super().__init__(name, engine, scheduler=scheduler, bounds=bounds, cost=cost)
        self.world = world
        self.stopped = self._busy = False
        self._wake_at = inf
        self._inbox: list[tuple[str, bytes, float]] = []
        world.verifiers[name] = self

    def receive_payload(self, topic: str, payload: bytes) -> None:
        self._inbox.append((topic, payload, self.world.now))
        if not self._busy:
            self.look()

    def look(self) -> None:
        """Step if anybody is due, else say when to look again."""
        world = self.world
        if self.stopped or self._busy:
            return
        for message in self._inbox:
            self.receive(*message)
        self._inbox.clear()
        self.tick(world.now)
        plan = self.plan(world.now)
        self._post()
        if plan.work:
            self._busy = True
            outcome = self.engine.step(plan)
            world.at(world.now + outcome.seconds, self._end_step, outcome)
        elif (at := self.wake_at(world.now)) < self._wake_at:
            self._wake_at = max(at, world.now + TICK_S)
            world.at(self._wake_at, self._wake)

    def _wake(self) -> None:
        self._wake_at = inf
        self.look()

    def _end_step(self, outcome: Outcome) -> None:
        if self.stopped:
            return
        outcome.accepted = {key: ids for key, ids in outcome.accepted.items() if key in self._by_key}
        self._busy = False
        self.settle(outcome, self.world.now)
        self.look()

    def _post(self) -> None:
        for send in self.take():
            self.world.publish(send.topic, send.message)


@dataclass(slots=True)
class Story:
    """What one text took. arrivals: (time in s, tokens) of each delivery to the application; rows: that the drafter
    evaluated behind the text; busy_s: that it worked behind the prompt.
    """

    asked_at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    rows: int = 0
    busy_s: float = 0.0


class Board:
    """One session's drafting loop on the world's clock.

    rows_s: seconds of a drafter's pass by its rows; prefill_s: seconds of reading the text that it starts with.
    """

    def __init__(
        self,
        world: World,
        make: Callable[[Board], SessionRun],
        *,
        rows_s: Callable[[int], float],
        prefill_s: float = 0.0,
        ended: Callable[[Board], None] = lambda board: None,
    ) -> None:
        self.world, self._rows_s, self._ended = world, rows_s, ended
        self.story = Story(world.now)
        self.stopped = False
        self._busy = True  # with the prompt
        self._wake_at = inf
        self.run = make(self)
        world.boards[self.run.window.device] = self
        self.run.open()
        self._opening = self.run.opening_text()
        self._read_at = world.now + prefill_s
        self._read_prompt()

    @property
    def done(self) -> bool:
        return self.run.window.done

    # -- what the session asks of its surroundings ----------------------------------------------------------------

    def clock(self) -> float:
        return self.world.now

    def publish(self, send: Send) -> None:
        if not self.stopped:
            traffic = self.story.traffic
            traffic.messages_up += 1
            traffic.bytes_up += self.world.publish(send.topic, send.message)

    def verified(self, ids: Sequence[int]) -> None:
        self.story.ids.extend(ids)
        self.story.arrivals.append((self.world.now, len(ids)))

    def ended(self) -> None:
        self._ended(self)

    # -- the loop -------------------------------------------------------------------------------------------------

    def receive(self, message: AnyMessage, size: int) -> None:
        if not self.stopped:
            traffic = self.story.traffic
            traffic.messages_down += 1
            traffic.bytes_down += size
            self.run.receive(message)
            if not self._busy:
                self.look()

    def look(self) -> None:
        """Start the next pass if there is one, else say when to look again."""
        if self.stopped or self._busy or self.run.window.done:
            return
        world = self.world
        work = self.run.next_pass()
        if work is not None:
            self._busy = True
            seconds = self._rows_s(work.num_rows)
            self.story.rows += 0 if work.reads else work.num_rows
            self.story.busy_s += seconds
            world.at(world.now + seconds, self._end_pass, work, seconds)
        elif self.run.wake_at < self._wake_at:
            self._wake_at = max(self.run.wake_at, world.now + TICK_S)
            world.at(self._wake_at, self._wake)

    def _wake(self) -> None:
        self._wake_at = inf
        self.look()

    def _read_prompt(self) -> None:
        if self.stopped or self.done:
            return
        if self.world.now < self._read_at:
            self.run.open()
            self.world.at(min(self._read_at, self.world.now + PUMP_S), self._read_prompt)
        else:
            self.run.read(*self._opening)
            self._busy = False
            self.look()

    def _end_pass(self, work: Pass, seconds: float) -> None:
        if self.stopped:
            return
        self.run.learn(work, self.run.evaluate(work), seconds)
        self._busy = False
        self.look()
