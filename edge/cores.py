"""Which processor cores the board's process uses: all, or the fast ones where there are several kinds.

Threads that meet after every matrix product wait for the slowest of them, so one small core among the fast ones slows
all: the small ones are left to the rest of the system.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from edge.config import BoardConfig
from protocol.errors import ConfigError

SPEED_FILES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


def big_cores(online: frozenset[int], root: Path = Path("/")) -> frozenset[int]:
    """Those of the cores `online` that are of the fastest kind; all where the kernel knows no difference.

    `cpu_capacity` counts instructions a cycle too, and is asked first; it is there where the device tree or firmware
    gives it (Linux, Documentation/arch/arm64/cpu-capacity). The highest frequency stands in for it elsewhere.
    """
    for name in SPEED_FILES:
        speeds = {core: _number(root / "sys/devices/system/cpu" / f"cpu{core}" / name) for core in online}
        if all(speeds.values()) and len(set(speeds.values())) > 1:
            fastest = max(speeds.values())
            return frozenset(core for core, speed in speeds.items() if speed == fastest)
    return online


def choose_cores(board: BoardConfig, online: frozenset[int], root: Path = Path("/")) -> frozenset[int]:
    """The cores that `[board] cores` means, of those that this process may use now.

    Raises ConfigError for a number that is not among them.
    """
    if board.cores == "all":
        return online
    if board.cores == "big":
        return big_cores(online, root)
    chosen = frozenset(board.cores)
    if missing := chosen - online:
        raise ConfigError(
            f"no core {min(missing)} for this process",
            where="[board] cores",
            remedy=f"Choose from {_ranges(online)}, or `all` or `big`",
        )
    return chosen


def pin(board: BoardConfig) -> int:
    """Keep this thread, and all that it starts from now on, on the board's cores; how many these are.

    Raises ConfigError for a core that is not there.
    """
    if not hasattr(os, "sched_setaffinity"):  # only Linux has it
        return os.cpu_count() or 1
    online = frozenset(os.sched_getaffinity(0))
    cores = choose_cores(board, online)
    if cores != online:
        os.sched_setaffinity(0, cores)
    return len(cores)


def _number(path: Path) -> int:
    try:
        text = path.read_text()
    except OSError:
        return 0
    return int(text) if re.fullmatch(r"\d+\s*", text) else 0


def _ranges(cores: frozenset[int]) -> str:
    """As the kernel writes them: "0-3,6"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and parts[-1][-1] == core - 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)
