"""Which board runs what: the retained states of a fleet, for who announces releases."""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Mapping

from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import OutriderError
from protocol.messages import DeviceState, decode

QUIET_S = 1.0  # the broker sends what it retains in one go


def device_states(config: BrokerConfig, wait_s: float) -> dict[str, DeviceState]:
    """What every board last said of itself, by device. wait_s: for each broker. Raises LinkError."""
    states: dict[str, DeviceState] = {}
    for place in config.places:
        for device, state in _retained(place, wait_s).items():
            if state.status == "online" or device not in states:  # where it was before, it is offline
                states[device] = state
    return dict(sorted(states.items()))


def _retained(config: BrokerConfig, wait_s: float) -> dict[str, DeviceState]:
    states: dict[str, DeviceState] = {}
    heard = threading.Event()

    def on_message(topic: str, payload: bytes) -> None:
        try:
            device, state = topics.parse(topic).device, decode(payload)
        except OutriderError:
            return
        if isinstance(state, DeviceState):
            states[device] = state
            heard.set()

    link = MqttLink(
        config,
        f"outrider-release-{secrets.token_hex(3)}",
        on_message=on_message,
        subscriptions=[(topics.device_state_topic("+"), 1)],
    ).start()
    try:
        link.wait_up(wait_s)
        while heard.wait(QUIET_S):
            heard.clear()
    finally:
        link.close()
    return states


def count(states: Mapping[str, DeviceState]) -> Counter[str]:
    """How many boards run or try each release, and have rolled it back."""
    counts: Counter[str] = Counter()
    for state in states.values():
        runs, _, back = state.releases.partition("rolled back ")  # behind it comes a reason, in words
        counts.update(filter(None, runs.split(", ")))
        if back:
            counts[f"rolled back {back.partition(': ')[0]}"] += 1
    return counts
