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
    "fast"`, see docs/vllm.md; threads: 0 means all cores; kv_gib: memory for the KV caches of all sessions, 0 for what
    the machine has room for, see docs/memory.md; verify_weights: compare the weights with their digest at start.
    """

    model: Path
    kind: Literal["torch", "vllm"] = "torch"
    threads: Annotated[int, Meta(ge=0)] = 0
    kv_gib: Annotated[float, Meta(ge=0)] = 0.0
    verify_weights: bool = False


class VllmConfig(Section, frozen=True):
    """What vLLM is told, by its own names, where `engine.kind` is "vllm". gpu_memory_utilization: the share of the
    device's memory that vLLM may use in all, where `engine.kv_gib` is 0; max_num_seqs, max_num_batched_tokens: of one
    step, `limits.sessions` and `scheduler.rows` where absent; max_model_len: tokens of the longest text, the target's
    context where absent.
    """

    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
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
    open_s: Seconds = 4.0
    messages_per_s: Annotated[float, Meta(ge=1)] = 500.0

    def bounds(self) -> Bounds:
        return Bounds(
            sessions=self.sessions,
            sessions_per_device=self.sessions_per_device,
            draft_rows=self.draft_rows,
            ahead=self.ahead,
            repair_s=self.repair_s,
            idle_s=self.idle_s,
            quiet_s=self.quiet_s,
            open_s=self.open_s,
            messages_per_s=self.messages_per_s,
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


class MeteringConfig(Section, frozen=True):
    """directory: where the meter writes, absent for no meter; flush_s: the longest that a session's usage is not yet on
    the disk.
    """

    directory: Path | None = None
    flush_s: Seconds = 5.0


class HttpConfig(Section, frozen=True):
    """Metrics and health. port: 0 for none; stuck_s: how long a step may take before `/healthz` says that it hangs."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    stuck_s: Seconds = 60.0


class ReplicasConfig(Section, frozen=True):
    """A fleet under Ray, see docs/cluster.md. least, most: how many, `least` where `most` is absent; cpus, gpus: of
    each, as Ray counts them; queue_low_s, queue_high_s: the queue time to keep, by one replica more or fewer after
    settle_s outside; start_s: until one that has its place must serve; hang_s: until one that says nothing is given up;
    drain_s: for leaving.
    """

    least: Positive = 1
    most: Positive | None = None
    cpus: Annotated[float, Meta(ge=0)] = 1.0
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    queue_low_s: Annotated[float, Meta(ge=0)] = 0.02
    queue_high_s: Seconds = 0.2
    settle_s: Seconds = 30.0
    start_s: Seconds = 600.0
    hang_s: Seconds = 20.0
    drain_s: Seconds = 20.0

    def __post_init__(self) -> None:
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most {self.most} is less than least {self.least}")
        if self.queue_low_s >= self.queue_high_s:
            raise ValueError(f"queue_low_s {self.queue_low_s:g} is not below queue_high_s {self.queue_high_s:g}")


class CloudConfig(Section, frozen=True):
    """verifier: this replica's name at the broker; one made anew at each start when absent. tenants: by the part of
    their devices' names before the dot, `"*"` for all that are not named. brokers: instead of `broker`, several at
    once, such as one for each tenant (docs/brokers.md); their names are for people.
    """

    engine: EngineConfig
    vllm: VllmConfig = VllmConfig()
    broker: BrokerConfig = BrokerConfig()
    brokers: dict[str, BrokerConfig] = field(default_factory=dict)
    numerics: NumericsConfig = NumericsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    limits: LimitsConfig = LimitsConfig()
    metering: MeteringConfig = MeteringConfig()
    http: HttpConfig = HttpConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    verifier: str | None = None

    def __post_init__(self) -> None:
        if self.verifier is not None:
            with named_by_section():
                check_name(self.verifier, "verifier")
        for tenant in self.tenants.keys() - {ANY}:
            with named_by_section():
                check_name(tenant, "tenant")
        if self.brokers and self.broker != BrokerConfig():
            raise ValueError("`[broker]` is for one broker, `[brokers.NAME]` for several: both are there")
        if len({broker.share_file for broker in self.brokers.values()}) > 1:
            raise ValueError("`share_file` must be the same in all of `[brokers.NAME]`")
        limited = [name for name, tenant in self.tenants.items() if tenant.tokens_per_day is not None]
        if limited and self.metering.directory is None:
            raise ValueError(f"`tokens_per_day` of tenant {limited[0]} needs `[metering] directory`, which counts them")

    @property
    def all_brokers(self) -> list[BrokerConfig]:
        """Where the verifier serves."""
        return list(self.brokers.values()) or [self.broker]

    @property
    def named_tenants(self) -> list[str]:
        return sorted(self.tenants.keys() - {ANY})

    def contracts(self) -> dict[str, Contract]:
        return {tenant: config.contract() for tenant, config in self.tenants.items()}
