"""Faults that a fleet recovers from by itself. Each is a function that lets it happen, undoes what has to be undone,
and tells whom it hit and when it was over.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fleet import FAKETIME, Child, Fleet
from tests.faults.scramble import Disorder
from tools.broker import Broker
from tools.wan import Outage

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Struck:
    """boards: those that it hit; began, ended: by CLOCK_MONOTONIC."""

    boards: list[Child]
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class Fault:
    """hits: what it needs for itself, `broker`, `verifier` or `board`; seconds: how long it may last, shortest and
    longest; seen: what a user sees of it; absent: why it cannot be done on this machine, or "".
    """

    name: str
    hits: str
    seconds: tuple[float, float]
    strike: Callable[[Fleet, Child | None, float], Struck]
    seen: str
    absent: str = ""


def broker_killed(fleet: Fleet, _: Child | None, seconds: float) -> Struck:
    began, port = time.monotonic(), fleet.broker.port
    fleet.broker.kill()
    time.sleep(seconds)
    fleet.broker = Broker.start(port, kind="mosquitto")
    return Struck(list(fleet.boards), began, time.monotonic())


def verifier_killed(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
    """Another takes over; a new one is started later."""
    assert victim is not None
    boards, began = fleet.boards_of(victim), time.monotonic()
    victim.kill()
    fleet.verifiers.remove(victim)
    fleet.add_verifier()
    return Struck(boards, began, began)


def verifier_stopped(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
    assert victim is not None
    boards, began = fleet.boards_of(victim), time.monotonic()
    victim.signal(signal.SIGSTOP)
    time.sleep(seconds)
    victim.signal(signal.SIGCONT)
    return Struck(boards, began, time.monotonic())


def verifier_cut_off(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
    """Nothing passes in either direction, and nobody is told."""
    assert victim is not None
    boards, began = fleet.boards_of(victim), time.monotonic()
    victim.line.outage("freeze")
    time.sleep(seconds)
    victim.line.outage(None)
    return Struck(boards, began, time.monotonic())


def edge_killed(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
    """Over once a new process has loaded what it needs."""
    assert victim is not None
    began = time.monotonic()
    victim.kill()
    return _started_again(fleet, victim, began)


def memory_limit_hit(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
    """The process grows until the kernel ends it at the limit of its control group."""
    assert victim is not None and victim.process is not None
    group = CGROUP / "memory" / f"outrider-{victim.pid}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("64M")
        (group / "cgroup.procs").write_text(f"{victim.pid}")
        began = time.monotonic()
        victim.signal(signal.SIGUSR1)
        code = victim.process.wait(20)
        assert code == -signal.SIGKILL, f"ended with {code}, not by the limit"
    finally:
        with suppress(OSError):
            group.rmdir()
    return _started_again(fleet, victim, began)


def _started_again(fleet: Fleet, victim: Child, began: float) -> Struck:
    victim.start()
    victim.wait_ready()
    return Struck([victim], began, fleet.application(victim).ready_at)


def link_out(mode: Outage) -> Callable[[Fleet, Child | None, float], Struck]:
    def strike(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
        assert victim is not None
        began = time.monotonic()
        victim.line.outage(mode)
        time.sleep(seconds)
        victim.line.outage(None)
        return Struck([victim], began, time.monotonic())

    return strike


def link_shaped(**link: float) -> Callable[[Fleet, Child | None, float], Struck]:
    def strike(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
        assert victim is not None
        began = time.monotonic()
        victim.line.shape(**link)
        time.sleep(seconds)
        victim.line.shape()
        return Struck([victim], began, time.monotonic())

    return strike


def messages_disordered(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
    assert victim is not None
    began = time.monotonic()
    victim.line.disturb(Disorder(late_s=0.2, doubles=0.3))
    time.sleep(seconds)
    victim.line.disturb(Disorder())
    scrambler = victim.line.scrambler
    assert scrambler is not None and scrambler.doubled and scrambler.overtaken, "nothing was disturbed"
    return Struck([victim], began, time.monotonic())


def clock_set(by_s: float) -> Callable[[Fleet, Child | None, float], Struck]:
    def strike(fleet: Fleet, victim: Child | None, seconds: float) -> Struck:
        assert victim is not None and victim.faketime is not None
        application, began = fleet.application(victim), time.monotonic()
        victim.faketime.write_text(f"{by_s:+g}")
        while abs(application.wall_off_s - by_s) > 60:
            assert time.monotonic() < began + 15, f"the clock is {application.wall_off_s:g} s off, not {by_s:g}"
            time.sleep(0.02)
        time.sleep(seconds)
        victim.faketime.write_text("+0")
        while abs(application.wall_off_s) > 60:
            assert time.monotonic() < began + seconds + 30, "the clock does not come back"
            time.sleep(0.02)
        return Struck([victim], began, time.monotonic())

    return strike


NO_CGROUP = (
    "" if os.access(CGROUP / "memory" / "cgroup.procs", os.W_OK) else "no control groups that this user may make"
)
NO_FAKETIME = "" if FAKETIME else "no libfaketime: apt-get install faketime"

STANDS = "the text stands still, then goes on"
FAULTS = (
    Fault("broker killed", "broker", (0.5, 5), broker_killed, STANDS + "; the log says `connection refused`"),
    Fault("verifier killed", "verifier", (0, 0), verifier_killed, STANDS),
    Fault("verifier stopped", "verifier", (2, 10), verifier_stopped, STANDS),
    Fault("verifier cut off", "verifier", (2, 10), verifier_cut_off, STANDS),
    Fault("edge killed", "board", (0, 0), edge_killed, "requests break off; the text goes on in its journal"),
    Fault("memory limit hit", "board", (0, 0), memory_limit_hit, "as edge killed", NO_CGROUP),
    Fault("link cut", "board", (1, 10), link_out("cut"), STANDS + "; the log says why"),
    Fault("link frozen", "board", (1, 10), link_out("freeze"), STANDS),
    Fault("link at 20 kbit/s", "board", (3, 10), link_shaped(rate_kbit=20), "the text comes slower"),
    Fault("2 s of jitter", "board", (5, 12), link_shaped(jitter_s=2.0), "the text comes in bursts"),
    Fault("messages doubled and reordered", "board", (3, 10), messages_disordered, "the text comes slower"),
    Fault("clock set forward", "clock", (1, 4), clock_set(3 * 3600), "nothing", NO_FAKETIME),
    Fault("clock set back", "clock", (1, 4), clock_set(-3 * 3600), "nothing", NO_FAKETIME),
)
BY_NAME = {fault.name: fault for fault in FAULTS}
