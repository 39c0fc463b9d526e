"""How a board is: heat, throttling, power mode and memory, as its kernel tells, and what that means for drafting.

Facts are read below a root, so that a test gives a directory of files as it was found on a board. What a board does not
tell is absent, never an error: a zone of a GPU that is switched off cannot be read at all.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntFlag
from math import floor, inf
from pathlib import Path

from edge.config import BoardConfig

DEFAULT_HOT_C = 85.0  # where neither the configuration nor the kernel says when a zone is too hot
TRIPS = ("passive", "hot")  # at these the kernel slows the board down; "active" is a fan, "critical" a shutdown
COOLEST_TRIP_C = 60.0  # a lower one protects a skin or a battery
PLAUSIBLE_C = range(-40, 150)  # sensors that are off read 0 K, or -256 °C
HEADROOM_C = 10.0  # below the limit, in which a board drafts less and less
LEAST_SHARE, SHARE_STEP = 0.25, 0.25
SOFT_LIMIT_SHARE = 0.5
VCGENCMD_S = 2.0

# Where raspberrypi-firmware's `get_throttled` is: up to the Pi 4, and on the Pi 5, whose node is named by its address.
THROTTLED_FILES = ("soc/soc:firmware/get_throttled", "soc@*/soc@*:firmware/get_throttled")
# Cooling devices that take speed away, unlike fans: cpufreq_cooling.c and devfreq_cooling.c of Linux name theirs so,
# NVIDIA's kernels add an alert for each zone, and ACPI calls a processor's "Processor".
SLOWING = re.compile(r"(thermal-)?(cpufreq|devfreq)-.*|.*-throttle-alert|hot-surface-alert|Processor").fullmatch


class Throttle(IntFlag):
    """The Pi's eight bits of `get_throttled`, which other boards' facts are told in too: what is, and 16 higher what
    was since the start (raspberrypi.com, documentation of vcgencmd).
    """

    UNDER_VOLTAGE = 1 << 0
    CAPPED = 1 << 1
    THROTTLED = 1 << 2
    SOFT_LIMIT = 1 << 3
    WAS_UNDER_VOLTAGE = 1 << 16
    WAS_CAPPED = 1 << 17
    WAS_THROTTLED = 1 << 18
    WAS_SOFT_LIMIT = 1 << 19


SLOWED = Throttle.UNDER_VOLTAGE | Throttle.CAPPED | Throttle.THROTTLED
NOW = SLOWED | Throttle.SOFT_LIMIT
UNTHROTTLED = Throttle(0)
ALL = NOW | Throttle(NOW << 16)
WORDS = {
    Throttle.UNDER_VOLTAGE: "its supply's voltage is too low",
    Throttle.CAPPED: "its frequency is capped",
    Throttle.THROTTLED: "it is throttled",
    Throttle.SOFT_LIMIT: "it is at its soft temperature limit",
}


@dataclass(frozen=True, slots=True)
class Zone:
    """A thermal zone by its type. hot_c: where the board slows itself down."""

    name: str
    celsius: float
    hot_c: float

    @property
    def headroom_c(self) -> float:
        return self.hot_c - self.celsius


@dataclass(frozen=True, slots=True)
class Facts:
    """One look at a board. hottest: the watched zone nearest to its limit; slowed_by: cooling devices that take speed
    away now; overcurrents: of a Jetson's supply, since the start; memory in MiB, `free` being what can be had without
    swapping, of the machine and of the control group.
    """

    hardware: str = ""
    hottest: Zone | None = None
    throttle: Throttle = UNTHROTTLED
    slowed_by: tuple[str, ...] = ()
    overcurrents: int = 0
    power_mode: str = ""
    total_mib: int | None = None
    free_mib: int | None = None


def look(board: BoardConfig, root: Path = Path("/")) -> Facts:
    """The facts of the board below `root`; `vcgencmd` is asked where the Pi's kernel has no file to read."""
    hardware = _text(root / "proc/device-tree/model").rstrip("\0")
    slowed_by = tuple(sorted(_slowing(root)))
    throttle = _firmware(root, hardware) | (Throttle.THROTTLED if slowed_by else UNTHROTTLED)
    total, free = _memory(root)
    return Facts(
        hardware=hardware,
        hottest=min(_zones(board, root), key=lambda zone: zone.headroom_c, default=None),
        throttle=throttle,
        slowed_by=slowed_by,
        overcurrents=sum(_number(path) or 0 for path in root.glob("sys/class/hwmon/hwmon*/oc*_event_cnt")),
        power_mode=_power_mode(root),
        total_mib=total,
        free_mib=free,
    )


def drafting_share(facts: Facts) -> float:
    """The share of its time that a board in this state drafts: 1 with HEADROOM_C below its limit, falling in quarters
    to the least at the limit or while something slows it down.
    """
    if facts.throttle & SLOWED:
        return LEAST_SHARE
    share = SOFT_LIMIT_SHARE if facts.throttle & Throttle.SOFT_LIMIT else 1.0
    if facts.hottest is not None:
        share = min(share, floor(facts.hottest.headroom_c / HEADROOM_C / SHARE_STEP) * SHARE_STEP)
    return max(LEAST_SHARE, share)


def complaint(facts: Facts) -> str:
    """Why the board drafts less, in words; "" where it does not."""
    if drafting_share(facts) == 1:
        return ""
    reasons = [WORDS[bit] for bit in WORDS if facts.throttle & bit]
    if facts.slowed_by:
        reasons.append(f"slowed by {', '.join(facts.slowed_by)}")
    if facts.hottest is not None and facts.hottest.headroom_c < HEADROOM_C:
        zone = facts.hottest
        reasons.append(f"{zone.name} is at {zone.celsius:.0f} °C and slows down at {zone.hot_c:.0f} °C")
    return "; ".join(reasons)


def was_throttled(facts: Facts) -> list[str]:
    """What has happened since the start, in words."""
    past = {
        Throttle.WAS_UNDER_VOLTAGE: "under-voltage",
        Throttle.WAS_CAPPED: "a capped frequency",
        Throttle.WAS_THROTTLED: "throttling",
        Throttle.WAS_SOFT_LIMIT: "the soft temperature limit",
    }
    words = [word for bit, word in past.items() if facts.throttle & bit]
    return words + ([f"{facts.overcurrents} over-current events"] if facts.overcurrents else [])


def peak_mib(root: Path = Path("/")) -> int | None:
    """The most memory that this process has had so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", _text(root / "proc/self/status"))
    return int(found[1]) >> 10 if found else None


# -- what the kernel tells ------------------------------------------------------------------------------------------


def _zones(board: BoardConfig, root: Path) -> Iterator[Zone]:
    for folder in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        name = _text(folder / "type")
        milli = _number(folder / "temp")
        if milli is None or (board.thermal_zones and name not in board.thermal_zones):
            continue
        celsius = milli / 1000
        if int(celsius) in PLAUSIBLE_C and milli:
            yield Zone(name, celsius, board.hot_c or _trip(folder))


def _trip(folder: Path) -> float:
    lowest = inf
    for path in folder.glob("trip_point_*_type"):
        milli = _number(path.with_name(path.name.replace("_type", "_temp")))
        if _text(path) in TRIPS and milli is not None and milli / 1000 >= COOLEST_TRIP_C:
            lowest = min(lowest, milli / 1000)
    return lowest if lowest < inf else DEFAULT_HOT_C


def _slowing(root: Path) -> Iterator[str]:
    for folder in root.glob("sys/class/thermal/cooling_device*"):
        name = _text(folder / "type")
        if SLOWING(name) and (_number(folder / "cur_state") or 0) > 0:
            yield name


def _firmware(root: Path, hardware: str) -> Throttle:
    if not hardware.startswith("Raspberry Pi"):
        return UNTHROTTLED
    for pattern in THROTTLED_FILES:
        for path in (root / "sys/devices/platform").glob(pattern):
            return _throttle(_text(path))
    return _throttle(_vcgencmd().partition("=")[2])


def _throttle(text: str) -> Throttle:
    """The kernel writes hexadecimal without 0x, vcgencmd with it."""
    with suppress(ValueError):
        return Throttle(int(text, 16) & ALL)
    return UNTHROTTLED


def _vcgencmd() -> str:
    """What `vcgencmd get_throttled` says: "throttled=0x50005"; "" where it cannot be asked."""
    command = shutil.which("vcgencmd")
    if command is None:
        return ""
    try:
        return subprocess.run(
            [command, "get_throttled"], capture_output=True, text=True, timeout=VCGENCMD_S, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _power_mode(root: Path) -> str:
    """The name of the mode that a Jetson is in: nvpmodel keeps its number in one file and the names in another, and the
    same name has another number on another board.
    """
    found = re.search(r"pmode:\s*(\d+)", _text(root / "var/lib/nvpmodel/status"))
    if found is None:
        return ""
    names = re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([^\s>]+)", _text(root / "etc/nvpmodel.conf"))
    return next((name for id, name in names if int(id) == int(found[1])), found[1].lstrip("0") or "0")


def _memory(root: Path) -> tuple[int | None, int | None]:
    """(all, free) in MiB, of the machine or of the control group that this process is limited to."""
    lines = dict(re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo")))
    if "MemTotal" not in lines or "MemAvailable" not in lines:
        return None, None
    total, free = int(lines["MemTotal"]) >> 10, int(lines["MemAvailable"]) >> 10
    own = re.search(r"^0::(/.*)$", _text(root / "proc/self/cgroup"), re.MULTILINE)
    if own is not None:
        group = root / "sys/fs/cgroup" / own[1].lstrip("/")
        most, used = _number(group / "memory.max"), _number(group / "memory.current")
        if most is not None and used is not None:
            total, free = min(total, most >> 20), max(0, min(free, (most - used) >> 20))
    return total, free


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None
