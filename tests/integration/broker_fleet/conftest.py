"""Toys at a real broker: the boards' links to it are long, the verifiers' are not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cloud.gateway import Gateway
from edge.board import Board, Stream
from tests.boards import make_board, make_gateway
from tools.broker import Broker
from tools.models import ROOT
from tools.wan import WanThread

RTT_S = 0.03
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker.start() as running:
        yield running


@pytest.fixture
def wan(broker: Broker) -> Iterator[WanThread]:
    with WanThread((broker.host, broker.port), rtt_s=RTT_S, jitter_s=0.005) as link:
        yield link


class Fleet:
    """What a test starts, ended with it."""

    def __init__(self, broker: Broker, wan: WanThread, folder: Path) -> None:
        self.broker, self.wan, self.folder = broker, wan, folder
        self.stack = ExitStack()

    def verifier(self, name: str, **options) -> Gateway:
        gateway = make_gateway(self.broker.port, name, **options)
        thread = threading.Thread(target=gateway.run, daemon=True)
        thread.start()
        gateway.link.wait_up(LIMIT_S)

        def end() -> None:
            gateway.stop()
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "the gateway's loop does not end"

        self.stack.callback(end)
        return gateway

    def board(self, name: str, **options) -> Board:
        board = make_board(self.wan.port, name, self.folder / name, **options).start()
        self.stack.callback(board.close)
        board.link.wait_up(LIMIT_S)
        return board


@pytest.fixture
def fleet(broker: Broker, wan: WanThread, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(broker, wan, tmp_path)
    with made.stack:
        yield made


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.boards", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def read(stream: Stream, least: int | None = None) -> list[int]:
    """At least so many ids, or all."""
    ids: list[int] = []
    watchdog = threading.Timer(LIMIT_S, stream.abandon, [TimeoutError(f"not finished within {LIMIT_S} s")])
    watchdog.start()
    try:
        while least is None or len(ids) < least:
            ids += next(stream)
    except StopIteration:
        pass
    finally:
        watchdog.cancel()
    return ids


def wait_for(what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.005)
