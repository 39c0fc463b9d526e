"""Coupled sampling, to the bit: the one specification that the target and every drafter follow (NumPy)."""

from __future__ import annotations

import math

import msgspec

from protocol.errors import WireError

SPEC_VERSION = 1

MAX_TEMPERATURE = 16.0


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
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
