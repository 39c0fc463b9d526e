"""The board's `[updates]` section; without it the board takes none."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edge.updates.judge import Rule
from link.config import Section
from protocol.messages import Name


class UpdatesConfig(Section, frozen=True):
    """keys: Ed25519 public keys in hex, each trusted alone: name the next one beside the present one before it is used;
    channel: whose announcements this board follows; ca: PEM file of the authorities of the servers that releases are
    fetched from, the system's when absent; data_cap_mb: megabytes (10^6) a month that sessions and fetching may take
    together, to which fetching keeps; trial_rounds, trial_margin: see `edge.updates.judge.Rule`.
    """

    keys: Annotated[tuple[Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")], ...], Meta(min_length=1, max_length=16)]
    channel: Name = "stable"
    ca: Path | None = None
    data_cap_mb: Annotated[int, Meta(ge=0)] | None = None
    trial_rounds: Annotated[int, Meta(ge=1)] = 200
    trial_margin: Annotated[float, Meta(ge=0, lt=1)] = 0.05

    @property
    def rule(self) -> Rule:
        return Rule(rounds=self.trial_rounds, margin=self.trial_margin)
