"""Logs that a machine can read, and that a fault which repeats itself does not flood."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from cloud.ledger import Ledger
from cloud.usage import Observer
from protocol.topics import tenant_of

log = logging.getLogger(__name__)

FIELDS = ("tenant", "device", "session", "code", "verifier", "directory")
PAUSE_S = 10.0  # until a warning of the same kind is told again
MOST_KINDS = 1000
STORM, STORM_S = 20, 10.0  # evictions, and within how long
QUIET_CODES = frozenset({"draining"})


class Calm(logging.Filter):
    """Lets one warning or error of a kind through every PAUSE_S; the next says how many it stands for (`repeated`).

    A kind is logger, level, message before its arguments, tenant and code.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[object, ...], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = self._clock()
        given = record.__dict__
        kind = (record.name, record.levelno, record.msg, given.get("tenant"), given.get("code"))
        until, held = self._kinds.pop(kind, (now, 0))
        if now < until:
            self._kinds[kind] = until, held + 1
            return False
        self._kinds[kind] = now + PAUSE_S, 0
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if held:
            record.repeated = held
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then FIELDS, `repeated` and `exception` where known."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The same for a person."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return super().formatMessage(record) + (f" [{fields}]" if fields else "")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given = record.__dict__
    return {name: given[name] for name in (*FIELDS, "repeated") if name in given}


def configure(form: str, verbose: bool = False) -> None:
    """Send all logs to stderr. form: "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(Calm())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)


class LogObserver(Observer):
    """Tells of what an operator may have to do something about."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._evictions: deque[float] = deque(maxlen=STORM)

    def refused(self, device: str, code: str, what: str = "", session: int = 0) -> None:
        level = logging.INFO if code in QUIET_CODES else logging.WARNING
        fields = {"tenant": tenant_of(device), "device": device, "code": code}
        if session:
            fields["session"] = f"{session:016x}"
        # The kind is in the fields; what it says differs from device to device.
        log.log(level, "refused: %s", what or code, extra=fields)

    def evicted(self, ledger: Ledger) -> None:
        now = self._clock()
        self._evictions.append(now)
        if len(self._evictions) == STORM and now - self._evictions[0] <= STORM_S:
            what = "%d sessions lost their KV within %.1f s: more are active than fit, see kv_gib and [limits] sessions"
            fields = {"tenant": ledger.tenant, "device": ledger.device, "session": f"{ledger.session:016x}"}
            log.warning(what, STORM, now - self._evictions[0], extra=fields)
            self._evictions.clear()
