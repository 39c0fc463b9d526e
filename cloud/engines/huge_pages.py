"""Weights in huge pages: a step reads all of them, and with pages of 4 KiB waits for address translation as well.

Two engines of SmolLM2-135M in one process took turns, one with its weights in huge pages, one without: steps of 4 rows
took 8 % less, of 8 rows 4 %, of 24 rows 3 % (medians of three runs). Gathering 900 MiB takes a second.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

SMAPS = Path("/proc/self/smaps")
HUGE = 2 << 20  # bytes
LEAST = 2 * HUGE  # of a mapping that is looked at
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # Linux 2.6.38, 6.1


def gather() -> int:
    """Move what this process has allocated so far into huge pages, where the system lets it; returns bytes moved.

    Memory that was marked as not for huge pages, such as a KV cache that is given back in small ones, stays as it is.
    The allocators cannot be told before: oneDNN's takes from the C library, which reads its settings when a process
    starts.
    """
    if sys.platform != "linux" or not SMAPS.exists():
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for start, end in list(_mappings(SMAPS.read_text())):
        first, last = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if last - first < LEAST or madvise(first, last - first, MADV_HUGEPAGE):
            continue
        for at in range(first, last, HUGE):  # one at a time: it stops at the first that has no memory yet
            moved += HUGE if not madvise(at, HUGE, MADV_COLLAPSE) else 0
    return moved


def _mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Start and end of the private anonymous memory that may be put into huge pages."""
    span: tuple[int, int] | None = None
    for line in smaps.splitlines():
        words = line.split()
        if words[0] == "VmFlags:":
            if span is not None and "nh" not in words:
                yield span
        elif not words[0].endswith(":"):
            start, _, end = words[0].partition("-")
            anonymous = len(words) == 5 or words[5] == "[heap]"
            span = (int(start, 16), int(end, 16)) if words[1] == "rw-p" and anonymous else None
