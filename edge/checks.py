"""`outrider-edge check`: each thing that a board needs, looked at in the order in which it would fail."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from edge import clock, health
from edge.config import BoardConfig, EdgeConfig
from edge.drafters import golden, manifest
from edge.drafters.accelerator import Accelerator
from edge.drafters.base import Drafter
from edge.drafters.suffix import SuffixDrafter
from edge.loading import engines, load_model, load_text, runtime
from edge.targets import choose_target
from edge.updates.boot import as_running
from link.config import BrokerConfig, load
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import ConfigError, ModelError, OutriderError, WireError
from protocol.messages import VerifierState, decode
from protocol.sampling import Sampling

Status: TypeAlias = Literal["ok", "warn", "fail"]

EXPIRES_SOON = timedelta(days=30)
RUNTIME_MIB = 200  # Python and ONNX Runtime, beside the weights
ROOMY = 1.5  # times the weights: while they are packed for the kernels, parts of them are there twice
PROMPT = [{"role": "user", "content": "Say hello."}]


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. exit_code: what the command ends with if this is the first that failed."""

    name: str
    status: Status
    what: str
    remedy: str = ""
    exit_code: int = 0


class Report(msgspec.Struct, frozen=True):
    """Of one run. status: of the worst finding; exit_code: of the first that failed, 0 where none did."""

    status: Status
    exit_code: int
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Warned:
    """What a look may return instead of plain words: it works, but somebody should know."""

    what: str
    remedy: str


def run_checks(config_path: Path, wait_s: float, *, root: Path = Path("/"), now: datetime | None = None) -> Report:
    """Look at everything; what cannot be looked at because something before it failed is left out.

    wait_s: for the broker, and then for a verifier; root: below which the board's facts are read.
    """
    looks = _Looks(config_path, wait_s, root, now or datetime.now(timezone.utc))
    looks.all()
    order: tuple[Status, ...] = ("ok", "warn", "fail")
    worst = max((finding.status for finding in looks.findings), key=order.index)
    failed = next((finding for finding in looks.findings if finding.status == "fail"), None)
    return Report(worst, failed.exit_code if failed else 0, looks.findings)


class _Looks:
    def __init__(self, config_path: Path, wait_s: float, root: Path, now: datetime) -> None:
        self.path, self.wait_s, self.root, self.now = config_path, wait_s, root, now
        self.findings: list[Finding] = []
        self.config: EdgeConfig | None = None
        self.running: EdgeConfig | None = None  # where a release of model or settings is in force
        self.drafter: Drafter | None = None

    def all(self) -> None:
        self.look("configuration", self.configuration)
        config = self.config
        board = config.board if config else BoardConfig()
        self.facts = health.look(board, self.root)
        self.look("hardware", lambda: self.hardware(board))
        self.look("clock", self.clock)
        if config is None:
            return
        if config.updates is not None:
            self.look("updates", lambda: self.updates(config))
        running = self.running or config
        if config.broker.tls is not None:
            self.look("certificates", lambda: self.certificates(config))
        self.look("power mode", lambda: self.power_mode(board))
        self.look("temperature", self.temperature)
        self.look("memory", lambda: self.memory(running))
        if runtime(running) == "tensorrt" and not self.look("engine", lambda: self.engine(running)):
            self.broker(running)
            return
        if self.look("drafter", lambda: self.load(running)):
            self.look("self-test", lambda: self.self_test(running))
        self.broker(running)

    def look(self, name: str, work: Callable[[], str | Warned]) -> bool:
        """Whether it did not fail."""
        try:
            found = work()
        except OutriderError as error:
            what = f"{error.where}: {error.what}" if error.where else error.what
            self.findings.append(Finding(name, "fail", what, error.remedy, error.exit_code))
            return False
        if isinstance(found, Warned):
            self.findings.append(Finding(name, "warn", found.what, found.remedy))
        else:
            self.findings.append(Finding(name, "ok", found))
        return True

    # -- the board ------------------------------------------------------------------------------------------------

    def configuration(self) -> str:
        self.config = load(self.path, EdgeConfig)
        return str(self.path)

    def updates(self, config: EdgeConfig) -> str:
        self.running, releases = as_running(config)
        return releases

    def hardware(self, board: BoardConfig) -> str | Warned:
        name = self.facts.hardware or "a machine without a device tree"
        if board.hardware not in self.facts.hardware:
            return Warned(
                f"{name} is no {board.hardware!r}, for which this configuration was written",
                "Start from the file of this board in board_configs/",
            )
        return name

    def clock(self) -> str | Warned:
        said = f"{self.now:%Y-%m-%d %H:%M:%S} UTC"
        written = clock.newest(*(path for path in (self.path, Path(__file__)) if path.exists()))
        if self.now < written:
            raise OutriderError(
                f"{said} is in the past: this board has files of {written:%Y-%m-%d %H:%M:%S}",
                remedy="Let NTP set it (timedatectl set-ntp true), and give the board a battery for its clock",
            )
        if clock.synchronised() is False:
            return Warned(f"{said}, kept by nobody", "Let NTP keep it: timedatectl set-ntp true")
        return said

    def certificates(self, config: EdgeConfig) -> str | Warned:
        tls = config.broker.tls
        assert tls is not None
        found = {path: clock.validity(path) for path in (tls.cert, tls.ca) if path is not None}
        for path, valid in found.items():
            if self.now < valid.begins:
                raise ConfigError(
                    f"is valid from {valid.begins:%Y-%m-%d %H:%M} UTC on, and the clock says {self.now:%Y-%m-%d %H:%M}",
                    where=str(path),
                    remedy="Set the clock; if it is right, the certificate is not yet",
                )
            if self.now > valid.ends:
                raise ConfigError(
                    f"has been out of date since {valid.ends:%Y-%m-%d %H:%M} UTC",
                    where=str(path),
                    remedy="Renew it; if it should still hold, look at the clock",
                )
        if not found:
            return "the system's authorities, no certificate of its own"
        path, first = min(found.items(), key=lambda item: item[1].ends)
        said = f"{path} is valid until {first.ends:%Y-%m-%d}"
        if first.ends - self.now < EXPIRES_SOON:
            return Warned(f"{said}, {(first.ends - self.now).days} days from now", "Renew it")
        return said

    def power_mode(self, board: BoardConfig) -> str | Warned:
        mode = self.facts.power_mode
        if board.power_modes and mode not in board.power_modes:
            return Warned(
                f"{mode or 'unknown'}, slower than this board can be",
                f"sudo nvpmodel -m ID, with the ID of {' or '.join(board.power_modes)} in /etc/nvpmodel.conf",
            )
        return mode or "this board has none"

    def temperature(self) -> str | Warned:
        facts = self.facts
        zone = facts.hottest
        said = f"{zone.name} at {zone.celsius:.0f} °C of {zone.hot_c:.0f}" if zone else "no zone can be read"
        if why := health.complaint(facts):
            return Warned(
                f"drafts {100 * health.drafting_share(facts):.0f} % of its time: {why}",
                "Cool it, or give it the supply that its maker asks for",
            )
        if past := health.was_throttled(facts):
            remedy = "Look at its cooling and its supply, or choose a lower power mode"
            return Warned(f"{said}; since the start there was {', '.join(past)}", remedy)
        return said

    def memory(self, config: EdgeConfig) -> str | Warned:
        free = self.facts.free_mib
        if free is None:
            return "the kernel does not tell"
        names = {name for names in manifest.DRAFTER_WEIGHTS.values() for name in names}
        weights = [config.drafter.model / name for name in names]
        size = sum(path.stat().st_size for path in weights if path.is_file()) / (1 << 20)
        limit = min(free, config.board.memory_mib or free)
        said = f"{limit} MiB to be had of {self.facts.total_mib}, weights {size:.0f}"
        remedy = "Stop something else, raise the limit of memory, or export a smaller drafter"
        if limit < size + RUNTIME_MIB:
            raise ModelError(f"{said}: the drafter does not fit", where=str(config.drafter.model), remedy=remedy)
        return Warned(f"{said}: little room", remedy) if limit < ROOMY * size + RUNTIME_MIB else said

    # -- the drafter ----------------------------------------------------------------------------------------------

    def engine(self, config: EdgeConfig) -> str | Warned:
        from edge.drafters.tensorrt import outlook

        drafter = config.drafter
        accelerator = Accelerator(drafter.device, engines(config))
        said, ready = outlook(drafter.model, accelerator, drafter.context)
        return said if ready else Warned(said, "Wait: it is built now, for minutes, and kept for every later start")

    def load(self, config: EdgeConfig) -> str | Warned:
        checked = msgspec.structs.replace(config.drafter, verify_weights=True)
        self.drafter = load_model(msgspec.structs.replace(config, drafter=checked), beside_service=True)
        info = self.drafter.info
        if isinstance(self.drafter, SuffixDrafter):
            return f"{info.name}: no model, what was written before is guessed, context {info.context}"
        said = (
            f"{info.name}, digest {info.weights_digest[:12]} as in its manifest, {info.compute} on {info.provider},"
            f" context {info.context}"
        )
        if runtime(config) == "onnx" and info.provider != config.drafter.providers[0]:
            return Warned(
                f"{said}; {config.drafter.providers[0]} was asked for",
                "It cannot run this graph: name what runs in `providers` of [drafter]",
            )
        return said

    def self_test(self, config: EdgeConfig) -> str | Warned:
        drafter = self.drafter
        assert drafter is not None
        if isinstance(drafter, SuffixDrafter):
            return "no model to test"
        where = str(config.drafter.model)
        expected_ids = manifest.read(config.drafter.model, "drafter").golden
        if expected_ids is not None:
            golden.check(drafter, expected_ids, where)
        text = load_text(config)
        prompt = text.chat(PROMPT)
        ids, seconds = greedy(drafter, prompt)
        drafter.prefill([(prompt[0] + 1) % drafter.info.vocab_size])  # so that nothing of the first time is left
        if greedy(drafter, prompt)[0] != ids:
            raise ModelError(
                f"{golden.GUESSES} guesses came out otherwise when computed again",
                where=where,
                remedy="Test the board's memory and its supply; a healthy one computes the same twice",
            )
        known = (
            f"{len(expected_ids.sure)} as in the manifest" if expected_ids else "none in the manifest to compare with"
        )
        said = f"{text.decode(ids)!r}, the same when computed twice; {known}; {1000 * seconds:.1f} ms a guess"
        if (expected := config.board.expected) is not None:
            said += f" (planned: {expected.pass_ms:g} ms, for 0.5B parameters)"
        peak, limit = health.peak_mib(self.root), config.board.memory_mib
        said += "" if peak is None else f", {peak} MiB of memory"
        if limit and peak is not None and peak > limit:
            return Warned(f"{said}, over the limit of {limit}", "Lower `context` of [drafter], or raise `memory_mib`")
        return said

    # -- the network ----------------------------------------------------------------------------------------------

    def broker(self, config: EdgeConfig) -> None:
        states: dict[str, VerifierState] = {}

        def hear(topic: str, payload: bytes) -> None:
            try:
                message = decode(payload)
            except WireError:
                return
            if isinstance(message, VerifierState):
                states[message.verifier] = message

        def reach(place: BrokerConfig) -> str:
            link = MqttLink(
                place,
                f"outrider-{config.device.name}-check-{secrets.token_hex(3)}",
                on_message=hear,
                subscriptions=[(topics.verifier_state_topic("+"), 0)],
            ).start()
            closing.callback(link.close)
            link.wait_up(self.wait_s)
            return place.address

        first, *others = config.broker.places
        with ExitStack() as closing:
            if self.look("broker", lambda: reach(first)) and self.drafter is not None:
                self.look("verifier", lambda: self.verifier(config, states))
            for place in others:
                self.look("standby broker", partial(reach, place))

    def verifier(self, config: EdgeConfig, states: dict[str, VerifierState]) -> str:
        assert self.drafter is not None
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                state = choose_target(
                    list(states.values()),
                    tokenizer_digest=self.drafter.info.tokenizer_digest,
                    wanted=config.session.target,
                    where=config.broker.address,
                )
            except OutriderError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
            else:
                return f"{state.target} on {state.verifier}, step {state.step_us / 1000:.1f} ms, {state.numerics}"


def greedy(drafter: Drafter, prompt: list[int]) -> tuple[list[int], float]:
    """(ids, s a guess): `golden.GUESSES` tokens of the drafter's own, one pass each."""
    row = drafter.prefill(prompt)
    ids: list[int] = []
    began = time.perf_counter()
    for _ in range(golden.GUESSES):
        (best,) = drafter.candidates(row, Sampling(), 1)
        ids.append(best.id)
        (row,) = drafter.extend([(best.id, row)])
    return ids, (time.perf_counter() - began) / golden.GUESSES
