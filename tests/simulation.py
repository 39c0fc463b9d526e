"""Boards, verifiers and a broker in one thread on a virtual clock, with a network that loses, doubles and delays."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence

from cloud.engines.base import Engine
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.policy import ChainPolicy, Policy
from edge.runtime import SessionRun
from edge.session import Request, Send, Timing
from edge.window import Window
from protocol import topics
from protocol.messages import AnyMessage, VerifierState, decode, encode
from protocol.sampling import Sampling
from tests.toys import TARGET, ToyDrafter, ToyEngine

Fault = Callable[[str, AnyMessage, int], Sequence[float]]
"""(topic, message, count of messages so far) -> extra delays of the copies to deliver; empty loses the message."""


def no_fault(topic: str, message: AnyMessage, count: int) -> Sequence[float]:
    return (0.0,)


class World:
    """Everything between a board and its verdict, driven by one heap of events."""

    def __init__(self, *, one_way_s: float = 0.04, fault: Fault = no_fault, pass_s: float = 0.01) -> None:
        self.now = 0.0
        self.one_way_s, self.fault, self.pass_s = one_way_s, fault, pass_s
        self.verifiers: dict[str, Verifier] = {}
        self.boards: dict[str, Board] = {}
        self.sent: list[tuple[float, str, AnyMessage]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._turn = itertools.count()

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._count), what))

    def run(self, until: Callable[[], bool], limit_s: float = 300.0) -> None:
        while not until():
            assert self._heap, "nothing will ever happen again"
            self.now, _, what = heapq.heappop(self._heap)
            assert self.now < limit_s, f"not finished after {limit_s} virtual seconds"
            what()

    def publish(self, topic: str, message: AnyMessage) -> None:
        payload = encode(message)
        extra = self.fault(topic, message, len(self.sent))
        self.sent.append((self.now, topic, message))
        for delay in extra:
            self.at(self.now + self.one_way_s + delay, lambda: self._deliver(topic, payload))

    def _deliver(self, topic: str, payload: bytes) -> None:
        where = topics.parse(topic)
        if where.kind in ("verdict", "verifier"):
            for board in list(self.boards.values()):
                if where.kind == "verifier" or board.run.window.device == where.device:
                    board.receive(decode(payload))
            return
        if where.kind == "open" and where.name not in self.verifiers:
            share = [v for v in self.verifiers.values() if v.engine.info.id == where.name and not v.draining]
            if not share:
                for board in self.boards.values():
                    if board.run.window.device == where.device:
                        board.run.unserved()
                return
            share[next(self._turn) % len(share)].wake(topic, payload)
        elif where.name in self.verifiers:
            self.verifiers[where.name].wake(topic, payload)

    def verifier(self, name: str, *, rows: int = 64, engine: Engine | None = None, **bounds: float) -> Cloud:
        cloud = Cloud(self, name, engine or ToyEngine(), rows, Bounds(**bounds))  # type: ignore[arg-type]
        self.verifiers[name] = cloud
        return cloud

    def kill(self, name: str) -> None:
        """The process is gone; its last will is delivered."""
        self.verifiers.pop(name).dead = True
        self.publish(topics.verifier_state_topic(name), VerifierState(name, "gone"))

    def board(self, session: int, prompt: Sequence[int], **options: object) -> Board:
        board = Board(self, session, prompt, **options)  # type: ignore[arg-type]
        self.boards[board.run.window.device] = board
        return board


class Cloud(Verifier):
    """A verifier that steps on the world's clock."""

    def __init__(self, world: World, name: str, engine: Engine, rows: int, bounds: Bounds) -> None:
        super().__init__(name, engine, scheduler=Scheduler(rows, 8), bounds=bounds)
        self.world, self.dead, self.busy = world, False, False

    def wake(self, topic: str, payload: bytes) -> None:
        self.receive(topic, payload, self.world.now)
        self.look()

    def look(self) -> None:
        if self.dead or self.busy:
            return
        self.tick(self.world.now)
        plan = self.plan(self.world.now)
        self.post()
        if plan.work:
            self.busy = True
            outcome = self.engine.step(plan)
            self.world.at(self.world.now + outcome.seconds, lambda: self.done(outcome))
        elif (at := self.wake_at(self.world.now)) < float("inf"):
            self.world.at(max(at, self.world.now + 1e-3), self.look)

    def done(self, outcome) -> None:
        if not self.dead:
            outcome.accepted = {k: ids for k, ids in outcome.accepted.items() if k in self._by_key}
            self.busy = False
            self.settle(outcome, self.world.now)
            self.look()

    def post(self) -> None:
        for send in self.take():
            self.world.publish(send.topic, send.message)


class Board:
    """A board whose drafting loop turns on the world's clock."""

    def __init__(
        self,
        world: World,
        session: int,
        prompt: Sequence[int],
        *,
        device: str = "",
        target: str = TARGET,
        sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
        max_tokens: int = 40,
        patience_s: float = 0.0,
        drafter: ToyDrafter | None = None,
        policy: Policy | None = None,
        stop_ids: tuple[int, ...] = (),
        committed: Sequence[int] = (),
        epoch: int = 0,
    ) -> None:
        request = Request(session, target, tuple(prompt), sampling, max_tokens, stop_ids, patience_s)
        window = Window(
            device or f"t.b{session}", request, timing=Timing(), now=world.now, committed=committed, epoch=epoch
        )
        self.world, self.text, self.dead = world, list(committed), False
        self.run = SessionRun(
            window,
            drafter or ToyDrafter(),
            policy or ChainPolicy(),
            publish=self._publish,
            listener=self,
            clock=lambda: world.now,
        )
        self._due = world.now
        self.run.begin()
        world.at(world.now, self.turn)

    def _publish(self, send: Send) -> None:
        if not self.dead:
            self.world.publish(send.topic, send.message)

    def verified(self, ids: Sequence[int]) -> None:
        self.text.extend(ids)

    def ended(self) -> None:
        pass

    def receive(self, message: AnyMessage) -> None:
        if not self.dead:
            self.run.receive(message)
            if self._due > self.world.now + self.world.pass_s:
                self._due = self.world.now
                self.world.at(self.world.now, self.turn)

    def turn(self) -> None:
        if self.dead or self.run.window.done or self._due > self.world.now:
            return
        at = self.run.turn()
        self.run.window.cadence.pass_s = self.world.pass_s
        self._due = self.world.now + self.world.pass_s if at <= self.world.now else at
        if self._due < float("inf"):
            self.world.at(self._due, self.turn)

    @property
    def done(self) -> bool:
        return self.run.window.done
