"""Releases on disk, and the one file that says which of them run.

    record.json                the record: pointers, trial, serials; replaced by rename
    models/<digest>.new/       a release being fetched: its announcement, whole files, one `.part`
    models/<digest>/           a release, whole; runtimes/ and settings/ likewise
    models/<digest>.gone/      one being removed

The pointer is a file and no symbolic link: a link can name one release and no more, so that trial, serial and pointer
would change in several steps with a power cut between them, and what a link holds cannot be synced by itself.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from edge.updates.disk import Disk, PosixDisk
from edge.updates.errors import StoreError, UpdateError
from edge.updates.manifest import KINDS, PART, RESERVED, AnyRelease, Kind, files, open_payload
from edge.updates.plan import Record, Ref
from protocol.errors import OutriderError

log = logging.getLogger(__name__)

RECORD = "record.json"
FOLDERS: dict[Kind, str] = {"model": "models", "runtime": "runtimes", "settings": "settings"}
NEW, GONE = ".new", ".gone"
MAX_FORMAT = 1


class Store:
    """One board's releases below `root`, used by one process at a time. keys: trusted public keys, in hex.

    Every method that touches the disk raises StoreError for what the operating system refuses.
    """

    def __init__(self, root: Path, keys: tuple[str, ...], disk: Disk | None = None) -> None:
        self.root, self.keys, self.disk = root, keys, disk or PosixDisk()
        self.record = Record()

    def open(self) -> Store:
        """Make what is missing, and `read`."""
        with named(self.root):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self.disk.make_directory(self.root)
            for folder in FOLDERS.values():
                self.disk.make_directory(self.root / folder)
            self.disk.sync(self.root)
            self.disk.sync(self.root.parent)
        return self.read()

    def read(self) -> Store:
        """Read the record, and change nothing. Raises StoreError where there is one that cannot be read."""
        path = self.root / RECORD
        with named(path):
            try:
                self.record = msgspec.json.decode(path.read_bytes(), type=Record)
            except FileNotFoundError:
                return self
            except msgspec.MsgspecError as error:
                raise StoreError(
                    f"not a record: {error}", where=str(path), remedy="Remove it to begin with what was flashed"
                ) from error
        if self.record.format > MAX_FORMAT:
            raise StoreError(
                f"a record of format {self.record.format}", where=str(path), remedy="Update what is flashed"
            )
        return self

    def save(self, record: Record) -> None:
        """Make a record the one that the next start reads. It is durable when this returns."""
        if record != self.record:
            self._replace(self.root / RECORD, msgspec.json.format(msgspec.json.encode(record)))
            self.record = record

    def path(self, kind: Kind, digest: str) -> Path:
        return self.root / FOLDERS[kind] / digest

    def staging(self, kind: Kind, digest: str) -> Path:
        return self.root / FOLDERS[kind] / f"{digest}{NEW}"

    def stage(self, kind: Kind, digest: str, payload: bytes) -> None:
        """Make room for a release to be fetched, with the announcement that it is fetched by."""
        folder = self.staging(kind, digest)
        with named(folder):
            if self.path(kind, digest).is_dir():
                folder = self.path(kind, digest)  # nothing to fetch, but it may be announced by another name now
            else:
                self.disk.make_directory(folder)
                self.disk.sync(folder.parent)
        if not (folder / RESERVED).is_file() or (folder / RESERVED).read_bytes() != payload:
            self._replace(folder / RESERVED, payload)

    def release(self, folder: Path) -> AnyRelease:
        """What is or will be in a directory, from its announcement, whose signature is verified again.

        Raises StoreError, or what `open_payload` raises.
        """
        with named(folder):
            try:
                payload = (folder / RESERVED).read_bytes()
            except FileNotFoundError:
                raise StoreError("no announcement in it", where=str(folder)) from None
        return open_payload(payload, self.keys)

    def install(self, kind: Kind, digest: str) -> Path:
        """Turn what was staged, now whole, into a release. Durable when this returns; doing it twice is harmless."""
        path, staging = self.path(kind, digest), self.staging(kind, digest)
        with named(staging):
            if not path.is_dir():
                for below in _bottom_up(staging):
                    self.disk.sync(below)
                self.disk.sync(staging)
                self.disk.rename(staging, digest)
            self.disk.sync(path.parent)
        return path

    def intact(self, kind: Kind, ref: Ref) -> bool:
        """Whether a release's files are there with their sizes; its digests were checked when it was installed."""
        folder = self.path(kind, ref.digest)
        try:
            release = self.release(folder)
            return release.kind == kind and all((folder / f.name).stat().st_size == f.size for f in files(release))
        except (OSError, OutriderError) as error:
            log.error("%s: %s", folder, error)
            return False

    def collect(self) -> None:
        """Remove what the record does not keep. A release is renamed first, so that no half of one has its name."""
        for kind in KINDS:
            folder, kept = self.root / FOLDERS[kind], self.record.kept(kind)
            wanted = self.record.slot(kind).wanted
            with named(folder):
                for path in sorted(folder.iterdir()):
                    digest = path.name.removesuffix(NEW)
                    if path.name in kept or (path.name.endswith(NEW) and wanted and digest == wanted.digest):
                        continue
                    self._remove(path)

    def _remove(self, path: Path) -> None:
        if not path.name.endswith(GONE):
            gone = path.with_name(path.name + GONE)
            if gone.exists():
                self._remove(gone)
            self.disk.rename(path, gone.name)
            self.disk.sync(path.parent)
            path = gone
        if path.is_dir():
            for below in _bottom_up(path):
                self.disk.remove(below)
        self.disk.remove(path)

    def _replace(self, path: Path, data: bytes) -> None:
        part = path.with_name(path.name + PART)
        with named(path):
            self.disk.write(part, data)
            self.disk.sync(part)
            self.disk.rename(part, path.name)
            self.disk.sync(path.parent)


@contextmanager
def named(where: Path) -> Iterator[None]:
    """Around what touches the disk: what the operating system refuses is a StoreError."""
    try:
        yield
    except UpdateError:
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreError(
            error.strerror or str(error),
            where=str(error.filename or where),
            remedy="Make room on the board's disk" if full else "Check the board's state directory",
        ) from error


def _bottom_up(folder: Path) -> list[Path]:
    """Everything below a directory, what is in a directory before it."""
    return sorted(folder.rglob("*"), key=lambda path: (-len(path.parts), path))
