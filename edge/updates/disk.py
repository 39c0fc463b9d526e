"""Every operation that changes the store, so that a test can record them and say what a power cut leaves of each.

Durable is what `sync` has named: of a file its bytes, of a directory its entries (made, renamed and removed ones). A
synced file in a directory that was not synced may be gone, and a rename that was not synced may not have happened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Disk(Protocol):
    """Raises OSError. Parents exist; renames stay in one directory."""

    def make_directory(self, path: Path) -> None:
        """One level; it may exist already."""

    def write(self, path: Path, data: bytes) -> None:
        """Make the file, or replace what is in it."""

    def append(self, path: Path, data: bytes) -> None: ...

    def truncate(self, path: Path, size: int) -> None: ...

    def rename(self, path: Path, name: str) -> None:
        """Atomically, within the directory; a file of that name is replaced."""

    def remove(self, path: Path) -> None:
        """A file, or an empty directory."""

    def sync(self, path: Path) -> None:
        """Of a file, or of a directory's entries; returns once they would survive a power cut."""


class PosixDisk:
    """The machine's own."""

    def make_directory(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def append(self, path: Path, data: bytes) -> None:
        with open(path, "ab") as file:
            file.write(data)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def rename(self, path: Path, name: str) -> None:
        path.rename(path.with_name(name))

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()

    def sync(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
