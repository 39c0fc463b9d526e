"""A board's /proc and /sys as a directory."""

from __future__ import annotations

from pathlib import Path

PI5 = "Raspberry Pi 5 Model B Rev 1.0\0"
NANO = "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super\0"
MODES = """< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
"""


class BoardFiles:
    def __init__(self, root: Path) -> None:
        self.root = root
        self._zones = self._coolers = 0

    def write(self, path: str, text: str) -> BoardFiles:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def zone(self, name: str, milli_c: int | None, **trips: int) -> Path:
        """A thermal zone; None: one that cannot be read, as a GPU's that is off. trips: type = milli-°C."""
        folder = f"sys/class/thermal/thermal_zone{self._zones}"
        self._zones += 1
        self.write(f"{folder}/type", f"{name}\n")
        if milli_c is not None:
            self.write(f"{folder}/temp", f"{milli_c}\n")
        for i, (kind, milli) in enumerate(trips.items()):
            self.write(f"{folder}/trip_point_{i}_type", f"{kind}\n")
            self.write(f"{folder}/trip_point_{i}_temp", f"{milli}\n")
        return self.root / folder / "temp"

    def cooler(self, name: str, state: int) -> None:
        folder = f"sys/class/thermal/cooling_device{self._coolers}"
        self._coolers += 1
        self.write(f"{folder}/type", f"{name}\n").write(f"{folder}/cur_state", f"{state}\n")

    def cores(self, *speeds: int, file: str = "cpu_capacity") -> None:
        for core, speed in enumerate(speeds):
            self.write(f"sys/devices/system/cpu/cpu{core}/{file}", f"{speed}\n")
