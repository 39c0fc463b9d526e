"""What a broker keeps, read once: the states of a fleet, for who looks at it."""

from __future__ import annotations

import secrets
import threading
from typing import TypeVar

from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol.errors import WireError
from protocol.messages import Message, decode
from protocol.topics import Topic, parse

QUIET_S = 1.0  # the broker sends what it retains in one go

T = TypeVar("T", bound=Message)


def read_retained(broker: BrokerConfig, topic_filter: str, type: type[T], wait_s: float) -> dict[Topic, T]:
    """The messages of one type that are retained under `topic_filter`, by topic; others are passed over.

    wait_s: for the broker. Raises LinkError when it cannot be reached.
    """
    found: dict[Topic, T] = {}
    heard = threading.Event()

    def on_message(topic: str, payload: bytes) -> None:
        try:
            where, message = parse(topic), decode(payload)
        except WireError:
            return
        if isinstance(message, type):
            if where not in found:  # in a large fleet somebody says something new all the time
                heard.set()
            found[where] = message

    link = MqttLink(
        broker, f"outrider-status-{secrets.token_hex(4)}", on_message=on_message, subscriptions=[(topic_filter, 1)]
    ).start()
    try:
        link.wait_up(wait_s)
        while heard.wait(QUIET_S):
            heard.clear()
    finally:
        link.close()
    return found
