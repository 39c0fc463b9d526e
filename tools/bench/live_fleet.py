"""The live benchmark's devices: the boards' own sessions and drafting loops over recorded drafts, one text after
another, each device with a connection of its own. In the clock's rests they are still, and all call the echo at once.
"""

from __future__ import annotations

import gc
import heapq
import json
import select
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from edge.cli import SWITCH_S
from edge.config import DraftingConfig
from edge.policy import Policy
from edge.runtime import SessionRun
from edge.session import Request, Timing
from edge.window import Window
from link.config import BrokerConfig
from protocol import topics
from protocol.messages import AnyMessage, Commit, Draft, decode, encode
from protocol.sampling import Sampling
from tools.bench.crowd import Crowd, Wire
from tools.bench.live_echo import CALL, ECHO
from tools.bench.live_records import Book, Verdict, device_name, device_number
from tools.bench.rests import Rests
from tools.bench.timed import scripts_of
from tools.boards import BoardTiming, board_timing
from tools.twin.replay import TARGET, ReplayDrafter, Script
from tools.twin.world import Board, World

CALLS_S = (0.7, 0.8, 0.9)  # into a rest
LOOK_S = 0.05
REACTION_S = 0.02  # boards have processors of their own: here what they do waits until all have what came at once
STAMP = 8  # bytes: when a call left


class Fleet(World):
    """The devices of one process. It is the boards' world, with a real clock and a real broker."""

    def __init__(
        self, broker: BrokerConfig, numbers: Sequence[int], scripts: Sequence[Script], timing: BoardTiming,
        policy: DraftingConfig, clock: Rests, folder: Path,
    ) -> None:  # fmt: skip
        super().__init__()
        self._scripts, self._timing, self._drafting, self._clock = scripts, timing, policy, clock
        self._wires = {name: _connect(broker, name) for name in map(device_name, numbers)}
        self._crowd = Crowd(self._wires.values(), self._on_message)
        self._turns = dict.fromkeys(self._wires, 0)
        self._unanswered: dict[str, dict[tuple[int, int, int], float]] = {name: {} for name in self._wires}
        self._book = Book(folder, Verdict)
        self._draft_bytes = 16
        self.drafts = self.others = self.verdicts = self.echoed = self.called = self.texts = self.wrong = 0
        self.echo_s: list[float] = []
        self.open = True
        for i, name in enumerate(self._wires):
            self.at(clock() + 2.0 * i / len(self._wires), self._begin, name)

    def play(self) -> None:
        """Until stdin has something to say.

        A hundred boards leave a lot of garbage behind, in which no single board would ever stand still for so long: it
        is collected in the rests.
        """
        gc.collect()
        gc.freeze()
        gc.disable()
        while not select.select([sys.stdin], [], [], 0)[0]:
            if self._clock.rested_s() < 0:
                self._work()
            else:
                gc.collect()
                self._rest()

    def _rest(self) -> None:
        calls = list(CALLS_S)
        while (rested_s := self._clock.rested_s()) >= 0:
            if calls and rested_s >= calls[0]:
                calls.pop(0)
                self._call()
            self._crowd.look(0.002)

    def settle(self) -> None:
        """The boards are still; what comes is counted."""
        self.open = False
        sys.stdin.readline()
        while not select.select([sys.stdin], [], [], 0)[0]:
            self._crowd.look(LOOK_S)

    def close(self) -> None:
        self._book.close()
        for wire in self._wires.values():
            wire.close()

    def publish(self, topic: str, message: AnyMessage) -> int:
        where = topics.parse(topic)
        payload = encode(message)
        if isinstance(message, Draft):
            self._unanswered[where.device][message.handle, message.epoch, message.seq] = time.monotonic()
            self._draft_bytes = len(payload)
            self.drafts += 1
        else:
            self.others += 1
        self._wires[where.device].publish(topic, payload, qos=0 if where.kind == "draft" else 1)
        return len(payload)

    def _work(self) -> None:
        """The next event that is due, after a look at what has come."""
        heap = self._heap
        self._crowd.look(min(LOOK_S, max(0.0, heap[0][0] - self._clock())) if heap else LOOK_S)
        self.now = self._clock()
        if heap and heap[0][0] <= self.now:
            _, _, what, arguments = heapq.heappop(heap)
            what(*arguments)

    def _on_message(self, wire: Wire, topic: str, payload: bytes, at: float) -> None:
        if topic.startswith(ECHO):
            self.echo_s.append(at - int.from_bytes(payload[:STAMP], "little") / 1e9)
            self.echoed += 1
            return
        self.verdicts += 1
        message = decode(payload)
        if isinstance(message, Commit):
            # A late commit of the text before knows drafts of the same numbers.
            left_at = self._unanswered[wire.name].pop((message.handle, message.epoch, message.seq), None)
            if left_at is not None:
                self._book.note(left_at, at, device_number(wire.name), message.handle, message.epoch, message.seq)
        if self.open:
            self.at(self._clock() + REACTION_S, self._hear, wire.name, message)

    def _hear(self, name: str, message: AnyMessage) -> None:
        if board := self.boards.get(name):
            board.receive(message, 0)

    def _call(self) -> None:
        for wire in self._wires.values():
            stamp = time.monotonic_ns().to_bytes(STAMP, "little")
            wire.publish(f"{CALL}/{wire.name}", stamp.ljust(self._draft_bytes, b"\0"))
            self.called += 1

    def _begin(self, name: str) -> None:
        """The device's next text."""
        number, turn = device_number(name), self._turns[name]
        self._turns[name] = turn + 1
        which = (number + turn) % len(self._scripts)
        script = self._scripts[which]
        request = Request(
            (number << 32) + turn + 1, TARGET.id, script.prompt, Sampling(seed=which), len(script.trace.target)
        )
        self._unanswered[name].clear()

        def make(board: Board) -> SessionRun:
            window = Window(name, request, timing=Timing(), now=self.now)
            policy: Policy = self._drafting.make()
            return SessionRun(
                window, ReplayDrafter(script), policy, publish=board.publish, listener=board, clock=board.clock
            )

        def ended(board: Board) -> None:
            self.texts += 1
            self.wrong += board.story.ids != list(script.trace.target)
            self.at(self.now, self._begin, name)

        Board(self, make, rows_s=self._timing.rows_s, prefill_s=self._timing.prefill_s(script.prompt_len), ended=ended)


def _connect(broker: BrokerConfig, name: str) -> Wire:
    return Wire(broker, name, [topics.verdict_topic(name), f"{ECHO}/{name}"])


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--traces", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--first", type=int, required=True)
@click.option("--devices", type=int, required=True)
@click.option("--board", required=True)
@click.option("--policy", required=True)
@click.option("--clock", type=(float, float, float), required=True)
def main(
    port: int, out: Path, files: tuple[Path, ...], prompt_tokens: int, first: int, devices: int, board: str,
    policy: str, clock: tuple[float, float, float],
) -> None:  # fmt: skip
    """Play until a first line on stdin, be still until a second, then tell on stdout what was counted."""
    sys.setswitchinterval(SWITCH_S)
    fleet = Fleet(
        BrokerConfig(port=port),
        range(first, first + devices),
        scripts_of(files, 0, prompt_tokens),
        board_timing(board),
        msgspec.convert({"policy": policy}, DraftingConfig),
        Rests(*clock),
        out,
    )
    fleet.play()
    fleet.settle()
    fleet.close()
    told = {
        name: getattr(fleet, name)
        for name in ("drafts", "others", "verdicts", "called", "echoed", "texts", "wrong", "echo_s")
    }
    click.echo(json.dumps(told))


if __name__ == "__main__":
    main()
