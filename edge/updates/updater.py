"""Drives the plan: brings events to it, makes its record durable, and does what it asks for, one thing at a time."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from edge.session import Tally
from edge.updates.errors import DataCapError, DigestError, SelfTestError, StoreError, UpdateError
from edge.updates.fetch import Fetcher
from edge.updates.judge import Rule, Score
from edge.updates.manifest import AnyRelease, Facts, Kind, RuntimeRelease, content_digest, files, open_signed
from edge.updates.plan import Action, Collect, Fetch, Plan, Ref, Restart, Test, describe, may_fetch
from edge.updates.store import Store, named
from edge.updates.wheels import unpack
from protocol.messages import Announcement, encode

log = logging.getLogger(__name__)

LOOK_S = 2.0
SPARE_BYTES = 32 << 20  # left for the journal and the system
UNPACKED = 4  # times its size a wheel and what is in it take, roughly


class ReleaseTest(Protocol):
    def __call__(self, release: AnyRelease, folder: Path) -> None:
        """Raises DigestError or SelfTestError for a release that must not be tried."""


class Updater:
    """`announced` and `ended` may be called on any thread and return at once; `step` does the work, in one thread.

    idle: whether no session runs; restart: ends this process in favour of what the record names, called once, when
    idle; tell: called with a line for the device's state when what runs has changed. moved: bytes that the link has
    carried since this process began; data_cap_mb: of them and of fetching, a month; only fetching keeps to it.
    """

    def __init__(
        self,
        store: Store,
        facts: Facts,
        rule: Rule,
        *,
        fetcher: Fetcher,
        test: ReleaseTest,
        idle: Callable[[], bool],
        restart: Callable[[], None],
        tell: Callable[[str], None] = lambda line: None,
        moved: Callable[[], int] = lambda: 0,
        data_cap_mb: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store, self._facts, self._data_cap_mb = store, facts, data_cap_mb
        self.plan = Plan(store.record, rule)
        self.plan.steady_from(clock())
        self._fetcher, self._test, self._idle, self._restart, self._clock = fetcher, test, idle, restart, clock
        self._tell, self._told = tell, ""
        self._moved, self._counted = moved, 0
        self._events: SimpleQueue[Announcement | Score] = SimpleQueue()
        self._news = threading.Event()
        self._closing = self._leaving = False
        self._said: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name="updates", daemon=True)

    # -- any thread -----------------------------------------------------------------------------------------------

    def announced(self, announcement: Announcement) -> None:
        self._events.put(announcement)
        self._news.set()

    def ended(self, tally: Tally) -> None:
        """A session has ended."""
        self._events.put(Score(tally.commits, tally.guessed, tally.missed))
        self._news.set()

    def start(self) -> Updater:
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread after the block or test it is at. This end is not held against a trial."""
        self._closing = True
        self._news.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # -- one thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._announce_self()
        while not self._closing:
            try:
                if self.step():
                    continue
            except UpdateError as error:
                self._say("updates", error)
            except Exception:
                log.exception("updates")
            self._news.wait(LOOK_S)
            self._news.clear()
        try:
            self._heed()
            self._count()
            self.plan.stopped()
            self._save()
        except UpdateError as error:
            self._say("updates", error)

    def step(self) -> bool:
        """Take in what has come, then do one thing. False when there is nothing to do. Raises StoreError."""
        self._heed()
        if self._leaving:
            return False
        actions = self.plan.due(self._clock(), idle=self._idle())
        self._save()
        for action in actions:
            self._do(action)
        return bool(actions)

    def _heed(self) -> None:
        while True:
            try:
                event = self._events.get_nowait()
            except Empty:
                return
            if isinstance(event, Score):
                self._count()
                self._follow(self.plan.scored(event))
                continue
            try:
                release = open_signed(event, self.store.keys)
                actions = self.plan.announced(release, self._facts)
            except UpdateError as error:
                self._say("announcement", error)
                self._save()
                continue
            digest, wanted = content_digest(release), self.plan.record.slot(release.kind).wanted
            # One that is there already keeps the newest announcement, so that a key can be retired.
            if (wanted is not None and wanted.digest == digest) or self.store.path(release.kind, digest).is_dir():
                self.store.stage(release.kind, digest, encode(event))
            self._follow(actions)

    def _month(self) -> str:
        return time.strftime("%Y-%m", time.gmtime(self._clock()))

    def _count(self) -> None:
        """What the link has carried since it was last looked at."""
        moved = self._moved()
        self.plan.spent(self._month(), moved - self._counted)
        self._counted = moved

    def _follow(self, actions: list[Action]) -> None:
        """What an event leads to, after the record that it led to is durable."""
        self._save()
        for action in actions:
            self._do(action)

    def _save(self) -> None:
        if self.plan.record != self.store.record:
            self.store.save(self.plan.record)
            self._announce_self()

    def _announce_self(self) -> None:
        if (line := describe(self.plan.record)) != self._told:
            self._told = line
            log.info("%s", line)
            self._tell(line)

    def _do(self, action: Action) -> None:
        match action:
            case Collect():
                self.store.collect()
            case Fetch(kind, ref):
                self._fetch(kind, ref)
            case Test(kind, ref):
                self._try(kind, ref)
            case Restart():
                self._leaving = True
                self._restart()

    def _fetch(self, kind: Kind, ref: Ref) -> None:
        """Bring what is missing, unpack, install. What came is counted, also when the rest did not."""
        came = 0

        def more(num_bytes: int) -> bool:
            nonlocal came
            came += num_bytes
            return not self._closing and self._events.empty()

        self._count()
        month = self._month()
        try:
            if not self.store.path(kind, ref.digest).is_dir():
                folder = self.store.staging(kind, ref.digest)
                release = self.store.release(folder)
                self._check_room(release, folder)
                for file in files(release):
                    if not (folder / file.name).exists():
                        budget = may_fetch(self.plan.record.usage, month, self._data_cap_mb)
                        left = None if budget is None else budget - came
                        self._fetcher.fetch(self.store.disk, file, folder, budget=left, more=more)
                if isinstance(release, RuntimeRelease):
                    unpack(self.store.disk, folder, [file.name for file in files(release)])
            self.store.install(kind, ref.digest)
            actions = self.plan.fetched(kind, ref)
        except DigestError as error:
            self._say(ref.release, error)
            actions = self.plan.rejected(kind, ref, str(error))
        except UpdateError as error:
            self._say(ref.release, error)
            put_off = not isinstance(error, DataCapError) and not self._events.empty()
            actions = [] if put_off else self.plan.failed(kind, self._clock())
        if came:
            self.plan.spent(month, came)
        self._follow(actions)

    @staticmethod
    def _check_room(release: AnyRelease, folder: Path) -> None:
        """Raises StoreError before a download that could not be kept."""
        wanted = sum(file.size for file in files(release) if not (folder / file.name).exists())
        if isinstance(release, RuntimeRelease):
            wanted *= UNPACKED
        with named(folder):
            free = shutil.disk_usage(folder).free
        if wanted + SPARE_BYTES > free:
            raise StoreError(
                f"{release.release} needs {wanted >> 20} MiB, {free >> 20} MiB are free",
                where=str(folder),
                remedy="Make room on the board's disk",
            )

    def _try(self, kind: Kind, ref: Ref) -> None:
        folder = self.store.path(kind, ref.digest)
        try:
            self._test(self.store.release(folder), folder)
            actions = self.plan.tested(kind, ref)
        except (DigestError, SelfTestError) as error:
            self._say(ref.release, error)
            actions = self.plan.rejected(kind, ref, str(error))
        self._follow(actions)

    def _say(self, about: str, error: UpdateError) -> None:
        """Once, not at each attempt."""
        if self._said.get(about) != str(error):
            self._said[about] = str(error)
            log.warning("%s: %s", type(error).__name__, error)
