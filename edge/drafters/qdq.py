"""A drafter's graph in standard ONNX operators (`tools/export/qdq.py`), whatever runs it: ONNX Runtime or TensorRT.

The graph reads its past from the first slots of a cache and gives the new rows' keys and values back, to be put behind
them. It is given the past in steps of PAST_STEP slots, of which a row's bias hides what it must not see: the shapes
then seldom change, and no tensor is ever empty, which engines are not all good at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge.drafters.cached import PREFILL_ROWS, Seen

PAST_STEP = 64  # slots
MOST_ROWS = PREFILL_ROWS  # of one pass
FEW_ROWS = 8  # a pass of decoding, which an engine is tuned for apart
USUAL_PAST = 512  # slots, likewise
INPUTS = ("ids", "positions", "bias", "wanted")  # of the graph, beside its past
HIDDEN = -30_000.0  # added to a score before softmax: its exponential is 0, and it is a float16

Half = NDArray[np.float16]
Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """Of a graph. vocab: the width of its logits."""

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int

    @property
    def planes(self) -> int:
        """Keys and values of each layer."""
        return 2 * self.layers

    @property
    def row(self) -> int:
        """Numbers of one slot in one plane."""
        return self.kv_heads * self.head_dim

    def pasts(self) -> list[str]:
        """The graph's inputs that are planes of the cache, in their order."""
        return [f"past.{layer}.{side}" for layer in range(self.layers) for side in ("key", "value")]


@dataclass(frozen=True)
class Profile:
    """Rows that a pass has where an engine runs it: usually, and at most."""

    usual: int
    most: int

    def shapes(self, name: str, shape: tuple[int, ...], slots: int) -> tuple[tuple[int, ...], ...]:
        """(least, usual, most) of an input of the graph; shape: with -1 where it may change."""
        pasts = PAST_STEP, min(USUAL_PAST, slots), slots
        return tuple(
            tuple(_sizes(name, shape, rows, past)) for rows, past in zip((1, self.usual, self.most), pasts, strict=True)
        )


PROFILES = (Profile(1, FEW_ROWS), Profile(MOST_ROWS, MOST_ROWS))  # decoding, and the rest


def _sizes(name: str, shape: tuple[int, ...], rows: int, past: int) -> tuple[int, ...]:
    if name.startswith("past."):
        return (past, *shape[1:])
    return (rows, past + rows) if name == "bias" else (rows,)


class Cache(Protocol):
    """float16 planes [planes, slots, row] somewhere, and beside them the rows of the latest pass."""

    @property
    def device(self) -> str:
        """As ONNX Runtime calls where it lies."""

    @property
    def latest(self) -> int:
        """The address of the latest rows, [planes, rows, row]."""

    def plane(self, number: int) -> int:
        """The address of a plane."""

    def take(self, start: int, rows: int) -> None:
        """Put the latest rows into the slots from `start` on."""

    def move(self, slots: Sequence[int], first: int) -> None:
        """See `Forward.move`."""

    def settle(self) -> None:
        """Wait until what was put and moved is where it belongs, for a reader that does not keep to our order."""


class Passes(Protocol):
    """A graph that is ready to run, over a cache of its own."""

    provider: str

    @property
    def cache(self) -> Cache: ...

    def run(self, ids: Int32, positions: Int32, bias: Half, wanted: Int32, past: int) -> NDArray[np.float32]:
        """One pass behind the first `past` slots; bias: [rows, past + rows]. Returns logits [n, vocab], which the next
        pass may overwrite, and leaves keys and values of the rows in `cache.latest`.
        """


class QdqForward:
    """A `Forward` over any `Passes`."""

    def __init__(self, passes: Passes, capacity: int) -> None:
        self.capacity, self.provider = capacity, passes.provider
        self._passes = passes
        self.move = passes.cache.move

    def run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> NDArray[np.float32]:
        """See `Forward.run`; more rows than a pass may hold take several."""
        if len(ids) <= MOST_ROWS:
            return self._run(ids, positions, start, wanted, tree)
        before = 0 if tree is None else tree.shape[1] - len(ids)  # slots of the tree that were there already
        logits = []
        for first in range(0, len(ids), MOST_ROWS):
            end = min(first + MOST_ROWS, len(ids))
            here = [row - first for row in wanted if first <= row < end]
            seen = None if tree is None else tree[first:end, : before + end]
            logits.append(self._run(ids[first:end], positions[first:end], start + first, here, seen).copy())
        return np.concatenate(logits)

    def _run(
        self, ids: Sequence[int], positions: Sequence[int], start: int, wanted: Sequence[int], tree: Seen | None
    ) -> NDArray[np.float32]:
        past = padded(start)
        logits = self._passes.run(
            np.array(ids, np.int32),
            np.array(positions, np.int32),
            _bias(len(ids), start, past, tree),
            np.array(wanted or [0], np.int32),  # the head always runs: for a row that nobody asks about where it must
            past,
        )
        self._passes.cache.take(start, len(ids))
        return logits[: len(wanted)]


def padded(slots: int) -> int:
    """Slots that a pass behind `slots` of them is given: whole steps, at least one."""
    return max(PAST_STEP, -(-slots // PAST_STEP) * PAST_STEP)


def _bias(rows: int, start: int, past: int, tree: Seen | None) -> Half:
    """[rows, past + rows]. Slots 0 .. hold the text and behind it, up to `start`, the tree; then nothing; then rows."""
    bias = np.zeros((rows, past + rows), np.float16)
    bias[:, start:past] = HIDDEN
    if tree is None:
        bias[:, past:][~np.tri(rows, dtype=np.bool_)] = HIDDEN
        return bias
    before = tree.shape[1] - rows
    bias[:, start - before : start][~tree[:, :before]] = HIDDEN
    bias[:, past:][~tree[:, before:]] = HIDDEN
    return bias


class HostCache:
    """A `Cache` in the host's memory. Untouched pages cost none, so it is paid for only as the text grows."""

    device = "cpu"

    def __init__(self, shape: Shape, capacity: int) -> None:
        self._slots = np.zeros((shape.planes, padded(capacity), shape.row), np.float16)
        self._latest = np.zeros(shape.planes * MOST_ROWS * shape.row, np.float16)
        self.latest = self._latest.ctypes.data

    def plane(self, number: int) -> int:
        return self._slots[number].ctypes.data

    def take(self, start: int, rows: int) -> None:
        planes, _, row = self._slots.shape
        latest = self._latest[: planes * rows * row].reshape(planes, rows, row)
        self._slots[:, start : start + rows] = latest

    def move(self, slots: Sequence[int], first: int) -> None:
        still = next((i for i, slot in enumerate(slots) if slot != first + i), len(slots))
        if old := list(slots[still:]):
            start = first + still
            self._slots[:, start : start + len(old)] = self._slots[:, old]

    def settle(self) -> None:
        """Everything is there at once."""
