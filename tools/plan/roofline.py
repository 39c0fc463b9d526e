"""How long a verifier's step takes, by its rows and sessions, and how many sessions fit into one."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from protocol.errors import ConfigError


class Verifier(Protocol):
    """knee_rows: rows of one session up to which a step takes no longer than for one."""

    @property
    def knee_rows(self) -> float: ...

    @property
    def max_sessions(self) -> float:
        """What the memory holds."""

    def step_s(self, num_rows: float, num_sessions: float = 1) -> float:
        """A step over `num_rows` rows of `num_sessions` sessions together."""

    def sessions_to_knee(self, rows_each: float) -> float:
        """Sessions with `rows_each` rows that a step can take before its arithmetic, not memory, sets its time."""

    def sessions_to_stretch(self, rows_each: float, factor: float) -> float:
        """Sessions that a step can take before it lasts `factor` times as long as for one row of one session."""


@dataclass(frozen=True)
class Gpu:
    """bandwidth: bytes a second; arithmetic: 16-bit floating-point operations a second, dense; memory: bytes."""

    bandwidth: float
    arithmetic: float
    memory: float


# NVIDIA's data sheets: tensor cores, bfloat16, without sparsity (half of the figure printed with it); A100 with 80 GB,
# H100 and H200 as SXM.
GPUS = {
    "l4": Gpu(300e9, 121e12, 24e9),
    "a100": Gpu(2039e9, 312e12, 80e9),
    "h100": Gpu(3350e9, 989e12, 80e9),
    "h200": Gpu(4800e9, 989e12, 141e9),
}


@dataclass(frozen=True)
class Target:
    """A dense transformer with grouped-query attention. weight_bytes, kv_bytes: bytes a weight and a cached value."""

    num_params: float
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        if min(vars(self).values()) <= 0:
            raise ConfigError(f"{self} is no model", remedy="All of its sizes are above zero")

    @property
    def bytes_weights(self) -> float:
        return self.num_params * self.weight_bytes

    @property
    def bytes_kv_a_token(self) -> float:
        """Key and value of each KV head in each layer: Ainslie et al., arXiv 2305.13245."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes

    def operations_a_row(self, context: int) -> float:
        """2 a parameter, and 4·layers·heads·head_dim a token of context for attention (scores and their weighted sum):
        Kaplan et al., arXiv 2001.08361, table 1, where heads·head_dim is the attention's width.
        """
        return 2 * self.num_params + 4 * self.num_layers * self.num_heads * self.head_dim * context


# Published configurations of Qwen2.5-Coder.
TARGETS = {
    "qwen2.5-coder-1.5b": Target(1.54e9, num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128),
    "qwen2.5-coder-7b": Target(7.61e9, num_layers=28, num_heads=28, num_kv_heads=4, head_dim=128),
    "qwen2.5-coder-32b": Target(32.5e9, num_layers=64, num_heads=40, num_kv_heads=8, head_dim=128),
}


@dataclass(frozen=True)
class Roofline:
    """max(bytes / bandwidth, operations / arithmetic): Williams, Waterman and Patterson, Communications of the ACM
    52(4), 2009. A step reads the weights once and each session's KV once, whatever the number of its rows.

    context: tokens in each session's KV; reach: the share of both peaks that the engine gets, 1 for the bound itself.
    Raises ConfigError where the weights and one session do not fit into the memory.
    """

    target: Target
    gpu: Gpu
    context: int
    reach: float = 1.0

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise ConfigError(
                f"{self.target.bytes_weights / 1e9:.0f} GB of weights and {self._kv / 1e9:.2f} GB of KV a session do "
                f"not fit into {self.gpu.memory / 1e9:.0f} GB",
                remedy="Take a larger GPU, fewer bytes a weight or a shorter context",
            )

    @property
    def _kv(self) -> float:
        return self.context * self.target.bytes_kv_a_token

    @property
    def _bandwidth(self) -> float:
        return self.reach * self.gpu.bandwidth

    @property
    def _row_s(self) -> float:
        """The arithmetic of one row."""
        return self.target.operations_a_row(self.context) / (self.reach * self.gpu.arithmetic)

    @property
    def knee_rows(self) -> float:
        return self._memory_s(1) / self._row_s

    @property
    def max_sessions(self) -> float:
        return (self.gpu.memory - self.target.bytes_weights) // self._kv

    def _memory_s(self, num_sessions: float) -> float:
        return (self.target.bytes_weights + num_sessions * self._kv) / self._bandwidth

    def step_s(self, num_rows: float, num_sessions: float = 1) -> float:
        return max(self._memory_s(num_sessions), num_rows * self._row_s)

    def sessions_to_knee(self, rows_each: float) -> float:
        """s·rows·t_row = (weights + s·KV) / bandwidth, solved for s; inf where reading a session's KV takes longer than
        the arithmetic of its rows: then more sessions never get there.
        """
        surplus_s = rows_each * self._row_s - self._kv / self._bandwidth
        return self.target.bytes_weights / self._bandwidth / surplus_s if surplus_s > 0 else inf

    def sessions_to_stretch(self, rows_each: float, factor: float) -> float:
        limit_s = factor * self.step_s(1)
        by_memory = (limit_s * self._bandwidth - self.target.bytes_weights) / self._kv
        return min(by_memory, limit_s / (rows_each * self._row_s))


@dataclass(frozen=True)
class MeasuredStep:
    """A verifier as measured: `base_s` up to `knee_rows` rows, `row_s` more for each row beyond them."""

    base_s: float
    knee_rows: float
    row_s: float
    max_sessions: float = inf

    def __post_init__(self) -> None:
        if min(self.base_s, self.knee_rows, self.row_s) <= 0:
            raise ConfigError(f"{self} is no verifier", remedy="Step, knee and time a row are above zero")

    def step_s(self, num_rows: float, num_sessions: float = 1) -> float:
        return self.base_s + self.row_s * max(0.0, num_rows - self.knee_rows)

    def sessions_to_knee(self, rows_each: float) -> float:
        return self.knee_rows / rows_each

    def sessions_to_stretch(self, rows_each: float, factor: float) -> float:
        return (self.knee_rows + (factor - 1) * self.base_s / self.row_s) / rows_each
