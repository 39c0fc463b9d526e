"""A TCP proxy that behaves like a long link: delay, jitter, a rate, outages (`python -m tools.wan --help`).

Bytes are released at arrival + delay, however many are on their way, so that delays never add up. What it does not
imitate: packet loss (TCP would turn it into jitter) and the round trip of TCP's own handshake.
"""

from __future__ import annotations

import asyncio
import json
import random
import selectors
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeVar

import click

from protocol.errors import LinkError

T = TypeVar("T")
Outage = Literal["freeze", "cut"]

SOCKET_BUFFER = 128 << 10  # small, so that a frozen link is felt by the sender as it would be
HELD_BYTES = 4 << 20  # on their way in one direction of one connection; beyond it the sender waits
QUEUE_S = 0.25  # what the bottleneck of a link with a rate queues, beside what is on its way
SEGMENT = 1448  # bytes that pass a bottleneck at a time


@dataclass(slots=True)
class Counters:
    """up: from the listening side to the far end. late_ms: median lateness of releases.

    Bytes are what TCP carries, MQTT and TLS and all, without the headers of TCP and IP; counted as they come in.
    """

    connections: int = 0
    open: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    late_ms: float = 0.0

    def since(self, mark: Counters) -> Counters:
        """What came after `mark` was read; `open` and `late_ms` as they are."""
        return replace(
            self,
            connections=self.connections - mark.connections,
            bytes_up=self.bytes_up - mark.bytes_up,
            bytes_down=self.bytes_down - mark.bytes_down,
        )


class Direction:
    """One way of the link, shared by all connections: its delay, its rate and when the wire is free again."""

    def __init__(self, delay_s: float, jitter_s: float, rate_bps: float | None, seed: int) -> None:
        self._random = random.Random(seed)
        self._free_at = 0.0
        self.bytes = 0
        self.shape(delay_s, jitter_s, rate_bps)

    def shape(self, delay_s: float, jitter_s: float, rate_bps: float | None) -> None:
        """What holds for bytes that arrive from now on; those on their way keep their time."""
        self._delay_s, self._jitter_s, self._rate_bps = delay_s, jitter_s, rate_bps
        self.segment = SEGMENT if rate_bps else HELD_BYTES
        self.held_bytes = max(SEGMENT, int(rate_bps / 8 * (delay_s + QUEUE_S))) if rate_bps else HELD_BYTES

    def release_at(self, now: float, size: int) -> float:
        """When `size` bytes that arrive now leave the other end."""
        self.bytes += size
        if self._rate_bps:
            self._free_at = max(now, self._free_at) + size * 8 / self._rate_bps
            now = self._free_at
        return now + self._delay_s + self._random.uniform(0.0, self._jitter_s)


class _Half(asyncio.Protocol):
    """Bytes from one socket to its twin, one direction of one connection."""

    def __init__(self, proxy: WanProxy, direction: Direction) -> None:
        self._proxy, self._direction = proxy, direction
        self.twin: _Half
        self.transport: asyncio.Transport | None = None
        self._on_way: deque[tuple[float, bytes | None]] = deque()  # b"": end of stream; None: the socket is gone
        self._held = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writable = True
        self._read_all = self._written_all = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy.halves.add(self)
        self.gate()

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), self._direction.segment):
            self._enqueue(data[start : start + self._direction.segment])
        self.gate()

    def eof_received(self) -> bool:
        self._enqueue(b"")
        self._read_all = True
        self._close_if_done()
        return True  # the other way may still be in use

    def connection_lost(self, error: Exception | None) -> None:
        self._enqueue(None)
        self._proxy.halves.discard(self)

    def pause_writing(self) -> None:
        self.twin._writable = False

    def resume_writing(self) -> None:
        self.twin._writable = True
        self.twin.release()

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._on_way.clear()
        if self.transport is not None:
            self.transport.abort()

    def gate(self) -> None:
        """Read only while the link passes and holds less than its limit."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._proxy.frozen or self._held > self._direction.held_bytes:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _close_if_done(self) -> None:
        if self._read_all and self._written_all and self.transport is not None:
            self.transport.close()

    def _enqueue(self, data: bytes | None) -> None:
        size = len(data) if data else 0
        at = self._direction.release_at(self._proxy.clock(), size)
        if self._on_way:
            at = max(at, self._on_way[-1][0])  # TCP keeps the order: the one before holds it up
        self._on_way.append((at, data))
        self._held += size
        if len(self._on_way) == 1:
            self.release()

    def release(self) -> None:
        """Pass on what is due, and set the timer for the next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._on_way and self._writable and not self._proxy.frozen:
            at, data = self._on_way[0]
            now = self._proxy.clock()
            if at > now:
                self._timer = asyncio.get_running_loop().call_at(at, self.release)
                break
            self._on_way.popleft()
            self._proxy.lateness.append(now - at)
            out = self.twin.transport
            if out is None or out.is_closing():
                continue
            if data is None:
                out.close()
            elif data:
                self._held -= len(data)
                out.write(data)
            else:
                with suppress(OSError):  # the far end has closed already
                    out.write_eof()
                self.twin._written_all = True
                self.twin._close_if_done()
        self.gate()


class WanProxy:
    """Forwards TCP connections over an emulated long link. All methods belong to one event loop; see `WanThread`.

    rtt_s: round trip, half of it each way; jitter_s: at most added to each way, order kept; rate_kbit: kilobits a
    second each way, shared by all connections. Raises LinkError when it cannot listen.
    """

    def __init__(
        self,
        to: tuple[str, int],
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        rtt_s: float = 0.0,
        jitter_s: float = 0.0,
        rate_kbit: float | None = None,
        seed: int = 0,
    ) -> None:
        self._to, self._listen = to, listen
        rate_bps = rate_kbit * 1000 if rate_kbit else None
        self._up = Direction(rtt_s / 2, jitter_s, rate_bps, seed)
        self._down = Direction(rtt_s / 2, jitter_s, rate_bps, seed + 1)
        self._server: asyncio.Server | None = None
        self._schedule: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_connections = 0
        self.port = listen[1]
        self.frozen = False
        self.halves: set[_Half] = set()
        self.lateness: deque[float] = deque([0.0], maxlen=4096)
        self.clock = time.monotonic

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        await self._open()

    async def stop(self) -> None:
        for timer in self._schedule:
            timer.cancel()
        self._close()

    def counters(self) -> Counters:
        late_ms = statistics.median(self.lateness) * 1e3
        return Counters(
            self._num_connections, len(self.halves) // 2, self._up.bytes, self._down.bytes, round(late_ms, 3)
        )

    def shape(self, *, rtt_s: float = 0.0, jitter_s: float = 0.0, rate_kbit: float | None = None) -> None:
        """Another kind of link from now on, connections and all."""
        for direction in (self._up, self._down):
            direction.shape(rtt_s / 2, jitter_s, rate_kbit * 1000 if rate_kbit else None)

    async def set_outage(self, mode: Outage | None) -> None:
        """freeze: nothing passes and nobody is told; cut: connections end and new ones are refused; None: over."""
        self.frozen = mode == "freeze"
        if mode == "cut":
            self._close()
        elif self._server is None:
            await self._open()
        for half in list(self.halves):
            half.release()

    def schedule_outage(self, start_s: float, duration_s: float, mode: Outage = "freeze") -> None:
        """An outage that begins start_s from now."""
        loop = asyncio.get_running_loop()
        self._schedule.append(loop.call_later(start_s, self._run, self.set_outage, mode))
        self._schedule.append(loop.call_later(start_s + duration_s, self._run, self.set_outage, None))

    def _run(self, work: Callable[[T], Coroutine[Any, Any, None]], argument: T) -> None:
        task = asyncio.ensure_future(work(argument))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER)
        try:
            listener.bind((self._listen[0], self.port))
        except OSError as error:
            listener.close()
            where = f"{self._listen[0]}:{self.port}"
            raise LinkError(f"cannot listen: {error.strerror}", where=where, remedy="Choose another port.") from None
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(self._accepted, sock=listener)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for half in list(self.halves):
            half.abort()

    def _accepted(self) -> _Half:
        near = _Half(self, self._up)
        near.twin = _Half(self, self._down)
        near.twin.twin = near
        self._num_connections += 1
        self._run(self._connect, near)
        return near

    async def _connect(self, near: _Half) -> None:
        near._writable = False
        try:
            await asyncio.get_running_loop().create_connection(lambda: near.twin, *self._to)
        except OSError:
            near.abort()
            return
        near._writable = True
        near.release()


class WanThread:
    """A WanProxy on a thread and event loop of its own, for callers that have none. A context manager.

    The arguments are WanProxy's.
    """

    def __init__(self, to: tuple[str, int], **options: Any) -> None:
        self.proxy = WanProxy(to, **options)
        # select() waits to the microsecond, the default epoll to the next millisecond
        self._loop = precise_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wan", daemon=True)

    @property
    def port(self) -> int:
        return self.proxy.port

    def counters(self) -> Counters:
        async def read() -> Counters:
            return self.proxy.counters()

        return self._call(read()) if self._thread.is_alive() else self.proxy.counters()

    def set_outage(self, mode: Outage | None) -> None:
        self._call(self.proxy.set_outage(mode))

    def start(self) -> WanThread:
        self._thread.start()
        try:
            self._call(self.proxy.start())
        except LinkError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._call(self.proxy.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> WanThread:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop whose timers are exact to some 0.1 ms: select() takes microseconds, epoll rounds up to one ms."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT. Raises click.BadParameter."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise click.BadParameter(f"{text!r} is not HOST:PORT")
    return host, int(port)


def parse_outage(text: str) -> tuple[float, float, Outage]:
    """START:DURATION or START:DURATION:cut, in seconds. Raises click.BadParameter."""
    start, _, rest = text.partition(":")
    duration, _, mode = rest.partition(":")
    try:
        times = float(start), float(duration)
    except ValueError:
        times = -1.0, -1.0
    if min(times) < 0 or mode not in ("", "freeze", "cut"):
        raise click.BadParameter(f"{text!r} is not START:DURATION or START:DURATION:cut, in seconds")
    return *times, "cut" if mode == "cut" else "freeze"


async def _serve(proxy: WanProxy, outages: Iterable[tuple[float, float, Outage]], as_json: bool) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: _tell(proxy.counters(), as_json))
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await proxy.start()
    for outage in outages:
        proxy.schedule_outage(*outage)
    host, port = proxy._listen[0], proxy.port
    click.echo(json.dumps({"listening": f"{host}:{port}"}) if as_json else f"listening on {host}:{port}")
    await ended.wait()
    _tell(proxy.counters(), as_json)
    await proxy.stop()


def _tell(counters: Counters, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(counters)))
    else:
        click.echo(
            f"{counters.connections} connections, {counters.bytes_up} bytes up, {counters.bytes_down} bytes down, "
            f"released {counters.late_ms} ms late (median)"
        )


@click.command()
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="HOST:PORT; port 0 takes a free one.")
@click.option("--to", required=True, help="HOST:PORT of the far end.")
@click.option("--rtt-ms", type=click.FloatRange(min=0), default=0.0, help="Round trip, half of it each way.")
@click.option("--jitter-ms", type=click.FloatRange(min=0), default=0.0, help="At most added to each way, order kept.")
@click.option("--rate-kbit", type=click.FloatRange(min=0, min_open=True), help="Kilobits a second each way.")
@click.option("--outage", multiple=True, metavar="START:DURATION[:cut]", help="Seconds from the start; repeatable.")
@click.option("--seed", default=0, help="Of the jitter.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object at the start, one each time it tells its counters."
)
def main(
    listen: str, to: str, rtt_ms: float, jitter_ms: float, rate_kbit: float | None, outage: tuple[str, ...],
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Forward TCP connections as over a long, slow or broken link.

    It tells its counters at the end, and at each SIGUSR1: the difference of two is what crossed the wire in between.
    """
    proxy = WanProxy(
        parse_address(to),
        listen=parse_address(listen),
        rtt_s=rtt_ms / 1e3,
        jitter_s=jitter_ms / 1e3,
        rate_kbit=rate_kbit,
        seed=seed,
    )
    loop = precise_loop()
    try:
        loop.run_until_complete(_serve(proxy, [parse_outage(text) for text in outage], as_json))
    except LinkError as error:
        raise click.ClickException(str(error)) from None
    finally:
        loop.close()


if __name__ == "__main__":
    main()
