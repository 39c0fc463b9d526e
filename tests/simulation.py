"""The twin's world with toy models and a network that loses, doubles and delays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cloud.engines.base import Engine
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds
from edge.policy import ChainPolicy, Policy
from edge.runtime import SessionRun
from edge.session import Request, Timing
from edge.window import Window
from protocol import topics
from protocol.messages import AnyMessage, VerifierState
from protocol.sampling import Sampling
from tests.toys import TARGET, ToyDrafter, ToyEngine
from tools.twin import world as twin

Fault = Callable[[str, AnyMessage, int], Sequence[float]]
"""(topic, message, count of messages so far) -> extra delays of the copies to deliver; empty loses the message."""


def no_fault(topic: str, message: AnyMessage, count: int) -> Sequence[float]:
    return (0.0,)


class World(twin.World):
    """A world whose network may fail. pass_s: of the boards' drafters."""

    def __init__(self, *, one_way_s: float = 0.04, fault: Fault = no_fault, pass_s: float = 0.01) -> None:
        super().__init__(one_way_s=one_way_s)
        self.fault, self.pass_s = fault, pass_s
        self.sent: list[tuple[float, str, AnyMessage]] = []

    def run(self, until: Callable[[], bool], limit_s: float = 300.0) -> None:
        super().run(until, limit_s)

    def delays(self, topic: str, message: AnyMessage) -> Sequence[float]:
        delays = self.fault(topic, message, len(self.sent))
        self.sent.append((self.now, topic, message))
        return delays

    def verifier(self, name: str, *, rows: int = 64, engine: Engine | None = None, **bounds: float) -> twin.Cloud:
        return twin.Cloud(self, name, engine or ToyEngine(), Scheduler(rows, 8), Bounds(**bounds))  # type: ignore[arg-type]

    def kill(self, name: str) -> None:
        """The process is gone; its last will is delivered."""
        self.verifiers.pop(name).stopped = True
        self.publish(topics.verifier_state_topic(name), VerifierState(name, "gone"))

    def board(
        self,
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
    ) -> Board:
        request = Request(session, target, tuple(prompt), sampling, max_tokens, stop_ids, patience_s)
        window = Window(
            device or f"t.b{session}", request, timing=Timing(), now=self.now, committed=committed, epoch=epoch
        )

        def make(board: twin.Board) -> SessionRun:
            return SessionRun(
                window,
                drafter or ToyDrafter(),
                policy or ChainPolicy(),
                publish=board.publish,
                listener=board,
                clock=board.clock,
            )

        return Board(self, make, rows_s=lambda rows: self.pass_s, committed=committed)


class Board(twin.Board):
    """text: everything committed, what it started with included."""

    def __init__(self, *arguments, committed: Sequence[int], **options) -> None:
        self._before = list(committed)
        super().__init__(*arguments, **options)

    @property
    def text(self) -> list[int]:
        return self._before + self.story.ids
