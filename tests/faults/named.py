"""Faults that a fleet cannot mend by itself: each is named in an error, and nothing is lost."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fleet import Child, Fleet

TOGETHER_S = 3.0


@dataclass
class Named:
    """error: what names the fault, where something did; seen: what a user sees; absent: why it was left out."""

    fault: str
    seen: str
    error: str = ""
    wrong: list[str] = field(default_factory=list)
    absent: str = ""

    def record(self) -> dict[str, object]:
        facts = {"fault": self.fault, "lost": "nothing", "seen": self.seen, "texts_identical": not self.wrong}
        return {**facts, "absent": self.absent} if self.absent else {**facts, "error": self.error}


Scenario = Callable[[Path, int], Named]


def said(child: Child, pattern: str, limit_s: float = 30.0) -> str:
    """The first line of its log that has the pattern, "" where none comes."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := re.search(rf".*(?:{pattern}).*", child.log.read_text()):
            return found[0]
        time.sleep(0.05)
    return ""


def more_texts(fleet: Fleet, board: Child, num: int, limit_s: float = 60.0) -> None:
    """Until the board has finished so many more."""
    application = fleet.application(board)
    wanted, deadline = application.finished + num, time.monotonic() + limit_s
    while application.finished < wanted:
        assert time.monotonic() < deadline, f"{board.name}: {application.failures[-1:]} {board.log.read_text()[-1500:]}"
        time.sleep(0.02)


def all_wrong(fleet: Fleet) -> list[str]:
    """Texts that are not as they should be, and such as an application was told will not come."""
    return fleet.wrong + [why for one in fleet.applications.values() for why in one.failures]


def disk_full(folder: Path, seed: int) -> Named:
    """The state directory is a small disk of its own, which something fills in mid-text, and empties later."""
    found = Named("disk full", "nothing; after a crash, texts of that time are not gone on with")
    tried = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=64k t {folder}"]
    if not shutil.which("unshare") or subprocess.run(tried, capture_output=True).returncode:
        found.absent = "this machine lets nobody mount a file system"
        return found
    with Fleet(folder, num_boards=0, num_verifiers=1, step_s=0.01, seed=seed) as fleet:
        board = fleet.add_board("small.disk", tmpfs_kib=64)
        fleet.wait_ready()
        filler = Path(f"/proc/{board.pid}/root{folder}/{board.name}-state/fill")
        fill(filler)
        found.error = said(board, "No space left on device")
        more_texts(fleet, board, 2)  # the second was begun on a full disk
        filler.unlink()
        more_texts(fleet, board, 2)
        found.wrong = all_wrong(fleet)
    return found


def fill(path: Path) -> None:
    """To the last byte."""
    size = 4096
    with open(path, "wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def one_identity_twice(folder: Path, seed: int) -> Named:
    """A second process with a board's name: the broker ends the older connection each time, until one of them goes."""
    found = Named("two edges with one identity", "both stand still in turn, until one of them is stopped")
    with Fleet(folder, num_boards=1, num_verifiers=1, step_s=0.01, seed=seed) as fleet:
        (first,) = fleet.boards
        twin = fleet.add_board(first.name, twin=True)
        named = [said(one, "another process with the client id") for one in (first, twin)]
        found.error = named[0] if all(named) else ""
        time.sleep(TOGETHER_S)
        twin.kill()
        more_texts(fleet, first, 2)
        first.signal(signal.SIGSTOP)
        twin.start()
        more_texts(fleet, twin, 1)
        found.wrong = all_wrong(fleet)
    return found
