"""The board's loader: from whatever a power cut has left to a runtime, a model and settings that work.

What is on trial comes first, then what was committed, what was committed before that, and what was flashed, which is
never removed. The runtime that was flashed always starts first and counts the starts, so that a release that cannot
even be imported is rolled back like any other.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from edge.config import EdgeConfig
from edge.updates.errors import SelfTestError, StoreError, UpdateError
from edge.updates.judge import Rule
from edge.updates.manifest import KINDS, Kind, SettingsRelease
from edge.updates.plan import Plan, Record, Ref, describe
from edge.updates.settings import Settings, apply
from edge.updates.store import Store
from edge.updates.wheels import SITE
from protocol.errors import ModelError

log = logging.getLogger(__name__)
T = TypeVar("T")

RUNTIME = "OUTRIDER_RUNTIME"  # in the environment: digest of the release that this process is; absent when flashed
STORE = "updates"  # in the board's state directory


def begin(config: EdgeConfig) -> Boot | None:
    """The board's start; None without `[updates]`, and where the store cannot be used: then what was flashed runs."""
    if config.updates is None:
        return None
    try:
        return Boot(config, Store(config.device.state / STORE, config.updates.keys).open())
    except StoreError as error:
        log.error("%s; starting what was flashed, and taking no updates", error)
        return None


def as_running(config: EdgeConfig) -> tuple[EdgeConfig, str]:
    """(the configuration under what is active, what that is for a person), for a command beside the service: nothing is
    changed. What was flashed and an empty text without `[updates]`. Raises UpdateError where the store cannot be read.
    """
    if config.updates is None:
        return config, ""
    store = Store(config.device.state / STORE, config.updates.keys).read()
    return _under(config, store, store.record), describe(store.record)


def _settings(store: Store, record: Record) -> Settings:
    ref = record.active("settings")
    if ref is None:
        return Settings()
    release = store.release(store.path("settings", ref.digest))
    if not isinstance(release, SettingsRelease):
        raise SelfTestError(f"{release.kind} instead of settings", where=ref.release)
    return release.settings


def _under(config: EdgeConfig, store: Store, record: Record) -> EdgeConfig:
    """Raises UpdateError for settings that cannot be read or do not fit the board's file."""
    config = apply(config, _settings(store, record))
    if (ref := record.active("model")) is not None:
        drafter = msgspec.structs.replace(config.drafter, model=store.path("model", ref.digest))
        config = msgspec.structs.replace(config, drafter=drafter)
    return config


class Boot:
    """One start. config: the board's file; `configured` is what it becomes under what is active."""

    def __init__(
        self, config: EdgeConfig, store: Store, *, now: float | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.config, self.store = config, store
        self._environ = environ
        self._plan = Plan(store.record, Rule())
        if RUNTIME not in environ:
            self._plan.started(time.time() if now is None else now)
        for kind in KINDS:
            while (ref := self.active(kind)) is not None and not store.intact(kind, ref):
                self.give_up(kind, ref, "its files are not what was installed")
        self._save()

    def active(self, kind: Kind) -> Ref | None:
        return self._plan.record.active(kind)

    def give_up(self, kind: Kind, ref: Ref, why: str) -> None:
        """What is active does not work: the next best is, from now on."""
        log.error("%s %s: %s; going back", kind, ref.release, why)
        trial = self._plan.record.trial
        if trial is not None and trial.kind == kind:
            self._plan.rejected(kind, ref, why)
        else:
            self._plan.lost(kind)
        self._save()

    def _save(self) -> None:
        """A disk that is full or read-only stops updates, not the board."""
        try:
            self.store.save(self._plan.record)
            self.store.collect()
        except StoreError as error:
            log.error("%s", error)

    def runtime(self) -> tuple[Path, dict[str, str]] | None:
        """(directory to import from, environment) of the runtime to become; None where this process is it already."""
        ref = self.active("runtime")
        if RUNTIME in self._environ or ref is None:
            return None
        site = self.store.path("runtime", ref.digest) / SITE
        return site, runtime_environment(site, ref.digest, self._environ)

    def become_runtime(self, arguments: Sequence[str]) -> None:
        """Go on as the active runtime with these arguments of `outrider-edge`; returns where that is this process."""
        if (found := self.runtime()) is not None:
            restart(arguments, found[1])

    def configured(self) -> EdgeConfig:
        """The configuration under the active model and settings."""
        while True:
            try:
                return _under(self.config, self.store, self._plan.record)
            except UpdateError as error:
                ref = self.active("settings")
                assert ref is not None
                self.give_up("settings", ref, str(error))

    def settings(self) -> Settings:
        """The active ones. Raises UpdateError where they cannot be read."""
        return _settings(self.store, self._plan.record)

    def load(self, load: Callable[[EdgeConfig], T]) -> tuple[EdgeConfig, T]:
        """The configuration, and what `load` makes of it: of the best model that it can load.

        Raises ModelError where not even the model that was flashed can be loaded.
        """
        while True:
            config = self.configured()
            try:
                loaded = load(config)
            except ModelError as error:
                if (ref := self.active("model")) is None:
                    raise
                self.give_up("model", ref, str(error))
            else:
                log.info("%s", describe(self._plan.record))
                return config, loaded


def runtime_environment(site: Path, digest: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Of a process that imports what a release holds first, and nothing from the directory that it starts in."""
    path = os.pathsep.join([str(site), *filter(None, [environ.get("PYTHONPATH")])])
    return {**environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", RUNTIME: digest}


def flashed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Of a process that is the runtime that was flashed, whichever this one is."""
    if RUNTIME not in environ:
        return dict(environ)
    ours = {name: value for name, value in environ.items() if name not in (RUNTIME, "PYTHONPATH", "PYTHONSAFEPATH")}
    _, _, path = environ["PYTHONPATH"].partition(os.pathsep)
    return {**ours, "PYTHONPATH": path} if path else ours


def restart(arguments: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by `outrider-edge` with these arguments; the process id stays."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, "-m", "edge", *arguments], dict(environ))
