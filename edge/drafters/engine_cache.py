"""Where a board keeps the engines that it has built, and which of them is the one for this board as it is now.

An engine is made for one GPU by one TensorRT; after an update of JetPack it is another's. So its file begins with the
key it was built for and a digest of what follows, and a file that says anything else is built again.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import re
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

MAGIC = b"outrider engine 1\n"
HEADER_BYTES = 4096  # the plan behind it begins on a page
SUFFIX = ".engine"
PACKAGE = r"^Package: nvidia-(?:l4t-core|jetpack)\n(?:.+\n)*?Version: (\S+)"
LEFT_S = 3600.0  # a part of a file that is older is written by nobody any more


@dataclass(frozen=True)
class Key:
    """What an engine depends on. platform: JetPack's Linux, "" where there is none; sm: the GPU's compute capability;
    weights: the model's digest; slots: of the longest past that it takes.
    """

    platform: str
    tensorrt: str
    sm: str
    weights: str
    slots: int

    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(asdict(self))).hexdigest()

    def path(self, directory: Path) -> Path:
        return directory / f"{self.weights[:12]}-{self.digest()[:12]}{SUFFIX}"


def platform(root: Path = Path("/")) -> str:
    """The release of Jetson Linux, which each JetPack brings its own of: "36.4.3". "" on other machines."""
    with suppress(OSError):
        said = (root / "etc/nv_tegra_release").read_text(errors="replace")
        if found := re.search(r"R(\d+).*?REVISION:\s*([\d.]+)", said):
            return f"{found[1]}.{found[2]}"
    with suppress(OSError):
        packages = (root / "var/lib/dpkg/status").read_text(errors="replace")
        if found := re.search(PACKAGE, packages, re.MULTILINE):
            return found[1]
    return ""


def read(directory: Path, key: Key) -> memoryview | None:
    """The engine for `key`, mapped into memory; None where there is none or where it is not whole."""
    path = key.path(directory)
    try:
        with path.open("rb") as file:
            header = _header(file.read(HEADER_BYTES))
            if header is None or header.get("key") != asdict(key):
                log.warning("%s is not an engine for this board: it is built again", path)
                return None
            whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s): it is built again", path, error)
        return None
    plan = whole[HEADER_BYTES:]
    if len(plan) != header.get("size") or hashlib.sha256(plan).hexdigest() != header.get("sha256"):
        log.warning("%s is damaged: it is built again", path)
        return None
    return plan


def write(directory: Path, key: Key, plan: Any) -> None:
    """Keep an engine, whole or not at all, and drop those of this model that it replaces. Raises OSError.

    plan: bytes, or what gives them as a buffer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f".*{SUFFIX}"):  # by a board that lost its power in the midst of this
        if time.time() - left.stat().st_mtime > LEFT_S:
            left.unlink(missing_ok=True)
    plan = memoryview(plan).cast("B")
    said = {"key": asdict(key), "size": len(plan), "sha256": hashlib.sha256(plan).hexdigest()}
    header = (MAGIC + msgspec.json.encode(said)).ljust(HEADER_BYTES - 1) + b"\n"
    number, name = tempfile.mkstemp(prefix=".", suffix=SUFFIX, dir=directory)
    part = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(header)
            file.write(plan)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, key.path(directory))
    finally:
        part.unlink(missing_ok=True)
    for other in directory.glob(f"{key.weights[:12]}-*{SUFFIX}"):
        if other != key.path(directory):
            log.info("dropping %s, which this board has no more use for", other)
            other.unlink(missing_ok=True)


def _header(block: bytes) -> dict[str, Any] | None:
    if not block.startswith(MAGIC):
        return None
    try:
        return msgspec.json.decode(block[len(MAGIC) :], type=dict[str, Any])
    except msgspec.DecodeError:
        return None
