"""C made into a shared library by `$CC`, whole or not at all, and kept in the user's cache. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

BUILD_S = 300.0  # a small board takes its time


def compiler(line: str = "") -> list[str] | None:
    """The compiler that a line names, else `$CC`, else `cc`, with its own arguments; None where there is none."""
    command = shlex.split(line or os.environ.get("CC") or "cc")
    return command if shutil.which(command[0]) else None


def is_left_out() -> bool:
    """Whether OUTRIDER_NATIVE is 0, so that nothing in C is used or built."""
    return os.environ.get("OUTRIDER_NATIVE") == "0"


def platform(command: Sequence[str]) -> str:
    """The platform that a compiler compiles for, as a wheel's tag names it: `linux_aarch64` for a cross compiler's.

    Raises OSError, subprocess.SubprocessError.
    """
    machine, _, system = _ask(command, "-dumpmachine").strip().partition("-")
    if "linux" not in system:
        return re.sub(r"[-.\s]", "_", sysconfig.get_platform())
    return f"linux_{'armv7l' if machine == 'arm' else machine}"


def cached(
    name: str, command: Sequence[str], sources: Sequence[Path], flags: Sequence[str], *, about: Sequence[Path] = ()
) -> Path:
    """The library of some sources in the user's cache, made at the first call.

    about: files beside the sources that decide what comes out, as headers do.
    Raises OSError, subprocess.SubprocessError; the output of a compiler that failed is in `stderr`.
    """
    parts = [path.read_bytes() for path in (*sources, *about)]
    parts += [_ask(command, "--version").encode(), _ask(command, "-dumpmachine").encode(), " ".join(flags).encode()]
    made = _cache() / f"{name}-{digest(parts)}.so"
    if not made.exists():
        build(command, sources, flags, made)
    return made


def build(command: Sequence[str], sources: Sequence[Path], flags: Sequence[str], made: Path) -> None:
    """Compile under another name first: a reader sees the whole library or none. Raises as `cached` does."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        out = Path(scratch) / made.name
        line = [*command, *flags, *map(str, sources), "-o", str(out), "-lm", "-lpthread"]
        subprocess.run(line, capture_output=True, check=True, text=True, timeout=BUILD_S)
        os.replace(out, made)


def digest(parts: Sequence[bytes]) -> str:
    """A short name for some content."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def told(error: Exception) -> str:
    """What the compiler said of an error, or the error itself."""
    said = isinstance(error, subprocess.CalledProcessError) and error.stderr
    return str(said or error).strip()


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider"


def _ask(command: Sequence[str], option: str) -> str:
    return subprocess.run([*command, option], capture_output=True, check=True, text=True, timeout=BUILD_S).stdout
