"""Many devices' connections in one thread: as much of MQTT 5 as a device of a load generator speaks, and no more.

A client library a device would measure itself: the work of two hundred boards would be done on one processor, in the
middle of what is timed. Boards have processors of their own, so a message has arrived when the kernel has it, not when
this process gets round to reading it.
"""

from __future__ import annotations

import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from link.config import BrokerConfig
from protocol.errors import LinkError

CONNECT, CONNACK, PUBLISH, PUBACK, SUBSCRIBE, SUBACK = 0x10, 0x20, 0x30, 0x40, 0x80, 0x90
READ_BYTES = 1 << 16
ANSWER_S = 10.0
SO_TIMESTAMPNS = 35  # Linux: socket(7) has SO_TIMESTAMP; Python names neither
TIMESPEC = struct.Struct("@ll")


class Wire:
    """One device's connection: clean, without keepalive, its subscriptions at QoS 0.

    sent, acknowledged: publishes by QoS 0 and 1, and answers to those at QoS 1. Raises LinkError when it is refused.
    """

    def __init__(self, broker: BrokerConfig, name: str, subscriptions: Iterable[str]) -> None:
        self.name = name
        self.sent, self.acknowledged = [0, 0], 0
        self._packet_id = 1
        self._unread = bytearray()
        self._sock = socket.create_connection((broker.host, broker.port), ANSWER_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(_packet(CONNECT, _text("MQTT"), b"\5\2\0\0\0", _text(name)))
        self._await(CONNACK, 1)
        filters = [_text(one) + b"\0" for one in subscriptions]
        self._sock.sendall(_packet(SUBSCRIBE | 2, b"\0\1\0", *filters))
        self._await(SUBACK, -1)
        self._sock.setblocking(False)
        if sys.platform == "linux":
            self._sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def publish(self, topic: str, payload: bytes, qos: int = 0) -> None:
        """Send at once. Raises BlockingIOError where the socket is full, which a few bytes at a time never fill."""
        packet_id = b""
        if qos:
            self._packet_id = self._packet_id % 0xFFFF + 1
            packet_id = self._packet_id.to_bytes(2, "big")
        self._sock.send(_packet(PUBLISH | qos << 1, _text(topic), packet_id, b"\0", payload))
        self.sent[qos] += 1

    def read(self) -> Iterator[tuple[str, bytes, float]]:
        """(topic, payload, arrived at, by the monotonic clock) of what has come. Raises LinkError when the broker has
        ended the connection.
        """
        at = 0.0
        with suppress(BlockingIOError):
            data, notes, _, _ = self._sock.recvmsg(READ_BYTES, socket.CMSG_SPACE(TIMESPEC.size))
            if not data:
                raise LinkError("the broker ended the connection", where=self.name)
            self._unread += data
            age_s = 0.0
            for _, kind, note in notes:
                if kind == SO_TIMESTAMPNS:
                    seconds, nanoseconds = TIMESPEC.unpack(note)
                    age_s = time.time() - seconds - nanoseconds / 1e9
            at = time.monotonic() - age_s  # at once: a busy machine may stop this process between any two clocks
        for kind, body in self._packets():
            if kind & 0xF0 == PUBLISH:
                length = int.from_bytes(body[:2], "big")
                num_properties, begin = _number(body, 2 + length)
                yield body[2 : 2 + length].decode(), bytes(body[begin + num_properties :]), at
            elif kind == PUBACK:
                self.acknowledged += 1

    def _await(self, kind: int, at: int) -> None:
        """The answer to what was asked; the byte at `at` of its body says whether it is a refusal."""
        while True:
            for found, body in self._packets():
                if found == kind:
                    if body[at] >= 0x80:
                        raise LinkError(f"the broker refused with {body[at]:#x}", where=self.name)
                    return
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise LinkError("the broker ended the connection", where=self.name)
            self._unread += data

    def _packets(self) -> Iterator[tuple[int, bytes]]:
        """Whole packets among the unread bytes: first byte and body."""
        while len(self._unread) >= 2:
            length, at = _number(self._unread, 1)
            if at == 0 or len(self._unread) < at + length:
                return
            kind, body = self._unread[0], bytes(self._unread[at : at + length])
            del self._unread[: at + length]
            yield kind, body


class Crowd:
    """The connections of many devices, read in turn by one thread. on_message(wire, topic, payload, arrived at)."""

    def __init__(self, wires: Iterable[Wire], on_message: Callable[[Wire, str, bytes, float], None]) -> None:
        self._on_message = on_message
        self._selector = selectors.DefaultSelector()
        for wire in wires:
            self._selector.register(wire, selectors.EVENT_READ, wire)

    def look(self, wait_s: float) -> None:
        """Read what has come, and wait for it at most so long."""
        for key, _ in self._selector.select(wait_s):
            for topic, payload, at in key.data.read():
                self._on_message(key.data, topic, payload, at)


def _packet(kind: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    length, rest = bytearray(), len(body)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes((kind, *length)) + body


def _text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def _number(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """A variable byte integer (MQTT 5, 1.5.5) and where it ends; (0, 0) while it is not there as a whole."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    return 0, 0
