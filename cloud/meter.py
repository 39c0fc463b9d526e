"""The meter: an append-only record of what each session cost, from which an invoice can be made (docs/metering.md).

The verifier's thread makes lines, a thread of its own writes and syncs them: a slow disk delays no token, and a full
one is counted and told, while what it could not take waits in memory.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from hashlib import blake2b
from math import inf
from pathlib import Path

import msgspec
import numpy as np

from cloud.engines.base import Outcome
from cloud.ledger import Ledger
from cloud.records import SUFFIX, Follower, Line, RecordsError
from cloud.scheduler import Step
from cloud.usage import Observer, Usage

log = logging.getLogger(__name__)

DAY_S = 86_400
MOST_BYTES = 64 << 20  # of a file
MOST_WAITING = 100_000  # lines
TELL_S = 60.0
CLOSE_S = 5.0
COUNTED = tuple(field.name for field in fields(Usage) if field.name != "committed")  # a line has positions instead


@dataclass(slots=True)
class Mark:
    """What of a session is recorded. start, before: where it stood when the file began; end: of what was told of."""

    ledger: Ledger
    text: str
    start: int
    before: Usage
    end: int
    told: Usage
    told_at: float


class Writer:
    """Appends lines to the run's files, each batch synced, on a thread of its own.

    errors: batches that failed; lost: lines given up for want of memory, or at the end.
    """

    def __init__(self, directory: Path, name: str, after: Callable[[], None]) -> None:
        """after: what else to do on this thread after each batch."""
        self._directory, self._name, self._after = directory, name, after
        self.errors = self.lost = 0
        self._waiting: dict[tuple[str, int, int], Line] = {}
        self._fd: int | None = None
        self._file, self._size = -1, 0
        self._told_at = -TELL_S
        self._changed = threading.Condition()
        self._work = self._closing = False
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    def size_of(self, file: int) -> int:
        """Bytes of the run's file of that number, as far as it is the latest."""
        return self._size if file == self._file else 0

    def put(self, lines: Iterable[Line]) -> None:
        with self._changed:
            self._keep(lines)
            self._work = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _keep(self, lines: Iterable[Line]) -> None:
        for line in lines:
            self._waiting[line.key] = line
        while len(self._waiting) > MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
            self.lost += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or self._closing)
                batch, self._waiting, self._work = self._waiting, {}, False
                closing = self._closing
            try:
                self._append(batch.values())
            except OSError as error:
                self.lost += len(batch) if closing else 0
                self._failed(error)
                with self._changed:
                    newer, self._waiting = self._waiting, batch
                    self._keep(newer.values())
            self._after()
            if closing:
                self._end_file()
                return

    def _append(self, lines: Collection[Line]) -> None:
        for file in sorted({line.file for line in lines}):
            mine = [line for line in lines if line.file == file]
            if self._fd is None or file != self._file:
                self._begin_file(mine[0])
            assert self._fd is not None
            data = b"".join(msgspec.json.encode(line) + b"\n" for line in mine)
            while data:
                written = os.write(self._fd, data)
                self._size += written
                data = data[written:]
            os.fsync(self._fd)

    def _begin_file(self, line: Line) -> None:
        """A file begins with an empty line, and so does what follows a failure: a line torn before it ends there."""
        self._end_file()
        path = self._directory / f"{line.day}-{self._name}-{line.file:04}{SUFFIX}"
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._file, self._size = line.file, os.fstat(self._fd).st_size
        os.write(self._fd, b"\n")
        folder = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _end_file(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None

    def _failed(self, error: OSError) -> None:
        self._end_file()
        self.errors += 1
        now = time.monotonic()
        if now - self._told_at >= TELL_S:
            self._told_at = now
            what = "the meter cannot write: %s; serving goes on, %d failures so far, %d lines lost"
            log.error(what, error, self.errors, self.lost, extra={"directory": str(self._directory)})


class Meter(Observer):
    """Records what the sessions of one verifier cost. Made for one run of it; `close` writes what is left.

    A session's line is written `flush_s` after the last one where anything has changed, and when it closes.
    Raises RecordsError where the directory cannot be written to.
    """

    def __init__(
        self,
        directory: Path,
        verifier: str,
        target: str,
        *,
        flush_s: float = 5.0,
        most_bytes: int = MOST_BYTES,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._verifier, self._target, self._flush_s, self._most_bytes = verifier, target, flush_s, most_bytes
        self._wall = wall
        self.run = secrets.token_hex(6)
        self._day = _day(wall())
        self._file = self._seq = 0
        self._marks: dict[int, Mark] = {}
        self._closed: list[Mark] = []
        self._lines: list[Line] = []
        self._tokens: dict[str, Counter[str]] = {self._day: Counter()}
        self._others = Follower(directory, self.run)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            probe = directory / f".{self.run}"
            probe.touch()
            probe.unlink()
            self._others.look(self._day)
        except OSError as error:
            remedy = "Make `[metering] directory` writable for the verifier's user."
            raise RecordsError(f"cannot be written: {error.strerror}", where=str(directory), remedy=remedy) from None
        self.writer = Writer(directory, f"{verifier}-{self.run}", self._follow)

    # -- the day --------------------------------------------------------------------------------------------------

    def today(self, tenant: str) -> int:
        """Tokens committed in the current UTC day by all verifiers that share the directory, since before a restart.

        Those of other verifiers are told of up to their `flush_s` and two seconds later. What was drawn twice counts
        twice.
        """
        day = _day(self._wall())
        own = self._tokens[day][tenant] if day in self._tokens else 0
        return own + self._others.tokens(day, tenant)

    def left_s(self) -> float:
        """Seconds until the UTC day is over."""
        return DAY_S - self._wall() % DAY_S

    def _follow(self) -> None:
        with suppress(OSError):
            self._others.look(self._day)

    # -- what it hears, on the verifier's thread ------------------------------------------------------------------

    def opened(self, ledger: Ledger) -> None:
        self._mark(ledger, -inf)

    def stepped(self, step: Step, outcome: Outcome, queue_s: float) -> None:
        for key in outcome.accepted:
            if key in self._marks:
                self._count(self._marks[key])

    def closed(self, ledger: Ledger) -> None:
        mark = self._marks.pop(ledger.key, None)
        if mark is not None:
            self._closed.append(mark)  # its last messages are still to be sent, and counted

    def flush(self, ledgers: Collection[Ledger], now: float) -> None:
        """Record what has changed; a new file when the day is over or the file is full."""
        for ledger in ledgers:
            mark = self._marks.get(ledger.key) or self._mark(ledger, now)
            self._count(mark)
            if now - mark.told_at >= self._flush_s:
                self._tell(mark, now)
        self._tell_closed(now)
        day = _day(self._wall())
        if day != self._day or self.writer.size_of(self._file) >= self._most_bytes:
            self._turn_over(day, now)
        self._put()

    def close(self) -> None:
        self._closed += self._marks.values()
        self._marks.clear()
        self._tell_closed(0.0)
        self._put()
        self.writer.close()

    # -- details --------------------------------------------------------------------------------------------------

    def _mark(self, ledger: Ledger, now: float) -> Mark:
        start, usage = ledger.frontier - ledger.usage.committed, Usage()
        mark = Mark(ledger, _digest(ledger), start, usage, start, usage, now)
        self._marks[ledger.key] = mark
        return mark

    def _count(self, mark: Mark) -> None:
        """Tokens of today, before they are told of."""
        self._tokens[self._day][mark.ledger.tenant] += mark.ledger.frontier - mark.end
        mark.end = mark.ledger.frontier

    def _tell(self, mark: Mark, now: float) -> None:
        self._count(mark)
        ledger, usage = mark.ledger, mark.ledger.usage
        if usage == mark.told:
            return
        mark.told, mark.told_at = replace(usage), now
        self._seq += 1
        self._lines.append(
            Line(
                at=datetime.fromtimestamp(self._wall(), timezone.utc).isoformat(timespec="milliseconds"),
                day=self._day,
                verifier=self._verifier,
                run=self.run,
                file=self._file,
                seq=self._seq,
                target=self._target,
                device=ledger.device,
                session=f"{ledger.session:016x}",
                text=mark.text,
                opening=ledger.key,
                prompt=ledger.prompt_len,
                start=mark.start,
                end=mark.end,
                **{name: round(getattr(usage, name) - getattr(mark.before, name), 6) for name in COUNTED},
            )
        )

    def _tell_closed(self, now: float) -> None:
        for mark in self._closed:
            self._tell(mark, now)
        self._closed.clear()

    def _put(self) -> None:
        self.writer.put(self._lines)
        self._lines = []

    def _turn_over(self, day: str, now: float) -> None:
        """What is known so far belongs to the old file, which is complete by itself."""
        for mark in self._marks.values():
            self._tell(mark, now)
            mark.start, mark.before = mark.end, mark.told
        self._put()
        # The day that is over is kept: a clock that was ahead may be put back into it.
        self._tokens = {kept: self._tokens.get(kept, Counter()) for kept in (self._day, day)}
        self._day = day
        self._file += 1


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d")


def _digest(ledger: Ledger) -> str:
    """Of prompt and sampling, so that no other text of the device can pass for this one."""
    sampling = ledger.sampling
    digest = blake2b(f"{ledger.device}/{ledger.session:x}/".encode(), digest_size=8)
    digest.update(f"{sampling.temperature!r}/{sampling.top_k}/{sampling.top_p!r}/{sampling.seed}/".encode())
    digest.update(np.asarray(ledger.text[: ledger.prompt_len], "<u4").tobytes())
    return digest.hexdigest()
