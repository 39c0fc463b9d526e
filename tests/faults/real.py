"""The same with the commands as they are shipped, a real model, and an application that reads from the board's API."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import httpx

from edge.drafters import manifest
from edge.journal import Journal
from edge.text import Text
from tests.commands import CommandFleet
from tests.faults.lines import Line, Lines
from tests.faults.recoverable import BY_NAME
from tests.faults.trial import Costs
from tools.broker import Broker

SAMPLINGS: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 5})
BEGUN = 6  # pieces that an application has before anything happens
CUT_S, DOWN_S = 2.0, 2.0
LIMIT_S = 60.0
NAMES = ("link cut", "broker killed", "verifier killed", "edge killed")


class Reading:
    """An application that reads one answer. times: of its pieces."""

    def __init__(self, fleet: CommandFleet, sampling: dict[str, float]) -> None:
        self.times: list[float] = []
        self.pieces: list[str] = []
        self.broke_off = False
        self._thread = threading.Thread(target=self._read, args=(fleet, sampling), daemon=True)
        self._thread.start()
        fleet.until(lambda: len(self.times) >= BEGUN, LIMIT_S)

    def _read(self, fleet: CommandFleet, sampling: dict[str, float]) -> None:
        try:
            for piece in fleet.ask(**sampling):
                self.pieces.append(piece)
                self.times.append(time.monotonic())
        except httpx.HTTPError:
            self.broke_off = True

    def text(self) -> str:
        self._thread.join(2 * LIMIT_S)
        return "".join(self.pieces)


class RealFleet(CommandFleet):
    """With the board on a line that can be cut."""

    def __init__(self, folder: Path, drafter: Path, target: Path) -> None:
        super().__init__(folder, drafter, target)
        self.lines = Lines()
        self.line: Line = self.lines.add(self.broker.port, 0, scrambles=False)
        self.edge_config = self.write_edge(broker=f"port = {self.line.port}")
        self.journal = Journal(folder / "state" / "journal")
        self.text = Text.load(drafter, manifest.read(drafter, "drafter"))

    def stop(self) -> None:
        super().stop()
        self.lines.stop()

    def kill_verifier(self) -> float:
        """The owner; another one is there, and a new one comes."""
        victim = self.verifiers.pop(self.owner)
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        return time.monotonic()

    def kill_broker(self) -> float:
        port = self.broker.port
        self.broker.kill()
        time.sleep(DOWN_S)
        self.broker = Broker.start(port)
        return time.monotonic()

    def cut_line(self) -> float:
        self.line.outage("cut")
        time.sleep(CUT_S)
        self.line.outage(None)
        return time.monotonic()


def play(drafter: Path, target: Path, folder: Path, tell: Callable[[str], None]) -> tuple[list[Costs], list[str], int]:
    """(what each fault cost, what was wrong, how many texts)."""
    costs = {name: Costs(f"{name}, real model", BY_NAME[name].seen) for name in NAMES}
    fleet, wrong, num_texts = RealFleet(folder, drafter, target), list[str](), 0
    try:
        for name in ("v1", "v2"):
            fleet.start_verifier(name)
        board = fleet.start_board()
        for i, sampling in enumerate(SAMPLINGS):
            quiet = "".join(fleet.ask(**sampling))
            for name, strike in zip(NAMES, (fleet.cut_line, fleet.kill_broker, fleet.kill_verifier), strict=False):
                reading, began = Reading(fleet, sampling), time.monotonic()
                ended = strike()
                if reading.text() != quiet:
                    wrong.append(f"{name}: {''.join(reading.pieces)!r} is not {quiet!r}")
                after = next((at for at in reading.times if at > ended), None)
                if after is None:
                    wrong.append(f"{name}: the text was over before the fault was")
                else:
                    costs[name].note(ended - began, after - ended, after - began)
                num_texts += 1
            fleet.start_verifier(f"v{3 + i}")
            board = _kill_edge(fleet, board, sampling, quiet, costs["edge killed"], wrong)
            num_texts += 1
            tell(f"a real model, {'sampled' if sampling else 'greedy'}: {len(quiet)} characters, {len(wrong)} wrong")
    finally:
        fleet.stop()
    return list(costs.values()), wrong, num_texts


def _kill_edge(
    fleet: RealFleet,
    board: Popen[str],
    sampling: dict[str, float],
    quiet: str,
    costs: Costs,
    wrong: list[str],
) -> Popen[str]:
    """The application's request breaks off; the text becomes whole in the journal. Returns the new process."""
    reading = Reading(fleet, sampling)
    began = time.monotonic()
    board.send_signal(signal.SIGKILL)
    board.wait()
    reading.text()
    (entry,) = fleet.journal.unfinished()
    size = _size(fleet)
    board = fleet.start_board()
    ended = time.monotonic()
    fleet.until(lambda: _size(fleet) > size, LIMIT_S)
    after = time.monotonic()
    costs.note(ended - began, after - ended, after - began)
    fleet.until(lambda: not fleet.journal.unfinished(), LIMIT_S)
    whole = next(one for one in fleet.journal.entries() if one.request.session == entry.request.session)
    told = "".join(reading.pieces)
    if fleet.text.decode(whole.committed) != quiet or not quiet.startswith(told):
        wrong.append(f"edge killed: {fleet.text.decode(whole.committed)!r} is not {quiet!r}")
    return board


def _size(fleet: RealFleet) -> int:
    return sum(path.stat().st_size for path in fleet.journal.folder.glob("*.jsonl"))
