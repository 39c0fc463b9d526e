"""The lines of the meter's files, and reading them back, whatever a crash, a full disk or a copy did to them.

A line says what one opening of a session has cost *since its file began*, so each later line of the same file replaces
the earlier ones: a line that is lost is healed by the next, and one that is read twice counts once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from protocol.errors import OutriderError
from protocol.topics import tenant_of

SUFFIX = ".jsonl"


class RecordsError(OutriderError):
    """A directory of the meter that cannot be read or written."""

    exit_code = 74  # EX_IOERR


class Line(msgspec.Struct, frozen=True):
    """One line. Old readers skip keys that they do not know; new keys have defaults.

    at: UTC, when it was made; day: the UTC day that it is charged to; run: one start of one verifier; file: counts the
    run's files; seq: counts the run's lines; session: 16 hex digits; text: digest of the session's prompt and sampling;
    opening: counts the sessions that this run took; prompt: tokens of the prompt; start, end: the positions from start
    to before end were committed. The rest: see `cloud.usage.Usage`.
    """

    at: str
    day: str
    verifier: str
    run: str
    file: int
    seq: int
    target: str
    device: str
    session: str
    text: str
    opening: int
    prompt: int
    start: int
    end: int
    accepted: int = 0
    root_rows: int = 0
    draft_rows: int = 0
    prefill_rows: int = 0
    rebuilt_rows: int = 0
    engine_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """Lines with the same key replace each other."""
        return self.run, self.file, self.opening


_decoder = msgspec.json.Decoder(Line)


class Records:
    """The last line of each key. unreadable: lines that were torn."""

    def __init__(self) -> None:
        self.last: dict[tuple[str, int, int], Line] = {}
        self.unreadable = 0

    def add(self, data: bytes) -> Iterator[tuple[Line, Line | None]]:
        """Read lines; each that says something new, with the one that it replaces."""
        for piece in data.split(b"\n"):
            if not piece:
                continue
            try:
                line = _decoder.decode(piece)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.unreadable += 1
                continue
            before = self.last.get(line.key)
            if before is None or before.seq < line.seq:
                self.last[line.key] = line
                yield line, before

    @classmethod
    def read(cls, directories: Iterable[Path], until: str = "") -> Records:
        """All files in `directories` and below, but those that begin after the day `until`. Raises RecordsError."""
        records = cls()
        for directory in directories:
            if not directory.is_dir():
                raise RecordsError("no such directory", where=str(directory), remedy="Name `[metering] directory`.")
            for path in sorted(directory.rglob("*" + SUFFIX)):
                try:
                    for _ in records.add(path.read_bytes()):
                        pass
                except OSError as error:
                    raise RecordsError(f"cannot be read: {error.strerror}", where=str(path)) from None
        if until:
            records.last = {key: line for key, line in records.last.items() if line.day[: len(until)] <= until}
        return records


class Follower:
    """What other verifiers that share the directory, and earlier runs of this one, have committed in one UTC day."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._run = directory, run
        self._forget("")

    def _forget(self, day: str) -> None:
        self.day = ""  # while another thread asks
        self._records = Records()
        self._read_to: Counter[Path] = Counter()
        self._tokens: Counter[str] = Counter()
        self.day = day

    def tokens(self, day: str, tenant: str) -> int:
        return self._tokens[tenant] if day == self.day else 0

    def look(self, day: str) -> None:
        """Read what has come. Raises OSError."""
        if day != self.day:
            self._forget(day)
        for path in self._directory.glob(f"{day}-*{SUFFIX}"):
            if f"-{self._run}-" in path.name:
                continue
            with path.open("rb") as file:
                file.seek(self._read_to[path])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_to[path] += len(whole)
            for line, before in self._records.add(whole):
                known = before.end - before.start if before else 0
                self._tokens[tenant_of(line.device)] += line.end - line.start - known
