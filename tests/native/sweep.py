"""`python -m tests.native.sweep`: the noise of every 32-bit word, the same number in NumPy, torch and C."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import click
import numpy as np
import torch
from rich.progress import track

from cloud import sampling
from native import board
from protocol.noise import gumbel_of

PART = 1 << 20  # words at once


def differing(start: int) -> np.ndarray:
    """Those of the PART words from `start` on for which the three do not agree, uint32."""
    words = np.arange(start, start + PART, dtype=np.uint32)
    ffi, lib = board.load()
    made = np.empty(PART)
    lib.noise_of(ffi.from_buffer("uint32_t[]", words), PART, ffi.from_buffer("double[]", made))
    numpy = gumbel_of(words.astype(np.uint64))
    torchs = sampling.gumbel_of(torch.from_numpy(words.astype(np.int64))).numpy()
    return words[(numpy != made) | (torchs != made)]


def sweep(parts: Iterable[int], threads: int) -> Iterator[np.ndarray]:
    """What differs in each part; parts: by their number."""
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda part: differing(part * PART), parts)


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def main(threads: int) -> None:
    """Compute the noise of all 2^32 words in NumPy, in torch and in C, and name the words that differ."""
    torch.set_num_threads(1)
    parts = (1 << 32) // PART
    found = np.concatenate(list(track(sweep(range(parts), threads), "sweeping", total=parts)))
    click.echo(f"{parts * PART} words, {found.size} differ{': ' if found.size else ''}{found[:20].tolist() or ''}")
    sys.exit(found.size > 0)


if __name__ == "__main__":
    main()
