"""How fast this machine reads memory, measured between the rivals that have to: the limit of a drafter's pass."""

from __future__ import annotations

import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

import native
from native import compiling
from protocol.errors import OutriderError

AHEAD = (0, 1024, 4096)  # bytes
PIECE = 64  # words: threads begin at cache lines of their own


class Stream:
    """Reads `num_bytes` of memory with so many threads at a time. Raises OutriderError where there is no C compiler."""

    def __init__(self, threads: int, num_bytes: int = 512 << 20) -> None:
        self._read = _kernel()
        self._words = np.ones(num_bytes // 8, np.uint64)  # huge pages where there are some, as NumPy asks for them
        self._pool = ThreadPoolExecutor(threads)
        edges = [round(i * self._words.size / threads) // PIECE * PIECE for i in range(threads + 1)]
        self._parts = [(start, end - start) for start, end in pairwise(edges)]
        self._bytes = 8 * sum(num for _, num in self._parts)
        self._ahead = max(AHEAD, key=lambda ahead: max(self.bytes_per_s(ahead) for _ in range(3)))

    def bytes_per_s(self, ahead: int | None = None) -> float:
        """Of one reading, by the best way that was found at the beginning."""
        address = self._words.ctypes.data
        far = self._ahead if ahead is None else ahead
        began = time.perf_counter()
        list(self._pool.map(lambda part: self._read(address + 8 * part[0], part[1], far), self._parts))
        return self._bytes / (time.perf_counter() - began)

    def close(self) -> None:
        self._pool.shutdown()


def _kernel():
    compiler = compiling.compiler()
    if compiler is None:
        raise OutriderError("no C compiler", where="the bandwidth", remedy="Install gcc or clang")
    made = compiling.cached("stream", compiler, [Path(__file__).with_name("stream.c")], native.FLAGS)
    read = ctypes.CDLL(str(made)).stream_read
    read.argtypes, read.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t), ctypes.c_uint64
    return read
