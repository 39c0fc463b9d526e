"""A fleet of verifiers under Ray, with a real broker and real boards: replicas die, hang, leave and come, and every
text is the target's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cloud.cluster import ALONE
from edge.board import Board, Stream
from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import ConfigError, ModelError
from protocol.messages import VerifierState, decode
from tests.boards import PROMPT, make_board, make_request
from tests.toys import plain_decode
from tools.broker import Broker, available
from tools.models import ROOT

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif("mosquitto" not in available(), reason="mosquitto is not installed")

LIMIT_S = 60.0
ENVIRONMENT = {**os.environ, **ALONE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """One Ray cluster for all tests: each has replicas of its own on it."""
    head = subprocess.Popen(
        [sys.executable, "-m", "tests.replicas", "head"],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert head.stdin and head.stdout
    address = head.stdout.readline().strip()
    assert address, f"Ray did not start: {head.wait()}"
    yield address
    head.stdin.close()
    assert head.wait(LIMIT_S) == 0


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker.start() as running:
        yield running


class Fleet:
    """The command, boards, and an ear for what verifiers say of themselves."""

    def __init__(self, address: str, broker: Broker, folder: Path) -> None:
        self.address, self.broker, self.folder = address, broker, folder
        self.stack = ExitStack()
        self.states: dict[str, VerifierState] = {}
        self.log = folder / "log"
        self.command: subprocess.Popen[str] | None = None
        ear = MqttLink(
            BrokerConfig(port=broker.port),
            f"ear-{folder.name}",
            on_message=self._hear,
            subscriptions=[(topics.verifier_state_topic("+"), 1)],
        ).start()
        self.stack.callback(ear.close)
        ear.wait_up(LIMIT_S)

    def _hear(self, topic: str, payload: bytes) -> None:
        state = decode(payload)
        if isinstance(state, VerifierState):
            self.states[state.verifier] = state

    @property
    def up(self) -> list[str]:
        return [id for id, state in self.states.items() if state.status == "up"]

    def serve(self, *options: str, replicas: int = 3) -> None:
        """The command, once so many replicas have announced themselves."""
        arguments = ["serve", "--port", str(self.broker.port), "--address", self.address]
        arguments += ["--model", str(self.folder), *options]
        with open(self.log, "w") as log:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "tests.replicas", *arguments], cwd=ROOT, env=ENVIRONMENT, stderr=log, text=True
            )
        self.stack.callback(self._end)
        self.until(lambda: len(self.up) >= replicas)

    def _end(self) -> None:
        assert self.command is not None
        if self.command.poll() is None:
            self.command.terminate()
            try:
                self.command.wait(20)
            except subprocess.TimeoutExpired:
                self.command.kill()
                self.command.wait()

    @property
    def text(self) -> str:
        """What the command has logged."""
        return self.log.read_text() if self.log.exists() else ""

    def exit_code(self) -> int:
        assert self.command is not None
        return self.command.wait(LIMIT_S)

    def pid(self, verifier: str) -> int:
        """Of the replica's process, as its log's prefix tells it."""
        start = f"({verifier} pid="
        self.until(lambda: start in self.text)
        return int(self.text.split(start)[1].split(")")[0].split(",")[0])

    def boards(self, number: int) -> list[Board]:
        made = []
        for i in range(number):
            board = make_board(self.broker.port, f"t.{self.folder.name}{i}"[:60], self.folder / str(i), policy="none")
            made.append(board.start())
            self.stack.callback(board.close)
        for board in made:
            board.link.wait_up(LIMIT_S)
        return made

    def until(self, what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        until = time.monotonic() + limit_s
        while not what():
            assert time.monotonic() < until, self.text[-4000:]
            time.sleep(0.02)


@pytest.fixture
def fleet(ray_address: str, broker: Broker, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(ray_address, broker, tmp_path)
    with made.stack:
        yield made


def owners(streams: list[Stream]) -> Counter[str]:
    """Sessions by verifier, where they have one."""
    return Counter(owner for stream in streams if stream.run and (owner := stream.run.window.verifier))


def finish(streams: list[Stream], max_tokens: int) -> None:
    """Every text is complete, and the target's."""
    for stream in streams:
        watchdog = threading.Timer(LIMIT_S, stream.abandon, [TimeoutError("not finished")])
        watchdog.start()
        ids = [id for piece in stream for id in piece]
        watchdog.cancel()
        assert stream.run is not None
        request = stream.run.window.request
        assert ids == plain_decode(PROMPT, request.sampling, max_tokens)


def open_all(boards: list[Board], max_tokens: int) -> list[Stream]:
    return [board.open(make_request(i + 1, max_tokens=max_tokens)) for i, board in enumerate(boards)]


def test_sessions_spread_and_outlive_every_kind_of_death(fleet):
    """Killed, sent SIGTERM, hung, or with an engine that fails: another takes its place, under a name of its own."""
    fleet.serve("--hang-s", "6", "--row-s", "0.002")
    first = set(fleet.up)
    boards = fleet.boards(9)
    streams = open_all(boards, 800)
    fleet.until(lambda: sum(owners(streams).values()) == 9)
    assert set(owners(streams)) == first and len(first) == 3, fleet.text
    killed, hung, sick = sorted(first)
    os.kill(fleet.pid(killed), signal.SIGKILL)
    started = time.monotonic()
    fleet.until(lambda: killed not in owners(streams) and sum(owners(streams).values()) == 9)
    assert time.monotonic() - started < 4.0, "its will was not heard"
    fleet.until(lambda: len(fleet.up) == 3)
    (fleet.folder / sick).touch()
    short = []
    while fleet.states[sick].status == "up":
        short.append(boards[0].open(make_request(100 + len(short), max_tokens=2)))
        finish(short[-1:], 2)
    os.kill(fleet.pid(hung), signal.SIGSTOP)
    fleet.until(lambda: fleet.states[hung].status == "gone")
    fleet.until(lambda: len(fleet.up) == 3)
    assert not set(fleet.up) & first
    leaver = fleet.up[0]
    os.kill(fleet.pid(leaver), signal.SIGTERM)
    fleet.until(lambda: fleet.states[leaver].status == "gone" and len(fleet.up) == 3)
    finish(streams, 800)
    assert f"({leaver} pid=" in fleet.text


def test_sigterm_drains_all_and_another_fleet_goes_on(fleet):
    fleet.serve()
    first = set(fleet.up)
    streams = open_all(fleet.boards(4), 300)
    fleet.until(lambda: all(len(stream.run.window.committed) > 20 for stream in streams if stream.run))
    fleet.command.terminate()
    assert fleet.exit_code() == 0
    assert not fleet.up, "all have said goodbye"
    text = fleet.text
    leaves, drains = text.rindex("leaves the share"), text.index(" drains")
    assert leaves < drains, "nobody drains towards one that drains as well"
    fleet.serve("--least", "1", "--most", "1", replicas=1)
    finish(streams, 300)
    assert not set(fleet.up) & first


def test_sighup_replaces_all_and_is_not_noticed(fleet):
    fleet.serve("--least", "2", "--most", "2", replicas=2)
    first = set(fleet.up)
    streams = open_all(fleet.boards(4), 1000)
    fleet.until(lambda: sum(owners(streams).values()) == 4)
    fleet.command.send_signal(signal.SIGHUP)
    least = [2]

    def replaced() -> bool:
        least[0] = min(least[0], len(fleet.up))
        return not set(fleet.up) & first and len(fleet.up) == 2

    fleet.until(replaced)
    assert least == [2], "new ones are up before old ones leave"
    finish(streams, 1000)


def test_queues_make_a_replica_more_and_idleness_one_fewer(fleet):
    fleet.serve("--least", "1", "--most", "2", "--settle-s", "1", "--row-s", "0.015", "--rows", "4", replicas=1)
    first = fleet.up[0]
    boards = fleet.boards(12)
    streams = open_all(boards, 60)
    fleet.until(lambda: len(fleet.up) == 2)
    late = [board.open(make_request(50 + i, max_tokens=20)) for i, board in enumerate(boards)]
    finish(streams, 60)
    finish(late, 20)
    fleet.until(lambda: len(fleet.up) == 1)
    time.sleep(2.5)
    assert len(fleet.up) == 1, "never fewer than least"
    assert first in fleet.states


def test_the_command_starts_a_ray_of_its_own_and_ends_with_what_no_replica_can_mend(tmp_path, broker):
    config = tmp_path / "cloud.toml"
    config.write_text(f'[engine]\nmodel = "none"\n[broker]\nport = {broker.port}\n[replicas]\ncpus = 0.1\n')
    command = [sys.executable, "-m", "cloud", "serve", "--config", str(config), "--replicas", "2"]
    refused = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT_S)
    assert refused.returncode == ConfigError.exit_code and "--ray" in refused.stderr
    done = subprocess.run([*command, "--ray"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == ModelError.exit_code, done.stderr
    assert "there is no manifest.json" in done.stderr
