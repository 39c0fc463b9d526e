"""A build that takes minutes, told to whoever waits for it: a bar in a terminal, lines in a log, time from systemd."""

from __future__ import annotations

import logging
import os
import sys
import time
from math import inf
from threading import Lock
from typing import Any

from edge.systemd import Notifier

log = logging.getLogger(__name__)

LOG_S = 10.0  # between lines in the log
EXTEND_S = 300.0  # a step of the build may take that long, before a service manager takes the start for hung


class Building:
    """Use as a context; `told` may be called from any thread, and shows nothing until it is."""

    def __init__(self, notifier: Notifier | None = None) -> None:
        self._notifier = Notifier.of(os.environ) if notifier is None else notifier
        self._lock = Lock()
        self._bar: Any = None  # a rich.progress.Progress, once there is something to show
        self._said_at = -inf

    def __enter__(self) -> Building:
        return self

    def told(self, phase: str, share: float) -> None:
        """phase: what is being done; share: of all, 0 .. 1."""
        with self._lock:
            if sys.stderr.isatty():
                self._show(phase, share)
            now = time.monotonic()
            if now - self._said_at < LOG_S:
                return
            self._said_at = now
            text = f"building the drafter's engine: {100 * share:.0f} %, {phase}"
            if self._bar is None:
                log.info("%s", text)
            self._notifier.send(f"EXTEND_TIMEOUT_USEC={round(EXTEND_S * 1e6)}")
            self._notifier.status(text)

    def _show(self, phase: str, share: float) -> None:
        from rich.console import Console  # not loaded by the boards, nearly all, that never build
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        if self._bar is None:
            counts = BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
            columns = TextColumn("engine"), *counts, TextColumn("{task.description}")
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=1.0)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=share, description=phase)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
