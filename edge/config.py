"""The board's configuration, section by section."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from edge.auto import AutoPolicy
from edge.calibration import Calibration
from edge.policy import ChainPolicy, NoDraftPolicy, Policy, SyncPolicy, TreePolicy
from edge.session import Timing
from edge.updates.config import UpdatesConfig
from link.config import BrokerConfig, Section, named_by_section
from protocol.errors import ConfigError
from protocol.sampling import Sampling
from protocol.topics import check_device, check_name

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
PolicyName: TypeAlias = Literal["auto", "chain", "tree", "sync", "none"]
MAX_PATIENCE_S = 1_000_000  # what fits `Open.patience_ms`


class DeviceConfig(Section, frozen=True):
    """name: `tenant.board`; state: the one directory that this board writes to."""

    name: str
    state: Path = Path("/var/lib/outrider")

    def __post_init__(self) -> None:
        with named_by_section():
            check_device(self.name)


class ExpectedConfig(Section, frozen=True):
    """How fast this kind of board drafts with 0.5B parameters in 4 bits, for the plan and the twin.

    pass_ms: a pass of one row; row_share: what each further row adds, as a share of it; prefill_tokens_per_s: of the
    prompt. source: where the figures are from; tested: whether they were measured with this runtime on this board.
    """

    pass_ms: Annotated[float, Meta(gt=0)]
    row_share: Annotated[float, Meta(ge=0)]
    prefill_tokens_per_s: Annotated[float, Meta(gt=0)]
    source: Annotated[str, Meta(min_length=1)]
    tested: bool = False


class BoardConfig(Section, frozen=True):
    """What the hardware is. kind: what releases call it, see docs/updates.md; hardware: a part of the name that its
    device tree gives, "" for any.

    cores: where the process may run: `all`, `big` for the fastest kind of core where there are several, or their
    numbers. memory_mib: most that it should take, 0 for what there is.
    power_modes: nvpmodel's names of the modes that the board may be in, none where it has no such thing.
    thermal_zones: types of the zones that are watched, all when none is named; hot_c: where the board slows itself
    down, when absent the lowest trip point that says so in sysfs.
    """

    kind: str = "generic"
    hardware: str = ""
    cores: Literal["all", "big"] | Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] = "all"
    memory_mib: Annotated[int, Meta(ge=0)] = 0
    power_modes: tuple[str, ...] = ()
    thermal_zones: tuple[str, ...] = ()
    hot_c: Annotated[float, Meta(ge=40, le=125)] | None = None
    expected: ExpectedConfig | None = None


class DrafterConfig(Section, frozen=True):
    """model: a directory made by `tools.export drafter`; kind: the runtime, `auto` for what it was exported for,
    `suffix` for no model at all; suffix: whether what was written before is guessed too, beside the model; threads: 0
    means all cores of [board]; providers: of ONNX Runtime; context: tokens that the cache holds, when absent 4096 or
    what the model takes; huge_pages: whether `native` copies the weights into such where the kernel has them. That is
    faster, and memory that no other process shares and the kernel cannot take back.

    On a GPU: device: its number; engines: where those that TensorRT builds are kept, when absent `engines` in the
    board's state; fp16: whether ONNX Runtime's TensorRT provider may compute in it.
    """

    model: Path
    kind: Literal["auto", "onnx", "native", "tensorrt", "litert", "suffix"] = "auto"
    suffix: bool = True
    threads: Annotated[int, Meta(ge=0)] = 0
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    context: Positive | None = None
    verify_weights: bool = False
    huge_pages: bool = True
    device: Annotated[int, Meta(ge=0)] = 0
    engines: Path | None = None
    fp16: bool = True


class DraftingConfig(Section, frozen=True):
    """How the board drafts. policy: see `edge.policy`; gamma is for `sync` alone; paced: guesses are gathered to the
    verifier's cadence, else each leaves as soon as it is made.
    """

    policy: PolicyName = "auto"
    lookahead: Positive = 24
    floor: Annotated[float, Meta(gt=0, lt=1)] = 0.05
    gamma: Positive = 4
    paced: bool = True

    def make(self, calibration: Calibration | None = None) -> Policy:
        """A policy for one session. calibration: what the board knows of its drafter, for `auto`."""
        match self.policy:
            case "auto":
                return AutoPolicy(calibration or Calibration(), paced=self.paced)
            case "chain":
                return ChainPolicy(self.lookahead, self.floor, self.paced)
            case "tree":
                return TreePolicy(self.lookahead, self.floor, paced=self.paced)
            case "sync":
                return SyncPolicy(self.gamma)
            case _:
                return NoDraftPolicy()


class SessionConfig(Section, frozen=True):
    """Defaults of a session. target: the target's id, needed where a broker serves several; patience_s: how long the
    verifier may hold a session without drafts, 0 never, inf for ever.
    """

    target: str | None = None
    patience_s: Annotated[float, Meta(ge=0)] = 0.0
    max_tokens: Positive = 512
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        with named_by_section():
            self.sampling(0)
            if self.target is not None:
                check_name(self.target, "target")
        if MAX_PATIENCE_S < self.patience_s < inf:
            raise ValueError(f"patience_s {self.patience_s:g} is over {MAX_PATIENCE_S}; inf waits for ever")

    def sampling(self, seed: int) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=seed)


class TimingConfig(Section, frozen=True):
    """See `edge.window.Timing`."""

    open_s: Seconds = 4.0
    repair_s: Seconds = 1.0
    silence_s: Seconds = 6.0
    acknowledge_s: Seconds = 0.5

    def timing(self) -> Timing:
        return Timing(self.open_s, self.repair_s, self.silence_s, self.acknowledge_s)


class ApiConfig(Section, frozen=True):
    """Where `outrider-edge run` listens for applications; anybody who reaches it may use the board."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 8177


class EdgeConfig(Section, frozen=True):
    device: DeviceConfig
    drafter: DrafterConfig
    board: BoardConfig = BoardConfig()
    broker: BrokerConfig = BrokerConfig()
    drafting: DraftingConfig = DraftingConfig()
    session: SessionConfig = SessionConfig()
    timing: TimingConfig = TimingConfig()
    api: ApiConfig = ApiConfig()
    updates: UpdatesConfig | None = None

    def __post_init__(self) -> None:
        if self.drafting.policy == "none" and self.session.patience_s == inf:
            raise ConfigError(
                "policy `none` with `patience_s = inf` would wait for drafts that never come",
                where="[drafting] policy",
                remedy="Set `patience_s = 0` in [session]",
            )
        if self.drafting.policy == "sync" and self.session.patience_s != inf:
            raise ConfigError(
                f"policy `sync` waits for verdicts, the verifier would not (patience_s = {self.session.patience_s})",
                where="[drafting] policy",
                remedy="Set `patience_s = inf` in [session]",
            )
