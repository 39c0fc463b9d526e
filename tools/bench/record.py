"""What every benchmark says about itself, and fair timing of rivals."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BOUND = 1.959964  # standard errors: 95 % of a normal distribution, two-sided


def machine() -> dict[str, object]:
    """The processor, its cores that this process may use, memory and the versions that decide speed."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu, "cores": cores, "system": platform.platform(), "versions": versions()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "onnxruntime", "numpy", "paho-mqtt"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def round_robin(rivals: Mapping[str, Callable[[], object]], *, rounds: int, warm: int = 2) -> dict[str, float]:
    """Median seconds of each rival; they take turns, so that a noisy moment meets them all."""
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(warm + rounds):
        for name, rival in rivals.items():
            started = time.perf_counter()
            rival()
            if turn >= warm:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
