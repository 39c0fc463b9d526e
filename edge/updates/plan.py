"""What becomes of a release: a pure state machine. Events come in, actions go out, time is an argument.

announced -> wanted -> (fetched) candidate -> (self-tested, between sessions) on trial -> committed, or rejected. The
record is all that is remembered: whoever drives this makes it durable after each event, before any action. One release
is on trial at a time, of whatever kind, so that there is no doubt what a change in acceptance is due to.
"""

from __future__ import annotations

from math import inf
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from edge.updates.errors import RejectedError, ReplayError
from edge.updates.judge import Rule, Score, judge
from edge.updates.manifest import (
    KINDS,
    AnyRelease,
    Facts,
    Kind,
    check_channel,
    check_fits,
    content_digest,
    is_in_stage,
)

MAX_STARTS = 3  # of a trial without a verified round in between
STEADY_S = 600.0  # a trial that has run for so long does not crash at its start
MAX_REJECTED = 32  # names that are remembered
RETRY_S, RETRY_MOST_S = 30.0, 3600.0


class Ref(msgspec.Struct, frozen=True):
    """A release in the store. digest: of its content, the name of its directory."""

    release: str
    digest: str


class Slot(msgspec.Struct, frozen=True):
    """One kind's releases; None is what the board was flashed with.

    committed: good; former: what was committed before; candidate: whole and unpacked, not tried yet; wanted: being
    fetched; serials: by channel, the highest one heard of.
    """

    committed: Ref | None = None
    former: Ref | None = None
    candidate: Ref | None = None
    wanted: Ref | None = None
    serials: dict[str, int] = {}


class Trial(msgspec.Struct, frozen=True):
    """starts: of the process with it, since the last verified round."""

    kind: Kind
    ref: Ref
    starts: int = 0
    score: Score = Score()


class Rejection(msgspec.Struct, frozen=True):
    kind: Kind
    release: str
    why: str


class Usage(msgspec.Struct, frozen=True):
    """Bytes fetched in a month, `2026-11`."""

    month: str = ""
    bytes: int = 0


class Record(msgspec.Struct, frozen=True):
    """Everything that outlives the process, in one file, so that pointer and state change together. baseline: what the
    committed releases reached.
    """

    format: int = 1
    model: Slot = Slot()
    runtime: Slot = Slot()
    settings: Slot = Slot()
    trial: Trial | None = None
    baseline: Score = Score()
    rejected: tuple[Rejection, ...] = ()
    usage: Usage = Usage()

    def slot(self, kind: Kind) -> Slot:
        found: Slot = getattr(self, kind)
        return found

    def active(self, kind: Kind) -> Ref | None:
        """What the next start runs."""
        if self.trial is not None and self.trial.kind == kind:
            return self.trial.ref
        return self.slot(kind).committed

    def kept(self, kind: Kind) -> set[str]:
        """Digests that may not be collected."""
        slot = self.slot(kind)
        refs = (slot.committed, slot.former, slot.candidate, slot.wanted, self.active(kind))
        return {ref.digest for ref in refs if ref is not None}


class Fetch(msgspec.Struct, frozen=True):
    """Fetch and unpack what is wanted, then say `fetched`, `rejected` or `failed`."""

    kind: Kind
    ref: Ref


class Test(msgspec.Struct, frozen=True):
    """Test the candidate, then say `tested` or `rejected`. No session runs."""

    __test__ = False

    kind: Kind
    ref: Ref


class Restart(msgspec.Struct, frozen=True):
    """Start again with what the record names as active. No session runs."""


class Collect(msgspec.Struct, frozen=True):
    """Remove what the record does not keep."""


Action: TypeAlias = Fetch | Test | Restart | Collect


class Plan:
    """Holds the record, and what need not outlive the process: retries, and whether a restart is due."""

    def __init__(self, record: Record, rule: Rule) -> None:
        self.record, self.rule = record, rule
        self.restart_due = False
        self._started_at = inf
        self._failures: dict[Kind, tuple[int, float]] = {}  # how often, and when to try again

    # -- events ---------------------------------------------------------------------------------------------------

    def started(self, now: float) -> list[Action]:
        """The process begins. A trial that never gets as far as a verified round is rolled back."""
        self.steady_from(now)
        trial = self.record.trial
        if trial is None:
            return [Collect()]
        if trial.starts >= MAX_STARTS:
            return self.rejected(trial.kind, trial.ref, f"no verified round in {trial.starts} starts")
        self.record = replace(self.record, trial=replace(trial, starts=trial.starts + 1))
        return [Collect()]

    def steady_from(self, now: float) -> None:
        """The process, whose start was counted before, runs from now on."""
        self._started_at = now

    def stopped(self) -> list[Action]:
        """The process was told to end: this start is not held against a trial."""
        self._forgive()
        return []

    def announced(self, release: AnyRelease, facts: Facts) -> list[Action]:
        """A manifest whose signature is good. Hearing it again changes nothing that it has already led to.

        Raises ReplayError, CompatibilityError, RejectedError; a board outside the stage raises nothing, and waits.
        """
        check_channel(release, facts)
        kind, slot = release.kind, self.record.slot(release.kind)
        last = slot.serials.get(release.channel, 0)
        if release.serial < last:
            raise ReplayError(f"serial {release.serial} is below {last}, the last one", where=release.release)
        ref = Ref(release.release, content_digest(release))
        chosen = is_in_stage(facts.device, release.release, release.percent)
        slot = replace(slot, serials={**slot.serials, release.channel: release.serial})
        if slot.candidate != ref or not chosen:
            slot = replace(slot, candidate=None)
        self._set(kind, replace(slot, wanted=None))
        check_fits(release, facts)
        if any((known.kind, known.release) == (kind, ref.release) for known in self.record.rejected):
            raise RejectedError(
                "was rolled back on this board before", where=ref.release, remedy="Give it another release name"
            )
        active = self.record.active(kind)
        if chosen and slot.candidate is None and (active is None or active.digest != ref.digest):
            if slot.wanted != ref:
                self._failures.pop(kind, None)
            self._set(kind, replace(slot, wanted=ref))
        return [Collect()]

    def fetched(self, kind: Kind, ref: Ref) -> list[Action]:
        """Whole, checked, unpacked and durable."""
        self._failures.pop(kind, None)
        slot = self.record.slot(kind)
        if slot.wanted != ref:  # another one was announced meanwhile
            return [Collect()]
        self._set(kind, replace(slot, wanted=None, candidate=ref))
        return []

    def failed(self, kind: Kind, now: float) -> list[Action]:
        """Not fetched this time: the network, the cap, the disk. Pauses double, up to an hour."""
        times = self._failures.get(kind, (0, 0.0))[0]
        self._failures[kind] = (times + 1, now + min(RETRY_S * 2**times, RETRY_MOST_S))
        return []

    def tested(self, kind: Kind, ref: Ref) -> list[Action]:
        """It does what it should: from now on it is active, on trial."""
        if self.record.trial is not None or self.record.slot(kind).candidate != ref:
            return []
        self._set(kind, replace(self.record.slot(kind), candidate=None))
        self.record = replace(self.record, trial=Trial(kind, ref))
        self.restart_due = True
        return []

    def rejected(self, kind: Kind, ref: Ref, why: str) -> list[Action]:
        """It will not be tried again under this name. On trial, what was committed is active again."""
        self._failures.pop(kind, None)
        slot = self.record.slot(kind)
        kept = {name: None for name in ("candidate", "wanted") if getattr(slot, name) == ref}
        self._set(kind, replace(slot, **kept))
        rejections = (*self.record.rejected, Rejection(kind, ref.release, why[:500]))[-MAX_REJECTED:]
        self.record = replace(self.record, rejected=rejections)
        if (trial := self.record.trial) is not None and (trial.kind, trial.ref) == (kind, ref):
            self.record = replace(self.record, trial=None)
            self.restart_due = True
        return [Collect()]

    def lost(self, kind: Kind) -> list[Action]:
        """What was committed cannot be read any more: back to the former one, or to what was flashed."""
        slot = self.record.slot(kind)
        self._set(kind, replace(slot, committed=slot.former, former=None))
        return []

    def scored(self, score: Score) -> list[Action]:
        """A session has ended. What was verified while a restart is due is of a release that is no longer active."""
        if self.restart_due or not score.rounds:
            return []
        trial = self.record.trial
        if trial is None:
            self.record = replace(self.record, baseline=self.record.baseline.plus(score).faded())
            return []
        trial = replace(trial, starts=0, score=trial.score.plus(score))
        self.record = replace(self.record, trial=trial)
        # Settings change how much is guessed, so that their acceptance compares with nothing.
        baseline = Score() if trial.kind == "settings" else self.record.baseline
        verdict = judge(trial.score, baseline, self.rule)
        if verdict == "wait":
            return []
        if verdict == "reject":
            why = f"acceptance {trial.score.mean:.3f} after {trial.score.rounds} rounds, before {baseline.mean:.3f}"
            return self.rejected(trial.kind, trial.ref, why)
        slot = self.record.slot(trial.kind)
        self._set(trial.kind, replace(slot, committed=trial.ref, former=slot.committed))
        self.record = replace(self.record, trial=None, baseline=trial.score)
        return [Collect()]

    def spent(self, month: str, num_bytes: int) -> list[Action]:
        """So many bytes were fetched or carried by the link."""
        usage = self.record.usage
        before = usage.bytes if usage.month == month else 0
        self.record = replace(self.record, usage=Usage(month, before + num_bytes))
        return []

    def due(self, now: float, *, idle: bool) -> list[Action]:
        """The next thing to do, if any. idle: no session runs, and none will until it is done."""
        if self.restart_due:
            return [Restart()] if idle else []
        if now - self._started_at >= STEADY_S:
            self._forgive()
        for kind in KINDS:
            wanted = self.record.slot(kind).wanted
            if wanted is not None and now >= self._failures.get(kind, (0, 0.0))[1]:
                return [Fetch(kind, wanted)]
        if idle and self.record.trial is None:
            for kind in KINDS:
                candidate = self.record.slot(kind).candidate
                if candidate is not None:
                    return [Test(kind, candidate)]
        return []

    # -- what follows ---------------------------------------------------------------------------------------------

    def _forgive(self) -> None:
        trial = self.record.trial
        if trial is not None and trial.starts and not self.restart_due:
            self.record = replace(self.record, trial=replace(trial, starts=0))

    def _set(self, kind: Kind, slot: Slot) -> None:
        self.record = replace(self.record, **{kind: slot})


def may_fetch(usage: Usage, month: str, cap_mb: int | None) -> int | None:
    """Bytes that may still be fetched this month; None without a cap."""
    if cap_mb is None:
        return None
    spent = usage.bytes if usage.month == month else 0
    return max(0, cap_mb * 1_000_000 - spent)


def describe(record: Record) -> str:
    """One line for logs and for the device's state: what runs, what is tried, what was rolled back last."""
    parts = []
    for kind in KINDS:
        ref = record.active(kind)
        on_trial = record.trial is not None and record.trial.kind == kind
        parts.append(f"{kind} {ref.release if ref else 'flashed'}{' (on trial)' if on_trial else ''}")
    if record.rejected:
        last = record.rejected[-1]
        parts.append(f"rolled back {last.kind} {last.release}: {last.why}")
    return ", ".join(parts)[:1000]
