"""Coupled sampling, to the bit: the one specification that the target and every drafter follow (NumPy)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from protocol.errors import SamplingError, WireError
from protocol.noise import MAX_GUMBEL, MIN_GUMBEL, gumbel

SPEC_VERSION = 1

MAX_TEMPERATURE = 16.0
WEIGHT_ONE = 2.0**32  # the weight of the best token in top-p; all weights are integers, and so are their sums
NEAR = 9.0  # below the peak over the temperature: most nuclei end above it
BROKEN_LOGITS = "The model's weights or numerics are broken, or the temperature is far too small"  # what to do then
PREFIXES = (256, 4096)  # how many of the best tokens top-p looks at before it sorts the whole vocabulary

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How a token is drawn from logits. Travels as a map, so that an unknown parameter is refused by its name.

    temperature: 0 is plain argmax; top_k: 0 is off; top_p: 1 is off; seed: unsigned 64 bits, ignored at T = 0.
    Raises WireError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= MAX_TEMPERATURE):
            raise WireError(f"temperature {self.temperature} is not in 0..{MAX_TEMPERATURE}", where="sampling")
        if not 0 <= self.top_k < 1 << 31:
            raise WireError(f"top_k {self.top_k} is not in 0..2^31-1", where="sampling")
        if not 0.0 < self.top_p <= 1.0:
            raise WireError(f"top_p {self.top_p} is not in (0, 1]", where="sampling")
        if not 0 <= self.seed < 1 << 64:
            raise WireError(f"seed {self.seed} is not an unsigned 64-bit number", where="sampling")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def choose(logits: NDArray[np.float32], position: int, sampling: Sampling) -> int:
    """The token at `position`, from its logits [vocab]: docs/sampling.md, to the bit.

    Raises SamplingError for logits that hold NaN or plus infinity, or nothing above minus infinity.
    """
    if sampling.greedy:
        _peak(logits, 1.0)
        return int(logits.argmax())  # the first of equals
    return int(rank(logits, position, sampling, 1)[0][0])


def rank(logits: NDArray[np.float32], position: int, sampling: Sampling, n: int) -> tuple[Ids, Floats]:
    """The n tokens most likely to be drawn at `position`, best first, from logits [vocab]: ids [m], probabilities [m].

    m is less than n where fewer tokens survive top-k and top-p. At T = 0 by logit, with softmax probabilities at T = 1;
    at T > 0 by noised score, so that the first is what `choose` gives, with probabilities after temperature, top-k and
    top-p. Raises as `choose` does.
    """
    temperature = sampling.temperature or 1.0
    peak = _peak(logits, temperature)
    if sampling.greedy:
        ids = _leading(logits, n)
        ids = ids[logits[ids] > -math.inf]
        return ids, np.exp(_scaled(logits[ids], 1.0) - peak) / _relative(logits, 1.0, peak).sum()
    ids = _survivors(logits, sampling, peak)
    scaled = _scaled(logits[ids], temperature)
    mass = np.exp(scaled - peak)
    # At least n tokens end above the n-th best value and the least noise: what cannot reach that needs no noise.
    sure = np.partition(scaled, -n)[-n] + MIN_GUMBEL if n < ids.size else -math.inf
    near = np.flatnonzero(scaled + MAX_GUMBEL >= sure)
    best = near[_leading(scaled[near] + gumbel(sampling.seed, position, ids[near]), n)]
    return ids[best], mass[best] / mass.sum()


def _peak(logits: NDArray[np.float32], temperature: float) -> float:
    """The greatest logit over the temperature: finite just where a token can be chosen, as a maximum keeps NaN."""
    peak = float(logits.max()) / temperature
    if not math.isfinite(peak):
        raise SamplingError(
            f"the greatest of {logits.size} logits over the temperature {temperature} is {peak}",
            where="sampling",
            remedy=BROKEN_LOGITS,
        )
    return peak


def _scaled(logits: NDArray[np.float32], temperature: float) -> Floats:
    scaled = logits.astype(np.float64)
    scaled /= temperature
    return scaled


def _relative(logits: NDArray[np.float32], temperature: float, peak: float) -> Floats:
    """Probabilities [m] over the greatest one."""
    relative = _scaled(logits, temperature)
    relative -= peak
    return np.exp(relative, out=relative)


def _descending(values: NDArray[np.floating]) -> Ids:
    """Indices of values [m], greatest first, equals by index."""
    if values.dtype != np.float32:
        return np.argsort(-values, kind="stable")
    # Value and index in one integer: sorting plain integers is several times as fast as a stable argsort.
    bits = (values + np.float32(0)).view(np.int32)  # + 0 makes one zero of two
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (-ordered.astype(np.int64) << 32) | np.arange(values.size)
    keys.sort()
    return keys & 0xFFFFFFFF


def _leading(values: NDArray[np.floating], n: int) -> Ids:
    """Indices of the first n of values [m], greatest first, equals by index."""
    if n >= values.size:
        return _descending(values)
    within = np.flatnonzero(values >= np.partition(values, -n)[-n])  # n of them, more where equals cross the border
    return within[_descending(values[within])[:n]]


def _survivors(logits: NDArray[np.float32], sampling: Sampling, peak: float) -> Ids:
    """The ids above minus infinity that top-k, then top-p leave, ascending."""
    if sampling.top_k:
        ids = _leading(logits, sampling.top_k)
        ids = ids[logits[ids] > -math.inf]
        if sampling.top_p < 1.0:
            weights = np.rint(_relative(logits[ids], sampling.temperature, peak) * WEIGHT_ONE)
            ids = ids[: _nucleus(weights, sampling.top_p * weights.sum())]
        return np.sort(ids)
    if sampling.top_p == 1.0:
        return np.flatnonzero(logits > -math.inf)
    weights = _relative(logits, sampling.temperature, peak)
    weights *= WEIGHT_ONE
    np.rint(weights, out=weights)
    share = sampling.top_p * weights.sum()
    for ids in _prefixes(logits, (peak - NEAR) * sampling.temperature):
        kept = _nucleus(weights[ids], share)
        if kept < ids.size:
            break
    return np.sort(ids[:kept])


def _prefixes(logits: NDArray[np.float32], floor: float) -> Iterator[Ids]:
    """Ever longer prefixes of all ids in descending order of value: first those above `floor`, if few."""
    near = np.flatnonzero(logits >= np.float32(floor))
    if near.size <= PREFIXES[-1]:
        yield near[_descending(logits[near])]
    for size in (*PREFIXES, logits.size):
        yield _leading(logits, size)


def _nucleus(weights: Floats, share: float) -> int:
    """How many of weights [m], in descending order of value, top-p keeps: those that less than `share` comes before."""
    return int(np.count_nonzero(np.cumsum(weights) - weights < share))
