"""What a tool that computes with large tensors asks of the C library's allocator."""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
TOP_PAD = 1 << 28  # bytes that the heap grows by at least


def keep_freed() -> None:
    """Keep what is freed for the next tensor, where the C library is glibc.

    By default it gives every large block back to the system, and each intermediate result is made of pages that the
    kernel has to find and clear: on a virtual machine that took 20 of the 22 s of a forward pass over 2,000 tokens.
    """
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "gnu_get_libc_version"):
        return
    for parameter, value in (
        (M_MMAP_THRESHOLD, 32 << 20),
        (M_TRIM_THRESHOLD, -1),
        (M_TOP_PAD, TOP_PAD),
        (M_ARENA_MAX, 1),
    ):
        library.mallopt(parameter, value)
