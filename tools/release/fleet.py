"""Which board runs what: the retained states of a fleet, for who announces releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from link.config import BrokerConfig
from link.retained import read_retained
from protocol import topics
from protocol.messages import DeviceState


def device_states(config: BrokerConfig, wait_s: float) -> dict[str, DeviceState]:
    """What every board last said of itself, by device. wait_s: for each broker. Raises LinkError."""
    states: dict[str, DeviceState] = {}
    for place in config.places:
        for where, state in read_retained(place, topics.device_state_topic("+"), DeviceState, wait_s).items():
            if state.status == "online" or where.device not in states:  # where it was before, it is offline
                states[where.device] = state
    return dict(sorted(states.items()))


def count(states: Mapping[str, DeviceState]) -> Counter[str]:
    """How many boards run or try each release, and have rolled it back."""
    counts: Counter[str] = Counter()
    for state in states.values():
        runs, _, back = state.releases.partition("rolled back ")  # behind it comes a reason, in words
        counts.update(filter(None, runs.split(", ")))
        if back:
            counts[f"rolled back {back.partition(': ')[0]}"] += 1
    return counts
