"""What must outlive the process: one append-only file a session, from which a restarted board goes on.

Each line is a JSON object: the request first, then epochs and committed ids as they come, then the end. A line that a
crash cut short is dropped; the verifier commits its tokens again.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from math import inf
from pathlib import Path

import msgspec

from edge.session import Request
from protocol.errors import OutriderError
from protocol.sampling import Sampling

KEPT = 100  # texts that are complete; those that are not stay until they are


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    session: str
    target: str
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    stop_ids: list[int]
    patience_s: float | None


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    epoch: int | None = None
    owner: str = ""
    ids: list[int] = []
    end: str = ""


class Entry(msgspec.Struct, frozen=True):
    """A session as its journal tells it. end: the finish reason, or "" for one that is to be gone on with; owner: its
    latest verifier.
    """

    request: Request
    committed: list[int]
    epoch: int
    end: str
    owner: str = ""


class SessionJournal:
    """The open file of one session. Lines reach the operating system at once, the disk when it likes: a killed
    process loses nothing, a power cut at most the latest tokens, which are drawn again.

    Raises OSError for a line that cannot be written whole; what comes after it would not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (lives as long as the session)

    def epoch(self, epoch: int, owner: str = "") -> None:
        """owner: the verifier that has the session in this epoch, once it is known."""
        self._write(_Line(epoch=epoch, owner=owner))

    def commit(self, ids: Sequence[int]) -> None:
        self._write(_Line(ids=list(ids)))

    def end(self, reason: str) -> None:
        self._write(_Line(end=reason))

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self, line: msgspec.Struct) -> None:
        data = msgspec.json.encode(line) + b"\n"
        if self._file.write(data) < len(data):  # a disk takes what fits and says nothing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Journal:
    """A folder of session files. Raises OutriderError for one that cannot be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            remedy = "Let this user write to `state` of [device], and see that its disk has room"
            raise OutriderError(f"cannot be made: {error.strerror}", where=str(folder), remedy=remedy) from None

    def begin(self, request: Request) -> SessionJournal:
        """Start the file of a new session; the request is on disk before this returns. Raises OSError."""
        self._forget_oldest()
        path = self._path(request.session)
        header = _Header(
            1,
            f"{request.session:016x}",
            request.target,
            list(request.prompt),
            request.sampling,
            request.max_tokens,
            list(request.stop_ids),
            None if request.patience_s == inf else request.patience_s,
        )
        part = path.with_suffix(".part")
        try:
            with open(part, "wb") as file:
                file.write(msgspec.json.encode(header) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
            return SessionJournal(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def resume(self, session: int) -> SessionJournal:
        """Go on with a file, after a torn last line was cut off. Raises OSError."""
        path = self._path(session)
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
        return SessionJournal(path)

    def entries(self) -> list[Entry]:
        """All sessions that can be read, oldest first."""
        return [entry for entry in map(read, self._paths()) if entry is not None]

    def unfinished(self) -> list[Entry]:
        return [entry for entry in self.entries() if not entry.end]

    def remove(self, session: int) -> None:
        self._path(session).unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)

    def _forget_oldest(self) -> None:
        for path in self._paths()[:-KEPT]:
            entry = read(path)
            if entry is None or entry.end:
                path.unlink(missing_ok=True)

    def _path(self, session: int) -> Path:
        return self.folder / f"{session:016x}.jsonl"


def read(path: Path) -> Entry | None:
    """The session of a journal file; None where not even its request can be read."""
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        request = _request_of(msgspec.json.decode(lines[0], type=_Header))
    except (IndexError, ValueError, msgspec.MsgspecError, OutriderError):
        return None
    committed: list[int] = []
    epoch, end, owner = 0, "", ""
    for raw in lines[1:]:
        try:
            line = msgspec.json.decode(raw, type=_Line)
        except msgspec.MsgspecError:
            break
        committed.extend(line.ids)
        epoch = line.epoch if line.epoch is not None else epoch
        end = line.end or end
        owner = line.owner or owner
    return Entry(request, committed, epoch, end, owner)


def _request_of(header: _Header) -> Request:
    return Request(
        int(header.session, 16),
        header.target,
        tuple(header.prompt),
        header.sampling,
        header.max_tokens,
        tuple(header.stop_ids),
        inf if header.patience_s is None else header.patience_s,
    )
