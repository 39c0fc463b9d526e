"""The noise that target and drafters share: Philox4x32-10 words and the Gumbel numbers made of them (NumPy).

Philox: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The layout of key and counter and
the rounding of the Gumbel numbers are fixed by docs/sampling.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
CHUNK = 4096  # blocks at once: what is then live stays in a core's cache
GRID = 2.0**20  # Gumbel numbers are multiples of 1 / GRID

Words = NDArray[np.uint64]


def round_keys(key: tuple[int, int]) -> list[tuple[int, int]]:
    """The two key words of each round."""
    return [((key[0] + i * KEY_STEPS[0]) & MASK, (key[1] + i * KEY_STEPS[1]) & MASK) for i in range(ROUNDS)]


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10. Counter and result are 32-bit words held in uint64 arrays that broadcast together."""
    c0, c1, c2, c3 = counter
    m0, m1, mask, half = (np.uint64(word) for word in (*MULTIPLIERS, MASK, 32))
    for k0, k1 in round_keys(key):
        p0, p1 = c0 * m0, c2 * m1  # whole 64-bit products
        c0, c1 = (p1 >> half) ^ (c1 ^ np.uint64(k0)), p1 & mask
        c2, c3 = (p0 >> half) ^ (c3 ^ np.uint64(k1)), p0 & mask
    return c0, c1, c2, c3


def words(seed: int, position: int, blocks: NDArray[np.int64]) -> Words:
    """The four words of each block, [blocks] -> [blocks, 4]. seed and position: unsigned 64-bit numbers."""
    drawn = np.empty((blocks.size, 4), np.uint64)
    low, high, stream = (np.full(1, word, np.uint64) for word in (position & MASK, position >> 32, 0))
    for start in range(0, blocks.size, CHUNK):
        part = blocks[start : start + CHUNK].astype(np.uint64)
        for lane, word in enumerate(philox((part, low, high, stream), (seed & MASK, seed >> 32))):
            drawn[start : start + CHUNK, lane] = word
    return drawn


def gumbel_of(word: Words) -> NDArray[np.float64]:
    """Gumbel(0, 1) numbers on the grid for 32-bit words of any shape: -log(-log((word + 1/2) / 2^32))."""
    uniform = (word.astype(np.float64) + 0.5) * 2.0**-32
    return np.rint(-np.log(-np.log(uniform)) * GRID) / GRID


def gumbel(seed: int, position: int, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The noise of each token id at a position, [ids] -> [ids] float64. Ids are not negative, in any order."""
    if ids.size == 0:
        return np.zeros(0)
    blocks = ids >> 2
    first, last = int(blocks.min()), int(blocks.max())
    if last - first < ids.size:  # dense: neighbours share a block
        return gumbel_of(words(seed, position, np.arange(first, last + 1)).reshape(-1)[ids - 4 * first])
    return gumbel_of(words(seed, position, blocks)[np.arange(ids.size), ids & 3])


MIN_GUMBEL, MAX_GUMBEL = (float(number) for number in gumbel_of(np.array([0, MASK], np.uint64)))
