"""A runtime's wheels, unpacked into a directory that Python imports from."""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePosixPath

from edge.updates.disk import Disk
from edge.updates.errors import DigestError
from edge.updates.store import named

SITE = "site"
MAX_UNPACKED = 4 << 30  # bytes of one wheel


def unpack(disk: Disk, folder: Path, wheels: list[str]) -> None:
    """Unpack the wheels that lie in `folder` into its SITE, one over the other; to be synced by whoever installs it.

    Doing it again over what was left half-way gives the same. Raises DigestError for what is no wheel, StoreError.
    """
    site = folder / SITE
    with named(site):
        disk.make_directory(site)
    for name in wheels:
        try:
            with zipfile.ZipFile(folder / name) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                if sum(member.file_size for member in members) > MAX_UNPACKED:
                    raise DigestError("is too large unpacked", where=str(folder / name))
                for member in members:
                    _write(disk, site, _safe(member.filename, folder / name), archive.read(member))
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
            raise DigestError(f"not a wheel: {error}", where=str(folder / name)) from error


def _safe(name: str, wheel: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise DigestError(f"holds {name!r}, which is not below it", where=str(wheel))
    return path


def _write(disk: Disk, site: Path, name: PurePosixPath, data: bytes) -> None:
    with named(site):
        folder = site
        for part in name.parts[:-1]:
            folder = folder / part
            if not folder.is_dir():
                disk.make_directory(folder)
        disk.write(folder / name.parts[-1], data)
