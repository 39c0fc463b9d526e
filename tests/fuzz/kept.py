"""The inputs that are kept of each target: a line each, in hex, shortest first."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")


def read_corpus(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (CORPUS / f"{name}.txt").read_text().splitlines()]


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    (CORPUS / f"{name}.txt").write_text("".join(data.hex() + "\n" for data in inputs))


def of_use(name: str, inputs: Iterable[bytes]) -> list[bytes]:
    """Those that go from one line of a watched module to another as none shorter does."""
    seen: set[tuple[str, int, int]] = set()
    kept = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        new = ways(name, data) - seen
        if data and new:
            seen |= new
            kept.append(data)
    return kept


def ways(name: str, data: bytes) -> set[tuple[str, int, int]]:
    """(file, line, next line) of all that an input makes the watched modules do."""
    take = TARGETS[name].load()
    files = {importlib.import_module(module).__file__ for module in TARGETS[name].watched}
    found: set[tuple[str, int, int]] = set()

    def enter(frame: FrameType, event: str, value: Any) -> Any:
        file, before = frame.f_code.co_filename, frame.f_lineno
        if file not in files:
            return None

        def follow(frame: FrameType, event: str, value: Any) -> Any:
            nonlocal before
            if event == "line":
                found.add((file, before, frame.f_lineno))
                before = frame.f_lineno
            return follow

        return follow

    sys.settrace(enter)
    try:
        take(data)
    finally:
        sys.settrace(None)
    return found
