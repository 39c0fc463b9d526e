"""What the board tells its service manager: that it serves, what it does, and, as long as it gets on, that it lives.

The protocol is sd_notify(3): a datagram of `NAME=value` lines to the socket that the environment names. Without a
service manager nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TextIO

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often the board's loops are looked at
STUCK_S = 30.0  # the longest turn of a loop where no watchdog says otherwise
AGAIN_S = 600.0  # for a process that begins again: a runtime, a drafter and its self-test are loaded in silence
SEND_S = 1.0  # a manager that does not read must not hold us up
STATUS_BYTES = 400


class Watch:
    """Decides what the service manager is told.

    watchdog_s: after so many seconds without a sign of life the manager ends the process, None: it does not watch. A
    loop may take half of that for a turn; a longer one ends the signs of life, of which there are four in watchdog_s.
    """

    def __init__(self, watchdog_s: float | None = None) -> None:
        self.stuck_s = watchdog_s / 2 if watchdog_s else STUCK_S
        self.look_s = min(LOOK_S, self.stuck_s / 4)
        self._feed_s = watchdog_s / 4 if watchdog_s else None
        self._feed_at = 0.0
        self._said = ""

    def stuck(self, loops: Mapping[str, float], now: float) -> str:
        """Which loop has not turned for too long; empty where all get on. loops: when each last turned."""
        for name, turned_at in loops.items():
            if now - turned_at > self.stuck_s:
                return f"{name} has not got on for more than {self.stuck_s:g} s"
        return ""

    def look(self, loops: Mapping[str, float], status: str, now: float) -> list[str]:
        """The lines to send now. status: what the board does, for a person."""
        stuck = self.stuck(loops, now)
        lines = []
        said = one_line(f"stuck: {stuck}" if stuck else status)
        if said != self._said:
            self._said = said
            lines.append(f"STATUS={said}")
        if self._feed_s is not None and not stuck and now >= self._feed_at:
            self._feed_at = now + self._feed_s
            lines.append("WATCHDOG=1")
        return lines


class Notifier:
    """The socket to the service manager. Used by one thread.

    address: a path, or the name of an abstract socket behind "@"; empty: there is no manager.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._socket: socket.socket | None = None
        if address.startswith(("/", "@")):
            self._address = "\0" + address[1:] if address.startswith("@") else address
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0))
            self._socket.settimeout(SEND_S)
        elif address:
            log.warning("NOTIFY_SOCKET=%s is of no kind that is known here; the service manager hears nothing", address)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Notifier:
        """As a service manager's environment says it: NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID."""
        return cls(environment.get("NOTIFY_SOCKET", ""), watchdog_s(environment, os.getpid()))

    def send(self, *lines: str) -> None:
        if self._socket is None or not lines:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager does not hear us: %s", error)

    def status(self, text: str) -> None:
        self.send(f"STATUS={one_line(text)}")


class Service:
    """A board under a service manager, from its start to its end. Used by one thread.

    loops, status: see `Board`.
    """

    def __init__(self, notifier: Notifier, loops: Callable[[], Mapping[str, float]], status: Callable[[], str]) -> None:
        self._notifier, self._loops, self._status = notifier, loops, status
        self._watch = Watch(notifier.watchdog_s)
        self._stuck = ""

    def ready(self) -> None:
        """Applications on the board are served from now on."""
        watchdog_s = self._notifier.watchdog_s
        self._notifier.send("READY=1", *([] if watchdog_s is None else [f"WATCHDOG_USEC={round(watchdog_s * 1e6)}"]))

    def look(self) -> float:
        """Tell the manager what there is to tell; returns the seconds until it should be called again."""
        now, loops = time.monotonic(), self._loops()
        if (stuck := self._watch.stuck(loops, now)) != self._stuck:
            self._stuck = stuck
            log.error("%s", stuck) if stuck else log.info("it gets on again")
        self._notifier.send(*self._watch.look(loops, self._status(), now))
        return self._watch.look_s

    def beginning_again(self) -> None:
        """The process becomes another release under the same id: no stop, and `ready` comes anew."""
        extended = [] if self._notifier.watchdog_s is None else [f"WATCHDOG_USEC={round(AGAIN_S * 1e6)}", "WATCHDOG=1"]
        self._notifier.send("STATUS=beginning again with another release", *extended)

    def stopping(self) -> None:
        self._notifier.send("STOPPING=1", "STATUS=stopping")


def watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    """How long the service manager waits for a sign of life of this process; None where it does not."""
    if environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    with suppress(KeyError, ValueError):
        microseconds = int(environment["WATCHDOG_USEC"])
        return microseconds / 1e6 if microseconds > 0 else None
    return None


def one_line(text: str) -> str:
    """`text` as a status may be: without line breaks, and short."""
    line = " ".join(text.split())
    return line if len(line) <= STATUS_BYTES else line[: STATUS_BYTES - 1] + "…"


# -- logs -------------------------------------------------------------------------------------------------------------

SEVERITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


class JournalFormatter(logging.Formatter):
    """Each line behind its syslog severity in <>, by which the journal sorts and colours it; see sd-daemon(3)."""

    def format(self, record: logging.LogRecord) -> str:
        severity = next((number for level, number in SEVERITIES if record.levelno >= level), 7)
        return "\n".join(f"<{severity}>{line}" for line in super().format(record).splitlines())


def is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether what is written to `stream` goes to the journal: its device and inode are JOURNAL_STREAM's."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"
