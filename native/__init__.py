"""C that is compiled where it runs: once for a processor, compiler and version of a source, into the user's cache."""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from native import compiling

log = logging.getLogger(__name__)

# Sums may be taken in any order, so that they fill vectors; infinities and not-a-numbers keep their meaning.
FLAGS = (
    "-std=c11", "-O3", "-march=native", "-shared", "-fPIC",
    "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
)  # fmt: skip


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library made of `<name>.c` beside this file; None where there is no compiler, or no place to keep it.

    Where OUTRIDER_NATIVE is 0 there is none either.
    """
    compiler = compiling.compiler()
    if compiler is None or compiling.is_left_out():
        log.info("%s.c is not used: the slower way in Python does the same", name)
        return None
    source = Path(__file__).with_name(f"{name}.c")
    try:
        made = compiling.cached(f"{name}-{_processor()}", compiler, [source], FLAGS)
        return ctypes.CDLL(str(made))
    except (OSError, subprocess.SubprocessError) as error:
        told = compiling.told(error)
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


def _processor() -> str:
    """A digest of what the processor can do, which `-march=native` goes by; homes may be shared between machines."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else [platform.processor()]
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    return compiling.digest([cpu.encode()])
