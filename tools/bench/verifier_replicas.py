"""Three replicas under Ray, one shot with SIGKILL every few seconds while 24 sessions are open at any time: every text
is complete, and the one that an undisturbed engine writes.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from tokenizers import Tokenizer

from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load
from edge.board import Board, Stream
from edge.config import DeviceConfig, DrafterConfig, DraftingConfig, EdgeConfig
from edge.drafters.base import Drafter, DrafterInfo
from edge.session import Request
from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import OutriderError
from protocol.messages import Commit, Opened, VerifierState, decode
from protocol.sampling import Sampling
from tools.bench.record import ms
from tools.models import prepare
from tools.stage import Stage

REPLICAS = 3
BOARDS = 8
SESSIONS = 24
KILL_EVERY_S = 5.0
LOOK_S = 0.005
LIMIT_S = 300.0
START_S = 180.0
PROMPT = "Question {0}: tell me how a river of {0} towns came to be.\nAnswer:"


@dataclass
class Shot:
    """One kill. orphans: sessions that the victim had; waits: until each had another owner, in s; last: nobody else was
    up, so that they waited for a replica to start.
    """

    at: float
    victim: str
    orphans: list[Stream]
    last: bool
    waits: list[float] = field(default_factory=list)


class Idle:
    """A drafter that is never asked: `policy = "none"`."""

    info = DrafterInfo("none", 1, 1, "", "", "", "")


class Ear:
    """What verifiers say: who is up, and which positions of which session each owner of it has drawn."""

    def __init__(self, broker: BrokerConfig) -> None:
        self.states: dict[str, VerifierState] = {}
        self._terms: dict[tuple[str, int, int], set[int]] = {}
        self._said: dict[tuple[int, int, str], set[int]] = {}
        everyone = [(topics.verifier_state_topic("+"), 1), (topics.verdict_topic("+"), 0)]
        self.link = MqttLink(broker, "bench-ear", on_message=self._hear, subscriptions=everyone).start()

    def _hear(self, topic: str, payload: bytes) -> None:
        message = decode(payload)
        if isinstance(message, VerifierState):
            self.states[message.verifier] = message
        elif isinstance(message, Opened):
            term = (topics.parse(topic).device, message.handle, message.epoch)
            self._terms[term] = self._said.setdefault((message.session, message.epoch, message.verifier), set())
        elif isinstance(message, Commit):
            term = (topics.parse(topic).device, message.handle, message.epoch)
            self._terms[term].update(range(message.base, message.base + len(message.ids)))

    @property
    def drawn(self) -> int:
        """Tokens, each as often as it was drawn; one that was merely told again counts once."""
        return sum(map(len, self._said.values()))

    @property
    def up(self) -> list[str]:
        return [name for name, state in list(self.states.items()) if state.status == "up"]

    def await_up(self, number: int) -> VerifierState:
        deadline = time.monotonic() + START_S
        while len(self.up) < number:
            if time.monotonic() > deadline:
                raise OutriderError(f"{len(self.up)} of {number} replicas are up after {START_S:g} s", where="replicas")
            time.sleep(0.05)
        return self.states[self.up[0]]


class Player(threading.Thread):
    """Asks for one text again and again until it is told to stop: `texts`, and the stream of the one under way."""

    def __init__(self, number: int, board: Board, request: Request, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._number, self._board, self._request, self._over = number, board, request, over
        self.texts: list[list[int]] = []
        self.stream: Stream | None = None

    def run(self) -> None:
        while not self._over.is_set():
            # Handles come from these seven bits: two sessions of a board that shared one would be one to the ear.
            session = secrets.randbits(57) << 7 | self._number
            self.stream = self._board.open(replace(self._request, session=session))
            self.texts.append([id for ids in self.stream for id in ids])
        self.stream = None


class Killer:
    """Shoots the replica with most sessions every KILL_EVERY_S."""

    def __init__(self, players: Sequence[Player], log: Path, ear: Ear) -> None:
        self.shots: list[Shot] = []
        self._players, self._log, self._ear = players, log, ear

    def run(self, seconds: float, over: threading.Event) -> None:
        """Shoot for so long, then set `over`; return once all texts under way are complete."""
        started = time.monotonic()
        shoot_at = started + KILL_EVERY_S
        while alive := [player for player in self._players if player.is_alive()]:
            now = time.monotonic()
            if now - started > seconds + KILL_EVERY_S / 2:
                over.set()
            elif now >= shoot_at and self._shoot():
                shoot_at = now + KILL_EVERY_S
            if now - started > seconds + LIMIT_S:
                raise OutriderError(f"{len(alive)} texts are not complete after {LIMIT_S:g} s more", where="replicas")
            self._look(now)
            time.sleep(LOOK_S)
        self._look(time.monotonic())

    def _shoot(self) -> bool:
        """Whether there was anybody with a session to write."""
        owned: dict[str, list[Stream]] = {}
        up = self._ear.up
        for player in self._players:
            stream = player.stream
            if stream is not None and not window_of(stream).done and window_of(stream).verifier in up:
                owned.setdefault(window_of(stream).verifier, []).append(stream)
        if not owned:
            return False
        victim = max(owned, key=lambda name: len(owned[name]))
        found = re.findall(rf"\({victim} pid=(\d+)", self._log.read_text())
        os.kill(int(found[0]), signal.SIGKILL)
        self._ear.states.pop(victim, None)
        self.shots.append(Shot(time.monotonic(), victim, owned[victim], last=up == [victim]))
        return True

    def _look(self, now: float) -> None:
        for shot in self.shots:
            for stream in list(shot.orphans):
                window = window_of(stream)
                if window.verifier not in ("", shot.victim):
                    shot.orphans.remove(stream)
                    shot.waits.append(now - shot.at)
                elif window.done:  # what it lacked was on its way when the shot fell
                    shot.orphans.remove(stream)


def window_of(stream: Stream) -> Any:
    assert stream.run is not None
    return stream.run.window


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """threads: not heeded; every engine here has one, since there are more of them than cores."""
    seconds, max_tokens = (15.0, 24) if quick else (60.0, 64)
    _, target = prepare("smollm2")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = [tokenizer.encode(PROMPT.format(i)).ids for i in range(SESSIONS)]
    samplings = [Sampling(temperature=0.8, top_p=0.95, seed=i) if i % 2 else Sampling() for i in range(SESSIONS)]
    with ExitStack() as stack:
        stage = stack.enter_context(Stage())
        ear = Ear(stage.broker())
        stack.callback(ear.link.close)
        log = serve(stage, target)
        state = ear.await_up(REPLICAS)
        requests = [
            Request(0, state.target, tuple(prompt), sampling, max_tokens)
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        boards = [stack.enter_context(board(stage, i)) for i in range(BOARDS)]
        over = threading.Event()
        players = [Player(i, boards[i % BOARDS], request, over) for i, request in enumerate(requests)]
        killer = Killer(players, log, ear)
        started = time.monotonic()
        for player in players:
            player.start()
        killer.run(seconds, over)
        took_s = time.monotonic() - started
        drawn, served = ear.drawn, len(re.findall(r"replica \S+ serves", log.read_text()))
    expected = undisturbed(target, requests)
    texts = [(text, expected[i]) for i, player in enumerate(players) for text in player.texts]
    waits = {
        last: [wait for shot in killer.shots for wait in shot.waits if shot.last == last] for last in (False, True)
    }
    return {
        "model": "SmolLM2-135M float32",
        "replicas": REPLICAS,
        "sessions": SESSIONS,
        "kills": len(killer.shots),
        "restarts": served - REPLICAS,
        "texts": len(texts),
        "complete": sum(len(text) == max_tokens for text, _ in texts),
        "identical": sum(text == one for text, one in texts),
        "kills_of_the_last": sum(shot.last for shot in killer.shots),
        "moved": sum(map(len, waits.values())),
        "reopen_ms": spread(waits[False]),
        "reopen_ms_after_the_last": spread(waits[True]),
        "tokens": sum(len(text) for text, _ in texts),
        "tokens_committed_twice": drawn - sum(len(text) for text, _ in texts),
        "seconds": round(took_s, 1),
    }


def spread(waits: Sequence[float]) -> dict[str, float] | None:
    """Percentiles in ms; None where nobody waited."""
    return {f"p{share}": ms(float(np.percentile(waits, share))) for share in (50, 95)} if waits else None


def serve(stage: Stage, target: Path) -> Path:
    """Start the fleet; the file of its log."""
    config = stage.folder / "replicas.toml"
    config.write_text(
        f"[broker]\nport = {stage.broker().port}\n"
        f"[engine]\nmodel = {msgspec.json.encode(str(target)).decode()}\nthreads = 1\nkv_gib = 1.0\n"
        "[scheduler]\nprobe_s = 0\n[replicas]\ncpus = 0.1\n"
    )
    stage.serve(["-m", "cloud", "serve", "--config", str(config), "--replicas", str(REPLICAS), "--ray"])
    (log,) = stage.folder.glob("verifier-*.log")
    return log


@contextmanager
def board(stage: Stage, number: int) -> Iterator[Board]:
    name = f"bench.replicas{number}"
    config = EdgeConfig(
        device=DeviceConfig(name=name, state=stage.folder / name),
        broker=stage.broker(),
        drafter=DrafterConfig(model=Path("none")),
        drafting=DraftingConfig(policy="none"),
    )
    made = Board(config, cast(Drafter, Idle()), present=False).start()
    try:
        made.link.wait_up(START_S)
        yield made
    finally:
        made.close()


def undisturbed(target: Path, requests: Sequence[Request]) -> list[list[int]]:
    """The texts as one engine writes them, all in one batch."""
    engine = load(target, Numerics(mode="exact"), threads=1)
    for key, request in enumerate(requests):
        engine.open(key, request.prompt, request.sampling, len(request.prompt) + request.max_tokens)
    texts: list[list[int]] = [[] for _ in requests]
    while unfinished := [key for key, request in enumerate(requests) if len(texts[key]) < request.max_tokens]:
        outcome = engine.step(Plan([Work(key, engine.pending(key)) for key in unfinished]))
        for key, ids in outcome.accepted.items():
            texts[key] += ids
    return texts
