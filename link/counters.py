"""What a link has done since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Messages, and payload bytes. dropped: for want of a connection or of room in a queue; refused: too large."""

    sent: int = 0
    received: int = 0
    acknowledged: int = 0
    dropped: int = 0
    expired: int = 0
    refused: int = 0
    connects: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
