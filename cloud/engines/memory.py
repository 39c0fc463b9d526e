"""How much memory there is for keys and values."""

from __future__ import annotations

import re
from pathlib import Path

from protocol.errors import ModelError

SHARE = 0.75  # of what is available; the rest is for the passes, page tables and the neighbours
UNLIMITED = 1 << 60  # version 1 writes a number near 2^63 for no limit


def kv_budget(asked: int, root: Path = Path("/")) -> int:
    """The bytes that keys and values may take: what was asked for, or with 0 a share of what is available now.

    root: where /proc and /sys are. Raises ModelError where more was asked for than there is.
    """
    available = available_bytes(root)
    if asked > available:
        raise ModelError(
            f"{asked / 2**30:.2f} GiB do not fit into the {available / 2**30:.2f} GiB of memory that are available",
            where="[engine] kv_gib",
            remedy="Lower it, or set it to 0 to have it sized at start",
        )
    return asked or int(available * SHARE)


def available_bytes(root: Path = Path("/")) -> int:
    """What this process may still take without anything being swapped or killed."""
    info = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", info, re.MULTILINE)
    if found is None:
        raise ModelError(
            "/proc/meminfo does not say what is available", where="KV cache", remedy="Give [engine] kv_gib"
        )
    return max(0, min([int(found[1]) * 1024, *_cgroup_rests(root)]))


def _cgroup_rests(root: Path) -> list[int]:
    """What this process's control groups leave it, of both versions, each with the groups around it."""
    rests = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, usage = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        mount = root / top
        group = mount / path.lstrip("/")
        # In a container the mount may be the process's own group, and the path one that is only known outside.
        for directory in [group, *group.parents]:
            if directory != mount and mount not in directory.parents:
                break
            rest = _rest(directory, limit, usage, cache)
            if rest is not None:
                rests.append(rest)
    return rests


def _rest(directory: Path, limit: str, usage: str, cache: str) -> int | None:
    """A group's limit less what it uses; None without a limit. Files' pages that nobody needs are given back first."""
    try:
        bound = (directory / limit).read_text().strip()
        if bound == "max" or int(bound) > UNLIMITED:
            return None
        used = int((directory / usage).read_text())
        stat = (directory / "memory.stat").read_text()
    except OSError:
        return None
    found = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
    return int(bound) - used + (int(found[1]) if found else 0)
