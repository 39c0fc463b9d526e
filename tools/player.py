"""A board's process that plays what its parent asks for: both ends of the pipe between them.

The parent writes one `Part` a line; the board answers with JSON lines, of which the last of each part has the event
`done`. Each mode has a board, and thus a link, of its own; all boards share one drafter and take turns.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import msgspec

from edge.board import Board
from edge.cli import SWITCH_S
from edge.config import DeviceConfig, DrafterConfig, DraftingConfig, EdgeConfig, SessionConfig
from edge.drafters.base import Drafter
from edge.session import Request
from link.config import BrokerConfig, TlsConfig
from protocol.errors import OutriderError
from protocol.sampling import Sampling
from tools.modes import MODES
from tools.stage import last_words, spawn

TARGET_WAIT_S = 30.0
LOOK_S = 0.002
GOODBYE_S = 10.0


class Part(msgspec.Struct, frozen=True):
    """One text in one mode. text: its number; gamma: of `sync`; aloud: whether to tell each delivery as it comes."""

    mode: str
    text: int
    max_tokens: int
    seed: int = 0
    gamma: int = 4
    aloud: bool = False


class Repertoire(Protocol):
    """The texts that a board can play, and the drafter for them. model: what the drafter was made from."""

    drafter: Drafter
    model: Path
    sampling: Sampling
    stop_ids: Sequence[int]

    def prompt(self, text: int) -> Sequence[int]:
        """The ids of a text's prompt; the drafter is ready for it."""


class Player:
    """The parent's end. A context manager. facts: what the board said of itself."""

    def __init__(
        self, module: str, options: Sequence[str], broker: BrokerConfig, state: Path, *, core: int | None = None
    ) -> None:
        """module: whose main calls `perform` with what `place` takes, beside `options`."""
        self._module = module
        ca = ["--ca", str(broker.tls.ca)] if broker.tls else []
        self._process = spawn(
            ["-m", module, "--port", str(broker.port), *ca, "--state", str(state), *options],
            core=core,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self.facts = self._hear()
        except BaseException:
            last_words(self._process)
            raise

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, subprocess.TimeoutExpired):
            self._process.stdin.close()
            self._process.wait(GOODBYE_S)
        last_words(self._process)

    def events(self, part: Part) -> Iterator[dict]:
        """Play a part: its events as they come. Raises OutriderError when the process ends before the last one."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(part).decode() + "\n")
        self._process.stdin.flush()
        event = self._hear()
        while event["event"] != "done":
            yield event
            event = self._hear()
        yield event

    def play(self, part: Part) -> dict:
        """Play a part; its last event."""
        *_, done = self.events(part)
        return done

    def _hear(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OutriderError(f"the board's process ended with {self._process.wait()}", where=self._module)
        event: dict = json.loads(line)
        return event


def place(port: int, ca: Path | None) -> BrokerConfig:
    """The broker that `Player` tells its process of."""
    return BrokerConfig(port=port, tls=TlsConfig(ca=ca) if ca else None)


def tell(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def perform(repertoire: Repertoire, broker: BrokerConfig, state: Path) -> None:
    """The board's end: play each part that comes on stdin, until it ends."""
    sys.setswitchinterval(SWITCH_S)
    boards: dict[str, Board] = {}
    tell(event="ready", drafter=asdict(repertoire.drafter.info))
    try:
        for line in sys.stdin:
            part = msgspec.json.decode(line, type=Part)
            mode = f"{part.mode}-{part.gamma}" if part.mode == "sync" else part.mode
            if mode not in boards:
                # Names of one length, since they are a part of what crosses the wire.
                config = _config(part, f"stage.board{len(boards):02}", repertoire, broker, state)
                boards[mode] = Board(config, repertoire.drafter, present=False).start()
            _play(boards[mode], repertoire, part)
    finally:
        for board in boards.values():
            board.close()


def _config(part: Part, name: str, repertoire: Repertoire, broker: BrokerConfig, state: Path) -> EdgeConfig:
    mode = MODES[part.mode]
    return EdgeConfig(
        device=DeviceConfig(name=name, state=state / name),
        broker=broker,
        drafter=DrafterConfig(model=repertoire.model),
        drafting=DraftingConfig(policy=mode.policy, gamma=part.gamma),
        session=SessionConfig(patience_s=mode.patience_s),
    )


def _play(board: Board, repertoire: Repertoire, part: Part) -> None:
    target = board.find_target(TARGET_WAIT_S)
    prompt = tuple(repertoire.prompt(part.text))
    request = Request(
        secrets.randbits(64),
        target.target,
        prompt,
        msgspec.structs.replace(repertoire.sampling, seed=part.seed),
        part.max_tokens,
        tuple(sorted(repertoire.stop_ids)),
        board.config.session.patience_s,
    )
    before = board.link.counters()
    started = time.perf_counter()
    stream = board.open(request)
    ids: list[int] = []
    arrivals: list[tuple[float, int]] = []
    for fresh in stream:
        arrivals.append((time.perf_counter() - started, len(fresh)))
        ids += fresh
        if part.aloud:
            tell(event="verified", ids=fresh)
    while board.busy:  # the boards of all modes take turns with one drafter
        time.sleep(LOOK_S)
    after = board.link.counters()
    assert stream.run is not None
    window, cadence = stream.run.window, stream.run.window.cadence
    trip_s = cadence.round_trip_s
    tell(
        event="done",
        prompt_tokens=len(prompt),
        ids=ids,
        arrivals=arrivals,
        bytes_up=after.bytes_sent - before.bytes_sent,
        bytes_down=after.bytes_received - before.bytes_received,
        passes=stream.run.passes,
        finish=window.finish,
        tally={key: value for key, value in asdict(window.tally).items() if key != "ignored"},
        heard_ms={
            "pass": cadence.cost.first_s * 1e3,
            "step": cadence.step_s * 1e3,
            "round_trip": None if trip_s is None else trip_s * 1e3,
        },
    )
