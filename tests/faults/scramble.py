"""A proxy that knows MQTT and does to messages what a network of many ways would: it doubles them and lets them
overtake each other. Other packets keep their place, and topic aliases, which only work in order, are resolved first.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from link.packets import PUBLISH, QOS, publish_packet, read_publish

DUP = 0x08


@dataclass(frozen=True, slots=True)
class Disorder:
    """late_s: at most added to a message, each on its own; doubles: the share of them that come twice."""

    late_s: float = 0.0
    doubles: float = 0.0


class Scrambler:
    """Listens on `port` and forwards MQTT connections to a broker. All methods belong to one event loop."""

    def __init__(self, to: tuple[str, int], seed: int = 0) -> None:
        self._to, self._random = to, random.Random(seed)
        self._server: asyncio.Server | None = None
        self._ways: set[asyncio.Task[None]] = set()
        self.disorder = Disorder()
        self.port = self.doubled = self.overtaken = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for way in self._ways:
            way.cancel()

    async def _accepted(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        try:
            far, far_out = await asyncio.open_connection(*self._to)
        except OSError:
            near_out.transport.abort()
            return
        for source, sink, other in ((near, far_out, near_out), (far, near_out, far_out)):
            way = asyncio.ensure_future(self._forward(source, sink, other))
            self._ways.add(way)
            way.add_done_callback(self._ways.discard)

    async def _forward(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, other: asyncio.StreamWriter
    ) -> None:
        aliases: dict[int, str] = {}
        last_at = 0.0
        try:
            while True:
                packet = plain(await read_packet(source), aliases)
                if packet[0] & 0xF0 != PUBLISH or self.disorder == Disorder():
                    sink.write(packet)
                    continue
                loop = asyncio.get_running_loop()
                at = loop.time() + self._random.uniform(0.0, self.disorder.late_s)
                self.overtaken += at < last_at
                last_at = max(last_at, at)
                loop.call_at(at, send_on(sink, packet))
                if self._random.random() < self.disorder.doubles:
                    self.doubled += 1
                    again = packet if not packet[0] & QOS else bytes((packet[0] | DUP,)) + packet[1:]
                    loop.call_at(at + self._random.uniform(0.0, self.disorder.late_s), send_on(sink, again))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for end in (sink, other):
                end.transport.abort()


def send_on(sink: asyncio.StreamWriter, packet: bytes) -> Callable[[], None]:
    def send() -> None:
        with suppress(OSError):
            if not sink.transport.is_closing():
                sink.write(packet)

    return send


async def read_packet(source: asyncio.StreamReader) -> bytes:
    """The next whole packet (MQTT 5, 2.1). Raises IncompleteReadError at the end."""
    head = bytearray(await source.readexactly(2))
    length, shift = head[1] & 0x7F, 7
    while head[-1] & 0x80:
        head += await source.readexactly(1)
        length |= (head[-1] & 0x7F) << shift
        shift += 7
    return bytes(head) + await source.readexactly(length)


def plain(packet: bytes, aliases: dict[int, str]) -> bytes:
    """The packet with its topic in full, as the connection's `aliases` tell it; those that it names are noted there."""
    found = read_publish(packet, 0)
    if found is None or found[1] is None:
        return packet
    topic, alias, payload, _ = found
    aliases[alias] = topic = topic or aliases[alias]
    return publish_packet(topic, payload, retain=bool(packet[0] & 1))
