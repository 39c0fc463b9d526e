"""Random faults without a pause: one every few seconds, several at a time, on a whole fleet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faults.fleet import Child, Fleet
from tests.faults.recoverable import FAULTS, Fault, Struck
from tests.faults.trial import LIMIT_S, Costs

LOOK_S = 5.0
TRIES = 20  # to find somebody for a fault who has none
WARM_SHARE = 0.25  # of the time, in which processes reach their size
FLAT_MIB_H = 8.0  # growth that is still called flat: 4 MiB in the 30 minutes


@dataclass
class Soak:
    """costs: by fault; memory: (seconds since the start, MiB by kind of process)."""

    fleet: Fleet
    every_s: float
    tell: Callable[[str], None] = lambda line: None
    costs: dict[str, Costs] = field(default_factory=lambda: {fault.name: Costs.of(fault) for fault in FAULTS})
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    num_struck: int = 0

    def run(self, seconds: float) -> None:
        self._began = strike_at = look_at = time.monotonic()
        self._busy: set[str] = set()
        self._over: list[Struck] = []
        self._lock = threading.Lock()
        threads: list[threading.Thread] = []
        while (now := time.monotonic()) < self._began + seconds and not self.fleet.wrong and not self.broken:
            if now >= strike_at:
                strike_at += self.every_s
                chosen = next(filter(None, (self._choose() for _ in range(TRIES))), None)
                if chosen is not None:
                    threads = [*filter(threading.Thread.is_alive, threads), self._start(*chosen)]
            if now >= look_at:
                look_at += LOOK_S
                self._look(now - self._began)
            time.sleep(0.05)
        for thread in threads:
            thread.join(2 * LIMIT_S)
        self.fleet.wait_writing(self.fleet.boards, LIMIT_S)

    def _choose(self) -> tuple[Fault, Child | None, str] | None:
        """A fault and its victim: one board has one at a time, the broker and the verifiers together one."""
        rng, fleet = self.fleet.random, self.fleet
        fault = rng.choice([fault for fault in FAULTS if not fault.absent])
        with self._lock:
            if fault.hits in ("broker", "verifier"):
                resource, victim = "cloud", None
                if fault.hits == "verifier":
                    owners = [verifier for verifier in fleet.verifiers if fleet.boards_of(verifier)]
                    if not owners:
                        return None
                    victim = rng.choice(owners)
            else:
                free = [b for b in fleet.boards if b.name not in self._busy and (fault.hits != "clock" or b.faketime)]
                if not free:
                    return None
                victim = rng.choice(free)
                resource = victim.name
            if resource in self._busy:
                return None
            self._busy.add(resource)
        return fault, victim, resource

    def _start(self, fault: Fault, victim: Child | None, resource: str) -> threading.Thread:
        seconds = self.fleet.random.uniform(*fault.seconds)

        def work() -> None:
            try:
                struck = fault.strike(self.fleet, victim, seconds)
                self._over.append(struck)
                self.costs[fault.name].add(self.fleet, struck, self._over)
                self.num_struck += 1
            except Exception as error:
                self.broken.append(f"{fault.name}: {error}")
            finally:
                with self._lock:
                    self._busy.discard(resource)

        thread = threading.Thread(target=work, name=fault.name, daemon=True)
        thread.start()
        return thread

    def _look(self, at_s: float) -> None:
        memory = self.fleet.memory_mib()
        self.memory.append((at_s, memory))
        before = time.monotonic() - 3 * LIMIT_S
        for application in self.fleet.applications.values():
            application.forget_before(before)
        shown = ", ".join(f"{kind} {mib:.1f}" for kind, mib in memory.items())
        self.tell(f"{at_s:6.0f} s  {self.num_struck:4} faults  {self.fleet.num_texts:5} texts  MiB: {shown}")

    def slopes_mib_h(self) -> dict[str, float]:
        """How each kind of process grows, by least squares over what comes after it has reached its size."""
        warm = [(at, mib) for at, mib in self.memory if at >= WARM_SHARE * self.memory[-1][0]]
        found = {}
        for kind in ("board", "verifier", "broker"):
            points = [(at, mib[kind]) for at, mib in warm if kind in mib]
            found[kind] = round(slope([at for at, _ in points], [mib for _, mib in points]) * 3600, 2)
        return found


def slope(x: list[float], y: list[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
