"""The long link: bytes arrive whole, in order and on time, slower at a rate, and not at all in an outage."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from protocol.errors import LinkError
from tools.wan import Direction, WanThread, parse_outage


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what it gets, any number of connections."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            try:
                while data := connection.recv(65536):
                    connection.sendall(data)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield server.getsockname()
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def connect(port: int, timeout: float = 5.0) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=timeout)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def receive(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += sock.recv(size - len(data)) or pytest.fail("the connection ended")
    return bytes(data)


def round_trip_ms(sock: socket.socket) -> float:
    start = time.perf_counter()
    sock.sendall(b"x")
    receive(sock, 1)
    return (time.perf_counter() - start) * 1e3


def test_round_trip_is_the_configured_one(echo: tuple[str, int]) -> None:
    with WanThread(echo, rtt_s=0.080) as wan, connect(wan.port) as sock:
        trips = [round_trip_ms(sock) for _ in range(12)]
        late_ms = wan.counters().late_ms
    assert min(trips) >= 79.9
    assert statistics.median(trips) < 84
    assert late_ms < 1


def test_delays_do_not_add_up(echo: tuple[str, int]) -> None:
    """Fifty messages 2 ms apart over 80 ms take 180 ms, not fifty round trips."""
    with WanThread(echo, rtt_s=0.080) as wan, connect(wan.port) as sock:
        start = time.perf_counter()
        for number in range(50):
            sock.sendall(bytes([number]))
            time.sleep(0.002)
        data = receive(sock, 50)
        seconds = time.perf_counter() - start
    assert data == bytes(range(50))
    assert seconds < 0.4


def test_throughput_is_not_bound_by_the_delay(echo: tuple[str, int]) -> None:
    payload = os.urandom(4 << 20)
    with WanThread(echo, rtt_s=0.080) as wan, connect(wan.port) as sock:
        threading.Thread(target=sock.sendall, args=(payload,), daemon=True).start()
        start = time.perf_counter()
        data = receive(sock, len(payload))
        seconds = time.perf_counter() - start
        counters = wan.counters()
    assert data == payload
    assert seconds < 2.0
    assert (counters.bytes_up, counters.bytes_down) == (len(payload), len(payload))


def test_jitter_varies_the_delay_but_keeps_the_order(echo: tuple[str, int]) -> None:
    with WanThread(echo, rtt_s=0.010, jitter_s=0.020, seed=3) as wan, connect(wan.port) as sock:
        trips = [round_trip_ms(sock) for _ in range(15)]
        for number in range(100):
            sock.sendall(bytes([number]))
            time.sleep(0.001)
        data = receive(sock, 100)
    assert data == bytes(range(100))
    assert max(trips) - min(trips) > 8
    assert max(trips) < 60


def test_rate_is_shared_by_all_connections(echo: tuple[str, int]) -> None:
    """Two connections of 50 kB each at 1600 kbit/s: 0.5 s together, not a quarter each."""
    with WanThread(echo, rate_kbit=1600) as wan, connect(wan.port) as one, connect(wan.port) as two:
        start = time.perf_counter()
        for sock in (one, two):
            threading.Thread(target=sock.sendall, args=(bytes(50_000),), daemon=True).start()
        receive(one, 50_000)
        receive(two, 50_000)
        seconds = time.perf_counter() - start
    assert 0.45 < seconds < 0.8


def test_a_wire_at_rate_is_busy_for_the_bytes_before() -> None:
    direction = Direction(0.010, 0.0, 8000.0, seed=0)  # 1 byte a ms
    assert direction.release_at(1.0, 100) == pytest.approx(1.110)
    assert direction.release_at(1.0, 100) == pytest.approx(1.210)
    assert direction.release_at(5.0, 100) == pytest.approx(5.110)


def test_a_freeze_holds_all_bytes_and_loses_none(echo: tuple[str, int]) -> None:
    with WanThread(echo) as wan, connect(wan.port) as sock:
        round_trip_ms(sock)
        wan.set_outage("freeze")
        sock.sendall(b"held")
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        wan.set_outage(None)
        sock.settimeout(5.0)
        assert receive(sock, 4) == b"held"


def test_a_freeze_is_felt_by_the_sender(echo: tuple[str, int]) -> None:
    """What the proxy and its sockets swallow is bounded, so a sender soon sees a full socket."""
    with WanThread(echo) as wan, connect(wan.port) as sock:
        round_trip_ms(sock)
        wan.set_outage("freeze")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        sock.setblocking(False)
        taken = 0
        with pytest.raises(BlockingIOError):
            while taken < 16 << 20:
                taken += sock.send(bytes(65536))
                time.sleep(0.001)
        assert taken < 4 << 20


def test_a_cut_ends_connections_and_refuses_new_ones_until_it_is_over(echo: tuple[str, int]) -> None:
    with WanThread(echo) as wan, connect(wan.port) as sock:
        round_trip_ms(sock)
        wan.set_outage("cut")
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            connect(wan.port)
        wan.set_outage(None)
        with connect(wan.port) as again:
            round_trip_ms(again)


def test_the_end_of_a_connection_travels_both_ways(echo: tuple[str, int]) -> None:
    with WanThread(echo, rtt_s=0.020) as wan:
        with connect(wan.port) as sock:
            sock.sendall(b"last")
            sock.shutdown(socket.SHUT_WR)
            assert receive(sock, 4) == b"last"
            assert sock.recv(1) == b""
        deadline = time.monotonic() + 2
        while wan.counters().open and time.monotonic() < deadline:
            time.sleep(0.01)
        assert wan.counters().open == 0


def test_command_line_tells_the_port_and_counts(echo: tuple[str, int]) -> None:
    command = [sys.executable, "-m", "tools.wan", "--to", f"{echo[0]}:{echo[1]}", "--rtt-ms", "20", "--json"]
    process = subprocess.Popen([*command, "--outage", "0.2:0.4"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["listening"].rpartition(":")[2])
        with connect(port) as sock:
            trips = []
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                trips.append(round_trip_ms(sock))
        assert max(trips) > 250, "the scheduled outage was not felt"
        assert statistics.median(trips) < 30
        process.send_signal(signal.SIGTERM)
        counters = json.loads(process.communicate(timeout=5)[0])
        assert counters["bytes_up"] == counters["bytes_down"] == len(trips)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_bytes_are_counted_from_a_mark_on(echo: tuple[str, int]) -> None:
    with WanThread(echo) as wan, connect(wan.port) as sock:
        sock.sendall(bytes(1000))
        receive(sock, 1000)
        mark = wan.counters()
        sock.sendall(bytes(70))
        receive(sock, 70)
        since = wan.counters().since(mark)
        assert (since.connections, since.open, since.bytes_up, since.bytes_down) == (0, 1, 70, 70)
    assert wan.counters().bytes_up == 1070


def test_command_line_tells_its_counters_while_it_runs(echo: tuple[str, int]) -> None:
    command = [sys.executable, "-m", "tools.wan", "--to", f"{echo[0]}:{echo[1]}", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(json.loads(process.stdout.readline())["listening"].rpartition(":")[2])
        bytes_up = []
        with connect(port) as sock:
            for size in (10, 200, 3000):
                sock.sendall(bytes(size))
                receive(sock, size)
                process.send_signal(signal.SIGUSR1)
                bytes_up.append(json.loads(process.stdout.readline())["bytes_up"])
        assert bytes_up == [10, 210, 3210]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken_is_named(echo: tuple[str, int]) -> None:
    with pytest.raises(LinkError, match=f"127.0.0.1:{echo[1]}: cannot listen"):
        WanThread(echo, listen=echo).start()
    command = [sys.executable, "-m", "tools.wan", "--to", "127.0.0.1:1", "--listen", f"127.0.0.1:{echo[1]}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode != 0 and "cannot listen" in done.stderr


def test_a_far_end_that_refuses_ends_the_connection() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        with (
            WanThread(taken.getsockname()) as wan,
            connect(wan.port) as sock,
            contextlib.suppress(ConnectionResetError),
        ):
            assert sock.recv(1) == b""


def test_a_wrong_outage_is_refused() -> None:
    assert parse_outage("5:2.5:cut") == (5.0, 2.5, "cut")
    for text in ("5", "a:b", "-1:2", "1:2:slow"):
        with pytest.raises(Exception, match="START:DURATION"):
            parse_outage(text)
