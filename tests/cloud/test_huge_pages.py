"""Memory in huge pages: what is in it stays, and what was marked otherwise is left alone."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys

import pytest

from cloud.engines import huge_pages

HUGE = huge_pages.HUGE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has them")


def huge_bytes(memory: mmap.mmap) -> int:
    """How much of a mapping lies in huge pages, by the system's own account."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    inside = False
    for line in huge_pages.SMAPS.read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address + HUGE < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the mapping is not listed")


def test_what_is_moved_stays_what_it_is() -> None:
    written, marked = mmap.mmap(-1, 8 * HUGE, mmap.MAP_PRIVATE), mmap.mmap(-1, 8 * HUGE, mmap.MAP_PRIVATE)
    marked.madvise(mmap.MADV_NOHUGEPAGE)
    for memory in (written, marked):
        for at in range(0, 8 * HUGE, 4096):
            memory[at] = at >> 12 & 0xFF
    if not huge_pages.gather():
        pytest.skip("the system gives no huge pages")
    for memory in (written, marked):
        assert all(memory[at] == at >> 12 & 0xFF for at in range(0, 8 * HUGE, 4096))
    assert huge_bytes(written) >= 6 * HUGE
    assert huge_bytes(marked) == 0


def test_memory_that_nobody_has_touched_is_not_filled() -> None:
    untouched = mmap.mmap(-1, 64 * HUGE, mmap.MAP_PRIVATE)
    huge_pages.gather()
    assert huge_bytes(untouched) == 0
