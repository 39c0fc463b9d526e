"""Memory for weights: a step reads all of them, and with pages of 4 KiB waits for address translation as well."""

from __future__ import annotations

import mmap
from contextlib import suppress
from math import prod

import torch

LINE = 64  # bytes


class Arena:
    """Pieces of one zeroed mapping, in huge pages where the system has them. The pieces keep it alive.

    Raises OSError when the system grants no such mapping.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, max(num_bytes, LINE), flags=mmap.MAP_PRIVATE)
        self._taken = 0
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)

    @staticmethod
    def room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes that a piece takes."""
        return -(-prod(shape) * dtype.itemsize // LINE) * LINE

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next piece. Raises ValueError where there is not so much left."""
        piece = torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=self._taken)
        self._taken += self.room(shape, dtype)
        return piece.view(shape)
