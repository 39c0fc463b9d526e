"""What the kernel says of a process: its memory and the time that each of its threads computed."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

MIB = 1 << 20


def memory_mib(pid: int) -> dict[str, float]:
    """MiB now: rss, all of its pages that are in memory; pss, the same with shared pages shared out among their
    processes; private, what would be free without it; anonymous, what is not mapped from a file;
    huge, those of them in huge pages; and peak_rss.
    """
    found = _kib(Path(f"/proc/{pid}/smaps_rollup"))
    peak = _kib(Path(f"/proc/{pid}/status"))["VmHWM"]
    kib = {
        "rss": found["Rss"],
        "pss": found["Pss"],
        "private": found["Private_Clean"] + found["Private_Dirty"],
        "anonymous": found["Anonymous"],
        "huge": found["AnonHugePages"],
        "peak_rss": peak,
    }
    return {name: round(size / 1024, 1) for name, size in kib.items()}


def cpu_s(pid: int) -> float:
    """Seconds that it has computed, its threads that have ended included; in steps of a clock tick."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def threads_cpu_s(pid: int) -> dict[str, float]:
    """Seconds that its living threads have computed, by the name that the kernel has for each."""
    found: defaultdict[str, float] = defaultdict(float)
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[(task / "comm").read_text().strip()] += int((task / "schedstat").read_text().split()[0]) / 1e9
        except OSError:  # it has just ended
            continue
    return found


def _kib(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}
