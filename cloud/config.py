"""The verifier's configuration, section by section."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, field

from cloud.scheduler import Scheduler
from cloud.tenants import ANY, Contract
from cloud.verifier import Bounds
from link.config import BrokerConfig, Section, named_by_section
from protocol.topics import check_name

if TYPE_CHECKING:
    from cloud.engines.numerics import Numerics

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class EngineConfig(Section, frozen=True):
    """What runs the target. model: a directory made by `tools.export target`; kind: "vllm" needs `[numerics] mode =
    "fast"`, see docs/vllm.md; threads: 0 means all cores; kv_gib: memory for the KV caches of all sessions;
    verify_weights: compare the weights with their digest at start.
    """

    model: Path
    kind: Literal["torch", "vllm"] = "torch"
    threads: Annotated[int, Meta(ge=0)] = 0
    kv_gib: Annotated[float, Meta(gt=0)] = 4.0
    verify_weights: bool = False


class VllmConfig(Section, frozen=True):
    """What vLLM is told, by its own names, where `engine.kind` is "vllm". gpu_memory_utilization: the share of the
    device's memory that vLLM takes for everything, instead of `engine.kv_gib` for the KV cache; max_num_seqs,
    max_num_batched_tokens: of one step, `limits.sessions` and `scheduler.rows` where absent; max_model_len: tokens of
    the longest text, the target's context where absent.
    """

    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_num_seqs: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    block_size: Positive = 32
    max_model_len: Positive | None = None
    enforce_eager: bool = False


class NumericsConfig(Section, frozen=True):
    """How the target computes; see `cloud.engines.numerics.Numerics`, whose defaults count where a key is absent.

    isa, torch, bits: pinned parts of the numerics id; a machine that has others does not start.
    """

    mode: Literal["exact", "fast"] = "exact"
    dtype: Literal["", "float32", "bfloat16"] = ""
    row_tile: Positive | None = None
    query_tile: Positive | None = None
    key_multiple: Positive | None = None
    isa: str = ""
    torch: str = ""
    bits: str = ""

    def numerics(self) -> Numerics:
        from cloud.engines.numerics import Numerics

        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return Numerics(**{name: value for name, value in given.items() if value is not None})


class SchedulerConfig(Section, frozen=True):
    """rows: most rows of one step; prefill_chunk: of one session's prefill in a step; step_s: the longest step that is
    wished for, absent for the one that commits most; probe_s: how long the engine's steps are measured before it
    serves, 0 for not at all.
    """

    rows: Positive = 512
    prefill_chunk: Positive = 64
    step_s: Seconds = inf
    probe_s: Annotated[float, Meta(ge=0)] = 3.0

    def scheduler(self) -> Scheduler:
        return Scheduler(self.rows, self.prefill_chunk, self.step_s)


class LimitsConfig(Section, frozen=True):
    """See `cloud.verifier.Bounds`."""

    sessions: Positive = 64
    sessions_per_device: Positive = 8
    draft_rows: Annotated[int, Meta(ge=1, le=256)] = 48
    ahead: Positive = 64
    repair_s: Seconds = 1.5
    idle_s: Seconds = 60.0
    quiet_s: Seconds = 2.5

    def bounds(self) -> Bounds:
        return Bounds(
            sessions=self.sessions,
            sessions_per_device=self.sessions_per_device,
            draft_rows=self.draft_rows,
            ahead=self.ahead,
            repair_s=self.repair_s,
            idle_s=self.idle_s,
            quiet_s=self.quiet_s,
        )


class TenantConfig(Section, frozen=True):
    """See `cloud.tenants.Contract`; an absent key is no limit. tokens_per_day needs `[metering]`."""

    weight: Annotated[float, Meta(gt=0)] = 1.0
    sessions: Positive | None = None
    context: Positive | None = None
    rows_per_s: Annotated[float, Meta(gt=0)] = inf
    tokens_per_day: Positive | None = None
    patience_least_s: Annotated[float, Meta(ge=0)] = 0.0
    patience_most_s: Annotated[float, Meta(ge=0)] = inf

    def __post_init__(self) -> None:
        if self.patience_least_s > self.patience_most_s:
            raise ValueError(
                f"patience_least_s {self.patience_least_s:g} is over patience_most_s {self.patience_most_s:g}"
            )

    def contract(self) -> Contract:
        return Contract(**{name: getattr(self, name) for name in self.__struct_fields__})


class CloudConfig(Section, frozen=True):
    """verifier: this replica's name at the broker; one made anew at each start when absent. tenants: by the part of
    their devices' names before the dot, `"*"` for all that are not named.
    """

    engine: EngineConfig
    vllm: VllmConfig = VllmConfig()
    broker: BrokerConfig = BrokerConfig()
    numerics: NumericsConfig = NumericsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    verifier: str | None = None

    def __post_init__(self) -> None:
        if self.verifier is not None:
            with named_by_section():
                check_name(self.verifier, "verifier")
        for tenant in self.tenants.keys() - {ANY}:
            with named_by_section():
                check_name(tenant, "tenant")

    def contracts(self) -> dict[str, Contract]:
        return {tenant: config.contract() for tenant, config in self.tenants.items()}
