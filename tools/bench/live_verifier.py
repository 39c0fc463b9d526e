"""The live benchmark's verifier: gateway, link and verifier as shipped, over an engine that waits, with a note of when
each message came, each step ran and each commit left.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from cloud.archive import Archive
from cloud.cli import SWITCH_S
from cloud.config import LimitsConfig, SchedulerConfig
from cloud.engines.base import Outcome, Plan
from cloud.gateway import Gateway
from cloud.probe import probe
from cloud.verifier import Send, Verifier
from link.config import BrokerConfig
from protocol import topics
from protocol.messages import Commit
from tools.bench.live_records import Book, Came, Left, Stepped, device_number
from tools.bench.rests import Rests
from tools.bench.timed import scripts_of
from tools.twin.replay import ReplayEngine, Script, StepTime

ARCHIVE_TOKENS = 40_000  # of texts that are over: full before memory is looked at, which it would fill for ten minutes


class RestingEngine(ReplayEngine):
    """Steps that take what their `StepTime` says, on a clock that rests. meanwhile: called while a step waits."""

    def __init__(self, scripts: Sequence[Script], time: StepTime, clock: Rests) -> None:
        super().__init__(scripts, time)
        self._clock = clock
        self.meanwhile: Callable[[], None] = lambda: None
        self.latest = Stepped(0.0, 0.0)
        self.steps = 0

    def step(self, plan: Plan) -> Outcome:
        began, started = time.monotonic(), self._clock()
        outcome = super().step(plan)
        self.meanwhile()
        self._clock.sleep_until(started + outcome.seconds)
        outcome.seconds = self._clock() - started
        self.latest = Stepped(began, time.monotonic())
        self.steps += 1
        return outcome


class NotingGateway(Gateway):
    """A gateway that notes what comes and what leaves, but writes it down only while the engine is at work."""

    def __init__(self, verifier: Verifier, broker: BrokerConfig, clock: Rests, folder: Path) -> None:
        super().__init__(verifier, broker, clock=clock)
        self._came, self._left = Book(folder / "came", Came), Book(folder / "left", Left)
        self._stepped = Book(folder / "stepped", Stepped)
        self._engine: RestingEngine = verifier.engine  # type: ignore[assignment]
        self._engine.meanwhile = self._write_down
        self._arrivals: deque[tuple[float, str, bytes]] = deque()
        self._departures: list[tuple[float, Sequence[Send]]] = []
        self._first = self._engine.steps
        self.verdicts = 0

    @property
    def steps(self) -> int:
        return self._engine.steps - self._first

    def close_books(self) -> None:
        self._write_down()
        for book in (self._came, self._left, self._stepped):
            book.close()

    def _on_message(self, topic: str, payload: bytes) -> None:
        self._arrivals.append((time.monotonic(), topic, payload))
        super()._on_message(topic, payload)

    def _send(self, sends: Sequence[Send]) -> None:
        self._departures.append((time.monotonic(), sends))
        super()._send(sends)

    def _write_down(self) -> None:
        """What came up to now, the step before this one and what has left since."""
        for _ in range(len(self._arrivals)):
            at, topic, payload = self._arrivals.popleft()
            self._came.note(at, device_number(topics.parse(topic).device), payload[:12])
        for at, sends in self._departures:
            self.verdicts += len(sends)
            for send in sends:
                if isinstance(commit := send.message, Commit):
                    device = device_number(topics.parse(send.topic).device)
                    self._left.note(at, device, commit.handle, commit.epoch, commit.seq, max(0, self.steps - 1))
        self._departures.clear()
        if self.steps:
            self._stepped.note(*self._engine.latest)


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True)
@click.option("--traces", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--sessions", type=int, required=True)
@click.option("--step-s", type=float, required=True)
@click.option("--clock", type=(float, float, float), required=True)
def main(
    port: int, folder: Path, files: tuple[Path, ...], prompt_tokens: int, sessions: int, step_s: float,
    clock: tuple[float, float, float],
) -> None:  # fmt: skip
    """Serve the traces' texts until SIGTERM, then tell on stdout what was counted."""
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    rests = Rests(*clock)
    engine = RestingEngine(scripts_of(files, 0, prompt_tokens), StepTime(step_s=step_s), rests)
    scheduler, limits = SchedulerConfig(rows=4096), LimitsConfig(sessions=sessions)
    verifier = Verifier(
        "v0123456789",
        engine,
        scheduler=scheduler.scheduler(),
        bounds=limits.bounds(),
        version="live",
        cost=probe(engine, scheduler.probe_s, limits.draft_rows),
    )
    verifier.archive = Archive(ARCHIVE_TOKENS)
    gateway = NotingGateway(verifier, BrokerConfig(port=port), rests, folder)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    gateway.run()
    gateway.close_books()
    counters = gateway.link.counters()
    told = {name: getattr(counters, name) for name in ("received", "dropped", "expired", "refused", "connects")}
    tally = verifier.tally
    told |= {"verdicts": gateway.verdicts, "steps": gateway.steps, "committed": tally.committed, "rows": tally.rows}
    click.echo(json.dumps(told | {"errors": dict(tally.errors)}))


if __name__ == "__main__":
    main()
