"""What tests of the link share: a link that notes what it is told, and waiting for what it notes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from link.config import BrokerConfig
from link.mqtt import MqttLink


class End:
    """A link that notes what it is told."""

    def __init__(self, config: BrokerConfig, name: str, **options: Any) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.states: list[tuple[bool, str]] = []
        self.acks: list[tuple[str, int]] = []
        self.link = MqttLink(
            config,
            name,
            on_message=options.pop("on_message", lambda topic, payload: self.messages.append((topic, payload))),
            on_state=lambda up, reason: self.states.append((up, reason)),
            on_puback=lambda topic, reason: self.acks.append((topic, reason)),
            **options,
        ).start()

    def payloads(self) -> list[bytes]:
        return [payload for _, payload in self.messages]


Make = Callable[..., End]


def until(condition: Callable[[], bool], timeout_s: float = 8.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)
