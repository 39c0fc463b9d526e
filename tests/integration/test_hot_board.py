"""A board that is hot, at a real broker: the fleet hears of it, it drafts less, and the text is the same."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest

from edge.board import Board
from edge.config import BoardConfig, DeviceConfig, DrafterConfig, DraftingConfig, EdgeConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.messages import DeviceState, decode
from tests.boards import SAMPLED, TIMING, broker_at, make_gateway, make_request
from tests.edge.boardfiles import PI5, BoardFiles
from tests.toys import ToyDrafter, plain_decode
from tools.broker import Broker

THROTTLED = "sys/devices/platform/soc@107c000000/soc@107c000000:firmware/get_throttled"


class SlowDrafter(ToyDrafter):
    """Its passes take a while, and are counted."""

    passes = 0

    def extend(self, rows):
        self.passes += 1
        time.sleep(0.01)
        return super().extend(rows)


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def board_at(broker: Broker, files: BoardFiles, stack: ExitStack) -> Board:
    config = EdgeConfig(
        device=DeviceConfig(name="t.hot", state=files.root / "state"),
        drafter=DrafterConfig(model=files.root),
        board=BoardConfig(hot_c=80.0),
        broker=broker_at(broker.port),
        drafting=DraftingConfig(policy="chain"),
        timing=TIMING,
    )
    board = Board(config, SlowDrafter(context=2000), root=files.root).start()
    stack.callback(board.close)
    return board


def wait_for(ready) -> None:
    deadline = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hot_board_says_so_drafts_less_and_writes_the_same(tmp_path, stack, broker_kinds):
    files = BoardFiles(tmp_path).write("proc/device-tree/model", PI5).write(THROTTLED, "0\n")
    temp = files.zone("cpu-thermal", 50_000)
    broker = stack.enter_context(Broker.start())
    gateway = make_gateway(broker.port, "v1", step_s=0.02)
    serving = threading.Thread(target=gateway.run, daemon=True)
    serving.start()
    stack.callback(serving.join, 10)
    stack.callback(gateway.stop)
    board = board_at(broker, files, stack)
    states: list[DeviceState] = []
    ear = MqttLink(
        broker_at(broker.port),
        "ear",
        on_message=lambda topic, payload: states.append(decode(payload)),
        subscriptions=[(topics.device_state_topic("t.hot"), 0)],
    ).start()
    stack.callback(ear.close)

    def write(session: int) -> tuple[list[int], int]:
        """(text, passes of the drafter)."""
        board.drafter.passes = 0
        request = make_request(session, max_tokens=60)
        return [id for ids in board.open(request) for id in ids], board.drafter.passes

    wait_for(lambda: states and states[-1].health is not None)
    health = states[-1].health
    assert (health.drafting, health.throttled, health.temperature_c) == (100, 0, 50)
    assert health.hardware == PI5.rstrip("\0")
    cool, passes = write(1)

    temp.write_text("84000\n")
    files.write(THROTTLED, "e0008\n")
    board.watch.look()
    wait_for(lambda: states[-1].health.drafting == 25)
    assert states[-1].health.throttled == 0xE0008 and states[-1].health.temperature_c == 84
    hot, fewer = write(2)

    assert cool == plain_decode(make_request(1).prompt, SAMPLED, 60) == hot
    assert 0 < fewer < 0.6 * passes
