"""The whole of it, in full and quick, and what is said of it: one record."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.cable import pull
from tests.faults.fleet import Fleet
from tests.faults.hostile import certificate_expired, device_that_floods, foreign_tenant
from tests.faults.named import Named, Scenario, disk_full, one_identity_twice
from tests.faults.real import play
from tests.faults.recoverable import FAULTS
from tests.faults.soak import FLAT_MIB_H, Soak
from tests.faults.trial import Costs, settle, strike, strike_together
from tools.models import prepare

NAMED: tuple[Scenario, ...] = (
    disk_full,
    certificate_expired,
    one_identity_twice,
    foreign_tenant,
    device_that_floods,
)
ROUNDS = 5
OUTAGES_S = (1.0, 3.0, 10.0, 30.0, 60.0)
QUICK_PULLS_S = (7.0,)
SETTLED_S = 3.0
FULL_BOARDS, QUICK_BOARDS, CLOCKS = 4, 9, 2

Tell = Callable[[str], None]


def run(seed: int, tell: Tell, *, quick: bool) -> dict[str, Any]:
    """All faults. quick: each once, and those of boards at the same time."""
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
        num_boards = QUICK_BOARDS if quick else FULL_BOARDS
        with Fleet(Path(folder), num_boards=num_boards, clocks=CLOCKS, seed=seed) as fleet:
            tell(f"{num_boards} boards and {len(fleet.verifiers)} verifiers write")
            costs = quickly(fleet, tell) if quick else fully(fleet, tell)
            wrong, num_texts = fleet.wrong, fleet.num_texts
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
        pulled, wrong_pulled, num_pulled = pull(Path(folder), seed, QUICK_PULLS_S if quick else OUTAGES_S)
    costs[pulled.name] = pulled
    _tell_all({pulled.name: pulled}, tell)
    wrong, num_texts = wrong + wrong_pulled, num_texts + num_pulled
    if not quick:
        with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
            real, wrong_real, num_real = play(*prepare("smollm2"), Path(folder), tell)
        costs |= {one.name: one for one in real}
        _tell_all({one.name: one for one in real}, tell)
        wrong, num_texts = wrong + wrong_real, num_texts + num_real
    named = []
    for scenario in NAMED:
        with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
            found = scenario(Path(folder), seed)
        tell(f"{found.fault:32} {found.error or found.absent}")
        named.append(found)
    return _record(seed, costs, named, wrong + [what for one in named for what in one.wrong], num_texts)


def quickly(fleet: Fleet, tell: Tell) -> dict[str, Costs]:
    costs = {fault.name: Costs.of(fault) for fault in FAULTS}
    possible = [fault for fault in FAULTS if not fault.absent]
    for fault in possible:
        if fault.hits in ("broker", "verifier"):
            strike(fleet, fault, fault.seconds[0], costs[fault.name])
            settle(fleet, 0.5)
    strike_together(fleet, [fault for fault in possible if fault.hits in ("board", "clock")], costs)
    settle(fleet, 0.5)
    _tell_all(costs, tell)
    return costs


def fully(fleet: Fleet, tell: Tell) -> dict[str, Costs]:
    costs = {fault.name: Costs.of(fault) for fault in FAULTS}
    for fault in FAULTS:
        least, most = fault.seconds
        durations = OUTAGES_S if fault.name in ("link cut", "link frozen") else \
            [least + (most - least) * i / (ROUNDS - 1) for i in range(ROUNDS)]  # fmt: skip
        for seconds in durations if not fault.absent else ():
            settle(fleet, SETTLED_S)
            strike(fleet, fault, seconds, costs[fault.name])
        _tell_all({fault.name: costs[fault.name]}, tell)
    return costs


def soak(seed: int, tell: Tell, *, minutes: float, num_boards: int, every_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="outrider-faults-") as folder:
        made = Fleet(
            Path(folder), num_boards=num_boards, num_verifiers=3, step_s=0.05, clocks=max(1, num_boards // 4), seed=seed
        )
        with made as fleet:
            tell(f"{num_boards} boards and {len(fleet.verifiers)} verifiers write")
            found = Soak(fleet, every_s, tell)
            found.run(minutes * 60)
            wrong, num_texts = fleet.wrong + found.broken, fleet.num_texts
    # Faults overlap here, and what one costs is not to be told from what another does: the bar is that of all together.
    together = Costs("all together", "", beyond_s=[s for one in found.costs.values() for s in one.beyond_s])
    record = _record(seed, found.costs, [], wrong, num_texts, held_to=[together])
    slopes = found.slopes_mib_h()
    # What a short soak shows of growth is the noise of a page or two.
    if minutes >= 20:
        record["missed"] += [f"memory of a {kind} grows by {mib:g} MiB an hour" for kind, mib in slopes.items()
                             if mib > FLAT_MIB_H]  # fmt: skip
    memory = [{"s": round(at), **mib} for at, mib in found.memory[:: max(1, len(found.memory) // 30)]]
    return {**record, "minutes": minutes, "boards": num_boards, "every_s": every_s, "num_struck": found.num_struck,
            "p95_s": round(together.p95_s, 2), "memory_mib": memory, "memory_slope_mib_h": slopes}  # fmt: skip


def _tell_all(costs: dict[str, Costs], tell: Tell) -> None:
    for name, one in costs.items():
        if one.beyond_s:
            facts = one.record()
            tell(
                f"{name:32} n {facts['n']:3}  next token after median {facts['median_s']} s, p95 {facts['p95_s']} s, "
                f"max {facts['max_s']} s; silent for at most {facts['silent_max_s']} s"
            )
        else:
            tell(f"{name:32} left out: {one.absent}")


def _record(
    seed: int,
    costs: dict[str, Costs],
    named: list[Named],
    wrong: list[str],
    num_texts: int,
    *,
    held_to: Sequence[Costs] = (),
) -> dict[str, Any]:
    """held_to: what the bar is for; each of `costs` when empty."""
    missed = [f"{one.name}: p95 {one.p95_s:.2f} s" for one in held_to or costs.values() if one.missed]
    missed += [f"{one.fault}: no error that names it" for one in named if not one.absent and not one.error]
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "seed": seed,
        "faults": [one.record() for one in costs.values()],
        "named": [one.record() for one in named],
        "num_texts": num_texts,
        "texts_identical": not wrong,
        "wrong": wrong,
        "missed": missed,
    }
