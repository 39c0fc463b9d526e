"""C that is compiled where it runs: once for a processor, compiler and version of a source, into the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Sums may be taken in any order, so that they fill vectors; infinities and not-a-numbers keep their meaning.
FLAGS = (
    "-std=c11", "-O3", "-march=native", "-shared", "-fPIC",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip
BUILD_S = 60.0


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library made of `<name>.c` beside this file; None where there is no compiler, or no place to keep it.

    Where OUTRIDER_NATIVE is 0 there is none either.
    """
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or os.environ.get("OUTRIDER_NATIVE") == "0":
        log.info("%s.c is not used: the slower way in Python does the same", name)
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        made = _cache() / f"{name}-{_digest(compiler, source)}.so"
        if not made.exists():
            _build(compiler, source, made)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        log.warning("%s.c cannot be built, the slower way in Python does the same: %s", name, told)
        return None


def function(library: str, name: str, *arguments: Any) -> Callable[..., None] | None:
    """A function of `<library>.c` that takes these and returns nothing; None where there is no such library.

    Raises AttributeError for a name that is not in it.
    """
    loaded = load(library)
    if loaded is None:
        return None
    found = loaded[name]  # one of its own at each call, so that its types are nobody else's
    found.argtypes, found.restype = arguments, None
    return found


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outrider"


def _digest(compiler: str, source: Path) -> str:
    """Of all that decides what comes out; homes may be shared between machines."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=BUILD_S).stdout
    parts = (source.read_bytes(), version, " ".join(FLAGS).encode(), platform.machine().encode(), cpu.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(compiler: str, source: Path, made: Path) -> None:
    """Under another name first: a reader sees the whole library or none."""
    made.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
        out = Path(scratch) / made.name
        command = [compiler, *FLAGS, str(source), "-o", str(out), "-lm"]
        subprocess.run(command, capture_output=True, check=True, text=True, timeout=BUILD_S)
        os.replace(out, made)
