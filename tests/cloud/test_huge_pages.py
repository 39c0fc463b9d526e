"""Memory for weights: pieces that do not overlap, and huge pages where the system gives them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cloud.engines.huge_pages import Arena  # noqa: E402

HUGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_pieces_lie_side_by_side_and_begin_as_zeros() -> None:
    shapes = [(3, 5), (7,), (2, 2, 9)]
    arena = Arena(sum(Arena.room(shape, torch.float32) for shape in shapes))
    pieces = [arena.zeros(shape, torch.float32) for shape in shapes]
    assert [tuple(piece.shape) for piece in pieces] == shapes
    assert not any(piece.any() for piece in pieces)
    for i, piece in enumerate(pieces):
        piece.fill_(i + 1)
    assert [piece.unique().tolist() for piece in pieces] == [[1.0], [2.0], [3.0]]
    with pytest.raises(ValueError):
        arena.zeros((1 << 20,), torch.float32)


def test_what_is_written_lies_in_huge_pages() -> None:
    if sys.platform != "linux" or "[never]" in SETTING.read_text():
        pytest.skip("the system gives no huge pages")
    piece = Arena(8 * HUGE).zeros((8 * HUGE // 4,), torch.float32).fill_(1.0)
    assert huge_bytes(piece.data_ptr() + HUGE) >= 6 * HUGE


def huge_bytes(address: int) -> int:
    """How much of the mapping around an address lies in huge pages, by the system's own account."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    raise AssertionError("the mapping is not listed")
