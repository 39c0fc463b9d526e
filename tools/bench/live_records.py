"""What the processes of the live benchmark write down of every message, in a few bytes, and how it is read again."""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import NamedTuple

SPEAKER = "fleet"


def device_name(number: int) -> str:
    return f"{SPEAKER}.d{number:05}"


def device_number(name: str) -> int:
    return int(name[len(SPEAKER) + 2 :])


class Came(NamedTuple):
    """A message came to the gateway; head: the first bytes of its payload."""

    at: float
    device: int
    head: bytes


class Left(NamedTuple):
    """A commit left the gateway; seq: the latest draft that it knows of; step: the number of the step it is from."""

    at: float
    device: int
    handle: int
    epoch: int
    seq: int
    step: int


class Stepped(NamedTuple):
    """A step of the engine."""

    began: float
    ended: float


class Verdict(NamedTuple):
    """A device's draft that left and the first commit that knows of it."""

    left: float
    came: float
    device: int
    handle: int
    epoch: int
    seq: int


LAYOUT: dict[type, Struct] = {
    Came: Struct("<dH12s"),
    Left: Struct("<dHHHBI"),
    Stepped: Struct("<dd"),
    Verdict: Struct("<ddHHHB"),
}


class Book:
    """Appends records of one type to a file."""

    def __init__(self, path: Path, type: type) -> None:
        self._file = open(path, "wb")  # noqa: SIM115 (closed by `close`)
        self._pack = LAYOUT[type].pack

    def note(self, *fields: object) -> None:
        self._file.write(self._pack(*fields))

    def close(self) -> None:
        self._file.close()


def read(path: Path, type: type) -> list:
    """All records of a file."""
    return [type(*fields) for fields in LAYOUT[type].iter_unpack(path.read_bytes())]
