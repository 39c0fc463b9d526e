"""The guesses behind a row, of a whole vocabulary or a shortlist: in C where the board's library is, else in NumPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.drafters import shortlist
from native import board
from protocol import sampling as twin
from protocol.errors import SamplingError
from protocol.sampling import Floats, Ids, Sampling


def rank(
    logits: NDArray[np.float32],
    position: int,
    sampling: Sampling,
    n: int,
    ids: NDArray[np.int32] | None = None,
) -> tuple[Ids, Floats]:
    """What `protocol.sampling.rank` gives for logits [m] of the tokens `ids` [m], ascending; of all tokens, where None.

    All other tokens count as if their logits were minus infinity.
    """
    library = board.find()
    if library is None:
        return by_twin(logits, position, sampling, n, ids)
    return _rankers.of(library).rank(logits, position, sampling, n, ids)


def by_twin(
    logits: NDArray[np.float32], position: int, sampling: Sampling, n: int, ids: NDArray[np.int32] | None = None
) -> tuple[Ids, Floats]:
    """`rank` without C."""
    if ids is not None:
        logits = shortlist.spread(logits, ids, int(ids[-1]) + 1)
    return twin.rank(logits, position, sampling, n)


class _Ranker:
    """A thread's room in the library, for as many logits as it was asked for yet."""

    def __init__(self, library: tuple[Any, Any]) -> None:
        self._ffi, self._lib = library
        self._room = 0
        self._ranker: Any = None

    def rank(
        self, logits: NDArray[np.float32], position: int, sampling: Sampling, n: int, ids: NDArray[np.int32] | None
    ) -> tuple[Ids, Floats]:
        ffi, m = self._ffi, logits.size
        n = min(n, m)
        self._make_room(m)
        best, probabilities = np.empty(n, np.int32), np.empty(n, np.float64)
        found = self._lib.ranker_rank(
            self._ranker,
            ffi.from_buffer("float[]", np.ascontiguousarray(logits, np.float32)),
            ffi.NULL if ids is None else ffi.from_buffer("int32_t[]", np.ascontiguousarray(ids, np.int32)),
            m,
            sampling.seed,
            position,
            sampling.temperature,
            sampling.top_k,
            sampling.top_p,
            n,
            ffi.from_buffer("int32_t[]", best),
            ffi.from_buffer("double[]", probabilities),
        )
        if found < 0:
            raise SamplingError(
                ffi.string(self._lib.board_error()).decode(), where="sampling", remedy=twin.BROKEN_LOGITS
            )
        return best[:found].astype(np.int64), probabilities[:found]

    def _make_room(self, m: int) -> None:
        if m <= self._room:
            return
        made = self._lib.ranker_alloc(m)
        if made == self._ffi.NULL:
            raise MemoryError(f"no room to rank {m} logits")
        self._ranker, self._room = self._ffi.gc(made, self._lib.ranker_free), m


class _Rankers(threading.local):
    ranker: _Ranker | None = None

    def of(self, library: tuple[Any, Any]) -> _Ranker:
        if self.ranker is None:
            self.ranker = _Ranker(library)
        return self.ranker


_rankers = _Rankers()
