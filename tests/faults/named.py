"""Faults that nobody can mend on their own: each is named in an error, and nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fleet import Child, Fleet


@dataclass
class Named:
    """error: the line that names the fault, where there was one; seen: what a user sees; absent: why it was left out."""

    fault: str
    seen: str
    error: str = ""
    wrong: list[str] = field(default_factory=list)
    absent: str = ""

    def record(self) -> dict[str, object]:
        facts = {"fault": self.fault, "lost": "nothing", "seen": self.seen, "texts_identical": not self.wrong}
        return {**facts, "absent": self.absent} if self.absent else {**facts, "error": self.error}


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


def disk_full(folder: Path, seed: int) -> Named:
    """The state directory is a small disk of its own, which something fills. Texts go on, and so does a board that is
    killed meanwhile, from what the journal had.
    """
    found = Named("disk full", "texts as ever; what is written meanwhile cannot be resumed after a crash")
    tried = f"mount -t tmpfs -o size=64k t {folder}"
    if not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "sh", "-c", tried], capture_output=True).returncode:
        found.absent = "this machine lets nobody mount a file system"
        return found
    with Fleet(folder, num_boards=0, num_verifiers=1, step_s=0.01, seed=seed) as fleet:
        board = fleet.add_board("small.disk", tmpfs_kib=64)
        board.wait_ready()
        fleet.wait_writing([board])
        disk = Path(f"/proc/{board.pid}/root{folder / board.name}")
        fill(disk / "fill")
        found.error = said(board, "No space left on device")
        more_texts(fleet, board, 2)  # the second was begun on a full disk
        (disk / "fill").unlink()
        more_texts(fleet, board, 2)
        found.wrong = fleet.wrong + fleet.application(board).failures
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


NAMED: tuple[Callable[[Path, int], Named], ...] = (disk_full,)
