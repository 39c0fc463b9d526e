"""What waits to be published (pure): bounded queues that drop their oldest, and the window of messages in flight."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

# MQTT 5 reason codes that the link itself gives to a message which it did not send.
NO_MATCHING_SUBSCRIBERS = 0x10
UNSPECIFIED_ERROR = 0x80
EXPIRED = 0x83  # "implementation specific error": MQTT has no code for it
NOT_AUTHORIZED = 0x87
PACKET_TOO_LARGE = 0x95
QUOTA_EXCEEDED = 0x97


@dataclass(frozen=True, slots=True)
class Message:
    """expiry_s: lifetime in seconds from `at`, the monotonic time at which it was handed in; None: for ever."""

    topic: str
    payload: bytes
    qos: int
    retain: bool
    expiry_s: float | None
    at: float

    def expiry_left(self, now: float) -> int | None:
        """Whole seconds of life to announce to the broker; 0: expired; None: for ever."""
        if self.expiry_s is None:
            return None
        return max(0, math.ceil(self.at + self.expiry_s - now))

    @property
    def size(self) -> int:
        """Bytes on the wire at most: fixed header, topic, packet id or topic alias, message expiry, payload."""
        return 5 + 2 + len(self.topic.encode()) + 3 + 6 + len(self.payload)


class Queue:
    """First in, first out, bounded in messages and bytes; the newest always fits, the oldest make room."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._waiting: deque[Message] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message) -> list[Message]:
        """Append `message` and return those that were dropped for it."""
        self._waiting.append(message)
        self._bytes += message.size
        dropped = []
        while len(self) > 1 and (len(self) > self._max_messages or self._bytes > self._max_bytes):
            dropped.append(self.pop())
        return dropped

    def put_back(self, messages: list[Message]) -> None:
        """Set `messages` before all others, in their order; the bounds apply again at the next `put`."""
        self._waiting.extendleft(reversed(messages))
        self._bytes += sum(message.size for message in messages)

    def pop(self) -> Message:
        message = self._waiting.popleft()
        self._bytes -= message.size
        return message

    def clear(self) -> list[Message]:
        dropped = list(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        return dropped


class Retained:
    """The state that a client keeps at the broker, by topic: sent at each connect, refreshed at half of its life."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[bytes, float | None]] = {}
        self._due_at: dict[str, float] = {}

    def set(self, topic: str, payload: bytes, expiry_s: float | None) -> None:
        self._states[topic] = payload, expiry_s
        self._due_at[topic] = -math.inf

    def forget(self, topic: str) -> None:
        self._states.pop(topic, None)
        self._due_at.pop(topic, None)

    def disconnected(self) -> None:
        """All of it must be sent again."""
        self._due_at = dict.fromkeys(self._states, -math.inf)

    def due(self, now: float) -> list[Message]:
        """What is to be sent now."""
        messages = []
        for topic, at in self._due_at.items():
            if now >= at:
                payload, expiry_s = self._states[topic]
                self._due_at[topic] = math.inf if expiry_s is None else now + expiry_s / 2
                messages.append(Message(topic, payload, 1, True, expiry_s, now))
        return messages


class Window:
    """QoS 1 messages between publication and the broker's acknowledgement, by packet id.

    At most the server's Receive Maximum at a time (MQTT 5, 3.3.4); closed while there is no connection.
    """

    def __init__(self) -> None:
        self._in_flight: OrderedDict[int, Message] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._in_flight)

    @property
    def has_room(self) -> bool:
        return len(self._in_flight) < self._size

    def open(self, receive_maximum: int) -> None:
        self._size = receive_maximum

    def close(self) -> list[Message]:
        """The connection is gone: give back what was not acknowledged, oldest first."""
        unacknowledged = list(self._in_flight.values())
        self._in_flight.clear()
        self._size = 0
        return unacknowledged

    def sent(self, packet_id: int, message: Message) -> None:
        self._in_flight[packet_id] = message

    def acknowledged(self, packet_id: int) -> Message | None:
        """The message that this id stood for, None when it is not in flight."""
        return self._in_flight.pop(packet_id, None)
