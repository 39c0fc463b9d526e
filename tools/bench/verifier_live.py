"""A fleet at work at a real broker: what a verdict takes beyond the engine and the wait for it, beside a bare echo.

A verdict's time runs from a draft's publication by the device to the arrival of the first commit that knows of it. Of
that the engine's step is taken off, and the queue: from the draft's arrival at the gateway's link to the step's begin.
What is left is the way up, the gateway's and the ledgers' work behind the step, and the way down. The echo's bursts go
through the same broker, connections and kind of link, in rests in which the fleet is still.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import OutriderError
from protocol.messages import TAGS
from tools.bench.live_records import Came, Left, Stepped, Verdict, read
from tools.stage import Stage, last_words, spawn
from tools.traces import RECORDED

DEVICES = 200
PROCESSES = 2
STEP_S = 0.1
PROMPT_TOKENS = 20
BOARD, POLICY = "orin-nano", "chain"
PERIOD_S, REST_S = 5.0, 1.0
WARM_S = 60.0  # until memory is looked at: by then it has grown to what is made between two full collections
SETTLE_S = 2.0
PARTS = ("up", "queue", "step", "settle", "down")
TAG = bytes([TAGS + 3])  # of a `Draft`


class Memory:
    """Resident bytes of a process, looked at now and then."""

    def __init__(self, pid: int) -> None:
        self._path, self._page = Path(f"/proc/{pid}/statm"), os.sysconf("SC_PAGE_SIZE")
        self.bytes: list[int] = []

    def look(self) -> None:
        self.bytes.append(int(self._path.read_text().split()[1]) * self._page)

    def figures(self) -> dict[str, float]:
        """Mebibytes; flat_percent: the furthest from the median."""
        values = np.array(self.bytes) / 2**20
        middle = float(np.median(values))
        return {
            "begin_mib": round(float(values[0]), 1),
            "end_mib": round(float(values[-1]), 1),
            "furthest_from_median_percent": round(float(np.abs(values - middle).max()) / middle * 100, 2),
        }


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(*, threads: int, quick: bool) -> dict[str, Any]:
    """threads is of no use here: nothing computes but the gateway. Raises OutriderError as `play` does."""
    return play(60.0 if quick else 600.0)


def play(run_s: float, devices: int = DEVICES, warm_s: float = WARM_S) -> dict[str, Any]:
    """Raises OutriderError when a process does not start, or ends before its time."""
    clock = [str(time.monotonic()), str(PERIOD_S), str(REST_S)]
    with ExitStack() as scene:
        stage = scene.enter_context(Stage())
        port = f"--port={stage.broker().port}"
        common = [port, f"--traces={RECORDED}", f"--prompt-tokens={PROMPT_TOKENS}", "--clock", *clock]
        engine = [f"--folder={stage.folder}", f"--sessions={2 * devices}", f"--step-s={STEP_S}"]
        verifier = stage.serve(["-m", "tools.bench.live_verifier", *common, *engine], core=0, stdout=subprocess.PIPE)
        stage.serve(["-m", "tools.bench.live_echo", port], core=0, stdin=subprocess.PIPE)
        books = [stage.folder / f"fleet-{i}" for i in range(PROCESSES)]
        share = devices // PROCESSES
        boards = ["-m", "tools.bench.live_fleet", *common, f"--board={BOARD}", f"--policy={POLICY}"]
        fleets = [
            spawn(
                [*boards, f"--out={book}", f"--first={i * share}", f"--devices={share}"],
                core=1,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for i, book in enumerate(books)
        ]
        for fleet in fleets:
            scene.callback(last_words, fleet)
        pids = {"gateway": [verifier.pid], "broker": [stage.broker_pid], "devices": [fleet.pid for fleet in fleets]}
        time.sleep(warm_s)
        begin, memory = time.monotonic(), Memory(verifier.pid)
        before = {name: sum(map(cpu_s, these)) for name, these in pids.items()}
        while (left := begin + run_s - time.monotonic()) > 0:
            memory.look()
            time.sleep(min(1.0, left))
        cpu = {name: (sum(map(cpu_s, these)) - before[name]) / run_s for name, these in pids.items()}
        tell(fleets, "be still")
        time.sleep(SETTLE_S)
        verifier.terminate()
        counted = hear(verifier, stage.folder / "verifier-0.log")
        tell(fleets, "the end")
        told = [hear(fleet) for fleet in fleets]
        verdicts = [one for book in books for one in read(book, Verdict)]
        parts, found = join(verdicts, stage.folder, begin)
        stepped = [one for one in read(stage.folder / "stepped", Stepped) if one.began >= begin]
    facts = {"devices": devices, "seconds": run_s, "verdicts": len(parts), "found": found}
    return facts | times(parts, stepped, told) | counts(counted, told) | {"memory": memory.figures(), "cpu": cpu}


def tell(fleets: Sequence[subprocess.Popen[str]], what: str) -> None:
    for fleet in fleets:
        assert fleet.stdin is not None
        fleet.stdin.write(what + "\n")
        fleet.stdin.flush()


def hear(process: subprocess.Popen[str], log: Path | None = None) -> dict[str, Any]:
    """The line that a process ends with. Raises OutriderError, with the end of its log, when it ends without."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        said = log.read_text().strip()[-2000:] if log else ""
        raise OutriderError(f"a process ended with {process.wait()}: {said}", where=str(process.args))
    found: dict[str, Any] = json.loads(line)
    return found


def join(verdicts: Sequence[Verdict], folder: Path, begin: float) -> tuple[NDArray[np.float64], float]:
    """[verdicts, parts] seconds of each verdict whose draft left after `begin`: way up, queue, step, gateway, way down;
    and the share of verdicts that were found at the gateway.
    """
    steps: list[Stepped] = read(folder / "stepped", Stepped)
    came: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for at, device, head in read(folder / "came", Came):
        if head[1:2] == TAG:
            came[(device, *draft_key(head))].append(at)
    left: dict[tuple[int, ...], list[Left]] = defaultdict(list)
    for one in read(folder / "left", Left):
        left[one.device, one.handle, one.epoch, one.seq].append(one)
    rows, missed = [], 0
    for verdict in verdicts:
        if verdict.left < begin:
            continue
        key = verdict.device, verdict.handle, verdict.epoch, verdict.seq
        came_at = next((at for at in reversed(came[key]) if verdict.left <= at <= verdict.came), None)
        commit = next((one for one in left[key] if came_at is not None and came_at <= one.at <= verdict.came), None)
        if came_at is None or commit is None:
            missed += 1
            continue
        step = steps[commit.step]
        rows.append(
            (
                came_at - verdict.left,
                step.began - came_at,
                step.ended - step.began,
                commit.at - step.ended,
                verdict.came - commit.at,
            )
        )
    return np.array(rows), len(rows) / max(1, len(rows) + missed)


def draft_key(head: bytes) -> tuple[int, int, int]:
    """(handle, epoch, seq) from the first bytes of a draft."""
    found, at = [], 2
    for _ in range(3):
        width = {0xCC: 1, 0xCD: 2}.get(head[at], 0)
        found.append(int.from_bytes(head[at + 1 : at + 1 + width], "big") if width else head[at])
        at += 1 + width
    return found[0], found[1], found[2]


def quantiles(seconds: NDArray[np.float64] | Sequence[float]) -> dict[str, float]:
    """In ms."""
    values = np.asarray(seconds) * 1e3
    names = ("p50", "p90", "p99")
    return {name: round(float(np.percentile(values, int(name[1:]))), 2) for name in names}


def times(
    parts: NDArray[np.float64], stepped: Sequence[Stepped], told: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float] | float]:
    """All in ms. between_steps_ms: for which the engine had nothing to do."""
    up, _, _, settle, down = parts.T
    beyond = quantiles(up + settle + down)
    echo = quantiles([s for one in told for s in one["echo_s"]])
    return {
        "verdict_ms": quantiles(parts.sum(axis=1)),
        "beyond_engine_and_queue_ms": beyond,
        "echo_ms": echo,
        "p99_over_echo_ms": round(beyond["p99"] - echo["p99"], 2),
        **{f"{name}_ms": quantiles(values) for name, values in zip(PARTS, parts.T, strict=True)},
        "between_steps_ms": quantiles([after.began - one.ended for one, after in pairwise(stepped)]),
    }


def counts(counted: dict[str, Any], told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """counted: by the gateway; told: by the devices, whose numbers must agree with it."""
    total = {name: sum(one[name] for one in told) for name in told[0] if name != "echo_s"}
    return {
        "lost": {
            "to_the_verifier": total["drafts"] + total["others"] - counted["received"],
            "to_the_devices": counted["verdicts"] - total["verdicts"],
            "echoes": total["called"] - total["echoed"],
            **{name: counted[name] for name in ("dropped", "expired", "refused")},
        },
        "steps": counted["steps"],
        "tokens": counted["committed"],
        "texts": total["texts"],
        "wrong_texts": total["wrong"],
        "errors": counted["errors"],
    }
