"""What a board's process holds of memory beyond what it uses, and how the C library is told to give it back.

Only glibc knows these two; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

M_ARENA_MAX = -8  # mallopt(3)
HEAPS = 2


def keep_few_heaps() -> None:
    """Let all threads share HEAPS heaps: by default each thread has one of its own, which keeps what it once held."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Return to the system what was freed and lies between things that are still in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def untouched(num_bytes: int) -> mmap.mmap:
    """Zeros that take memory as they are written, in the smallest pages there are.

    NumPy asks for huge pages instead, and so a cache whose heads lie far apart would be all there with the first token.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a kernel without huge pages refuses, and has no need of it
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages
