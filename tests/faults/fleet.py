"""A fleet as processes: a broker, verifiers and boards, each on a line of its own, and applications that read along."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.certified import CertifiedFleet
from tests.faults.lines import Line, Lines
from tests.faults.reader import Application
from tools.broker import Broker, free_port

ROOT = Path(__file__).parents[2]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
START_S = 30.0
TWIN = 1000  # the number of a twin's first story
POLICIES = ("auto", "chain", "tree")


class Child:
    """A process that can be shot and started again, on its own line to the broker.

    inside: the command that runs it where it shall; log: what it says on stderr, over all its lives; faketime: the file
    that sets its wall clock, where it has one.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        line: Line | None,
        command: Sequence[str],
        *,
        inside: Sequence[str] = (),
        clock: bool = False,
        tmpfs: str = "",
    ) -> None:
        self.name, self._line = name, line
        self._command = [*inside, sys.executable, "-m", "tests.faults.child", *command]
        self.log = folder / f"{name}.log"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.faketime = folder / f"{name}.clock" if clock and FAKETIME else None
        if self.faketime is not None:
            self.faketime.write_text("+0")
            self.environment |= {
                "LD_PRELOAD": str(FAKETIME),
                "FAKETIME_TIMESTAMP_FILE": str(self.faketime),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        if tmpfs:
            self._command = ["unshare", "--mount", "sh", "-ec", tmpfs + '\nexec "$@"', "sh", *self._command]
        self.process: subprocess.Popen[str] | None = None
        self.ready = threading.Event()
        self.take: Callable[[dict], None] = lambda line: None

    @property
    def line(self) -> Line:
        assert self._line is not None
        return self._line

    def start(self) -> None:
        self.ready.clear()
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                self._command, cwd=ROOT, env=self.environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            try:
                line = json.loads(raw)
            except ValueError:  # cut short by SIGKILL
                continue
            self.take(line)
            if "ready" in line and process is self.process:
                self.ready.set()

    def wait_ready(self) -> None:
        assert self.ready.wait(START_S), f"{self.name} does not start: {self.log.read_text()[-2000:]}"

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Without a goodbye; returns once it is gone and all that it said was read."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def resident_mib(self) -> float:
        return resident_mib(self.pid)


def resident_mib(pid: int) -> float:
    """Memory that a process has now, 0 for one that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Fleet:
    """Boards that write, verifiers that share them, one broker. A context manager.

    clocks: how many boards have a wall clock that can be set; certified: a fleet with certificates whose broker runs
    already, where this one shall be of it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_boards: int,
        num_verifiers: int = 2,
        step_s: float = 0.03,
        clocks: int = 0,
        seed: int,
        certified: CertifiedFleet | None = None,
    ) -> None:
        self.folder, self.step_s, self.certified = folder, step_s, certified
        self.random = random.Random(seed)
        self.lines = Lines()
        self.broker = self._start_broker()
        self._verifiers_made = 0
        self.verifiers: list[Child] = []
        self.boards: list[Child] = []
        self.applications: dict[str, Application] = {}
        for _ in range(num_verifiers):
            self.add_verifier()
        for i in range(num_boards):
            self.add_board(f"t{i % 3}.b{i}", policy=POLICIES[i % len(POLICIES)], clock=i < clocks)

    def add_verifier(self) -> Child:
        """A new one: each start has a name of its own."""
        self._verifiers_made += 1
        name = f"v{self._verifiers_made}"
        made = self._child(name, "verifier", "verifier", ["--step-s", f"{self.step_s}"])
        made.start()
        self.verifiers.append(made)
        return made

    def add_board(
        self, device: str, *, twin: bool = False, policy: str = "auto", clock: bool = False, tmpfs_kib: int = 0
    ) -> Child:
        """twin: another process of that name, with texts of its own."""
        name = f"{device}-twin" if twin else device
        state = self.folder / f"{name}-state"
        mount = ""
        if tmpfs_kib:
            state.mkdir()
            mount = f"mount -t tmpfs -o size={tmpfs_kib}k t {state}"
        words = ["--state", str(state), "--policy", policy, "--first", f"{TWIN if twin else 0}"]
        made = self._child(device, device, "board", words, log=name, clock=clock, tmpfs=mount)
        made.take = self.applications.setdefault(name, Application(device)).take
        made.start()
        self.boards.append(made)
        return made

    def _start_broker(self) -> Broker | None:
        return Broker.start(free_port(), kind="mosquitto") if self.certified is None else None

    def _child(self, name: str, user: str, kind: str, words: Sequence[str], *, log: str = "", **options: Any) -> Child:
        port = self.broker.port if self.certified is None else self.certified.port
        seed = len(self.boards) + len(self.verifiers)
        line = self.lines.add(port, seed, scrambles=kind == "board" and self.certified is None)
        tls = [] if self.certified is None else ["--tls", str(self.certified.folder / user)]
        command = [kind, "--port", f"{line.port}", "--name", name, *words, *tls]
        return Child(log or name, self.folder, line, command, **options)

    def application(self, board: Child) -> Application:
        return self.applications[board.name]

    def verifier_of(self, board: Child) -> Child:
        return next(v for v in self.verifiers if v.name == self.application(board).owner)

    def boards_of(self, verifier: Child) -> list[Child]:
        return [board for board in self.boards if self.application(board).owner == verifier.name]

    def wait_ready(self) -> None:
        for child in [*self.verifiers, *self.boards]:
            child.wait_ready()
        self.wait_writing(self.boards)

    def wait_writing(self, boards: Sequence[Child], limit_s: float = START_S) -> None:
        """Until each of them writes."""
        since = time.monotonic()
        for board in boards:
            self.await_token(board, since, limit_s)

    def await_token(self, board: Child, since: float, limit_s: float) -> float:
        """When the board's first token after `since` came. Raises AssertionError after limit_s."""
        application = self.application(board)
        while (at := application.next_after(since)) is None:
            assert time.monotonic() < since + limit_s, (
                f"{board.name} is silent for {limit_s:g} s: {application.failures[-1:]} {board.log.read_text()[-1500:]}"
            )
            time.sleep(0.01)
        return at

    @property
    def wrong(self) -> list[str]:
        return [f"{name}: {what}" for name, one in self.applications.items() for what in one.wrong]

    @property
    def num_texts(self) -> int:
        return sum(one.finished for one in self.applications.values())

    def memory_mib(self) -> dict[str, float]:
        """Of each kind of process, the mean over those that live."""
        kinds = {"board": self.boards, "verifier": self.verifiers}
        found = {kind: [mib for child in children if (mib := child.resident_mib)] for kind, children in kinds.items()}
        found["broker"] = [mib] if (mib := resident_mib(self.broker.pid)) else []
        return {kind: round(sum(all) / len(all), 2) for kind, all in found.items() if all}

    def __enter__(self) -> Fleet:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for child in [*self.boards, *self.verifiers]:
            if child.alive:
                child.signal(signal.SIGCONT)
                child.kill()
        self.lines.stop()
        if self.broker is not None:
            self.broker.stop()
