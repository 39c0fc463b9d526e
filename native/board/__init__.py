"""The board's library: the C beside this file, as the wheel brought it or compiled at its first use, through cffi.

The same bits come out on every processor: one set of flags, no fused multiply-adds, sums in the order in which they are
written. Instruction sets are chosen where it runs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from native import compiling
from protocol.errors import OutriderError

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SHIPPED = FOLDER / "_board.so"
HEADERS = ("board.h", "decoder.h")
FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden",
)  # fmt: skip


class NativeError(OutriderError):
    """The board's library cannot be had here, or what OUTRIDER_ISA asks of it."""


@cache
def find() -> tuple[Any, Any] | None:
    """cffi's `(ffi, lib)` of the public headers; None, told once, where it cannot be had: twins in Python do the work.

    Raises NativeError where OUTRIDER_REQUIRE_NATIVE is 1, and for an OUTRIDER_ISA that this processor has not.
    """
    try:
        return load()
    except NativeError as error:
        if os.environ.get("OUTRIDER_REQUIRE_NATIVE") == "1" or os.environ.get("OUTRIDER_ISA"):
            raise
        log.info("the slower way in Python does the same: %s", error)
        return None


@cache
def load() -> tuple[Any, Any]:
    """cffi's `(ffi, lib)` of the public headers. Raises NativeError where it cannot be had."""
    if compiling.is_left_out():
        raise NativeError("OUTRIDER_NATIVE is 0", where="native/board")
    if importlib.util.find_spec("cffi") is None:
        raise NativeError("there is no cffi", where="native/board", remedy="`pip install cffi`")
    import cffi

    ffi = cffi.FFI()
    ffi.cdef(declarations())
    lib = _open(ffi)
    wanted = os.environ.get("OUTRIDER_ISA")
    if lib.board_use(wanted.encode() if wanted else ffi.NULL):
        remedy = "Set OUTRIDER_ISA to another, or not at all."
        raise NativeError(ffi.string(lib.board_error()).decode(), where="OUTRIDER_ISA", remedy=remedy)
    log.info("the board's library computes with %s", ffi.string(lib.board_isa()).decode())
    return ffi, lib


def declarations() -> str:
    """What the public headers declare, as cffi takes it: without the preprocessor's lines."""
    lines = [line for name in HEADERS for line in (FOLDER / name).read_text().splitlines()]
    return "\n".join(line for line in lines if not line.startswith("#"))


def build(command: list[str], out: Path) -> None:
    """Compile the library into `out`. Raises OSError, subprocess.SubprocessError."""
    compiling.build(command, sources(), flags(), out)


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.c"))


def flags() -> tuple[str, ...]:
    """OUTRIDER_CFLAGS adds to them what changes no number, as sanitizers."""
    return (*FLAGS, *os.environ.get("OUTRIDER_CFLAGS", "").split())


def compiled() -> Path:
    """The library as this machine's compiler makes it, in the user's cache. Raises NativeError."""
    command = compiling.compiler()
    if command is None:
        remedy = "Install a wheel for this platform, or a C compiler."
        raise NativeError("neither a library for this machine nor a compiler", where=str(FOLDER), remedy=remedy)
    try:
        return compiling.cached("board", command, sources(), flags(), about=sorted(FOLDER.glob("*.h")))
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeError(f"it cannot be built: {compiling.told(error)}", where=str(FOLDER)) from error


def _open(ffi: Any) -> Any:
    if SHIPPED.exists() and not os.environ.get("OUTRIDER_CFLAGS"):
        try:
            return ffi.dlopen(str(SHIPPED))
        except OSError as error:  # for another processor, or a newer C library
            log.warning("the library that came with the package cannot be used: %s", error)
    made = compiled()
    try:
        return ffi.dlopen(str(made))
    except OSError as error:
        raise NativeError(f"cannot be loaded: {error}", where=str(made)) from error
