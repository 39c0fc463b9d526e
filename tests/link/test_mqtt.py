"""The link against a real broker: what arrives, what is dropped, and what happens when the network does its worst."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from link.client import Will
from link.config import BrokerConfig, TlsConfig
from link.mqtt import MqttLink
from link.outbox import EXPIRED, NO_MATCHING_SUBSCRIBERS, PACKET_TOO_LARGE, QUOTA_EXCEEDED
from protocol.errors import ConfigError, WireError
from tests.link.ends import Make, until
from tools.broker import Broker, available, find_mosquitto, free_port
from tools.wan import WanThread

pytestmark = pytest.mark.skipif(not available(), reason="no MQTT broker is installed")
mosquitto_only = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


@pytest.mark.parametrize("qos", [0, 1])
def test_messages_go_both_ways(broker: Broker, end: Make, qos: int) -> None:
    one = end(broker.port, "one", subscriptions=[("both/one", qos)])
    two = end(broker.port, "two", subscriptions=[("both/two", qos), ("both/all", 0)])
    assert one.link.publish("both/two", b"ping", qos)
    assert two.link.publish("both/one", b"pong", qos)
    until(lambda: two.messages == [("both/two", b"ping")] and one.messages == [("both/one", b"pong")])
    assert one.states == [(True, "connected")]
    counters = one.link.counters()
    assert (counters.sent, counters.received, counters.bytes_sent, counters.connects) == (1, 1, 4, 1)


def test_a_message_may_be_answered_from_the_callback(broker: Broker, end: Make) -> None:
    def answer(topic: str, payload: bytes) -> None:
        server.link.publish("answer", payload[::-1], 1)

    server = end(broker.port, "server", subscriptions=[("ask", 0)], on_message=answer)
    client = end(broker.port, "client", subscriptions=[("answer", 0)])
    client.link.publish("ask", b"abc")
    until(lambda: client.payloads() == [b"cba"])


def test_a_callback_that_fails_does_not_stop_the_link(broker: Broker, end: Make, caplog: Any) -> None:
    def fail(topic: str, payload: bytes) -> None:
        seen.append(payload)
        raise RuntimeError("a mistake of the application")

    seen: list[bytes] = []
    one = end(broker.port, "one", subscriptions=[("fail", 0)], on_message=fail)
    for number in range(3):
        one.link.publish("fail", bytes([number]))
    until(lambda: len(seen) == 3)
    assert "a mistake of the application" in caplog.text


def test_small_messages_are_not_delayed(broker: Broker, end: Make) -> None:
    """Nagle's algorithm with a delayed ACK would cost 40 ms, but seldom on loopback: so the option is asked as well."""
    one = end(broker.port, "one", subscriptions=[("quick", 0)])
    assert one.link._client is not None
    sock: Any = one.link._client.socket()
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    trips = []
    for number in range(40):
        start = time.perf_counter()
        one.link.publish("quick", bytes([number]))
        while len(one.messages) <= number:
            time.sleep(0.0001)
        trips.append(time.perf_counter() - start)
    assert sorted(trips)[20] < 0.010


def test_subscriptions_come_and_go_at_run_time(broker: Broker, end: Make) -> None:
    one = end(broker.port, "one")
    one.link.subscribe("run/time", 1)
    one.link.publish("run/time", b"1", 1)
    until(lambda: one.payloads() == [b"1"])
    one.link.unsubscribe("run/time")
    one.link.publish("run/time", b"2", 1)
    until(lambda: len(one.acks) == 2)
    assert one.payloads() == [b"1"]


@mosquitto_only
def test_nobody_listening_is_reported(end: Make) -> None:
    with Broker.start(kind="mosquitto") as broker:
        one = end(broker.port, "one", subscriptions=[("somebody", 1)])
        one.link.publish("nobody", b"open", 1)
        one.link.publish("somebody", b"open", 1)
        until(lambda: one.acks == [("nobody", NO_MATCHING_SUBSCRIBERS), ("somebody", 0)])


def test_a_subscription_made_while_connecting_is_not_lost(broker: Broker, end: Make) -> None:
    for number in range(12):
        one = end(broker.port, "one", up=False, subscriptions=[("first", 0)])
        time.sleep(number * 0.0005)
        one.link.subscribe(f"early/{number}", 0)
        one.link.wait_up(5.0)
        one.link.publish(f"early/{number}", b"x")
        until(lambda one=one: one.payloads() == [b"x"])  # type: ignore[misc]


def test_a_topic_that_cannot_be_published_to_is_the_callers_mistake(broker: Broker, end: Make) -> None:
    one = end(broker.port, "one")
    for topic in ("", "a/+/b", "a/#", "a\0b", "x" * 65536):
        with pytest.raises(WireError, match="cannot publish"):
            one.link.publish(topic, b"")


def test_a_payload_over_the_limit_is_not_sent(broker: Broker, end: Make) -> None:
    one = end(broker.port, "one", subscriptions=[("large", 0)], config={"max_packet_bytes": 4096})
    assert not one.link.publish("large", bytes(5000), 1)
    assert one.link.publish("large", bytes(4000), 1)
    until(lambda: one.acks == [("large", PACKET_TOO_LARGE), ("large", 0)])
    assert one.link.counters().refused == 1
    assert [len(payload) for payload in one.payloads()] == [4000]


def test_large_payloads_arrive_whole_and_in_order(broker: Broker, end: Make) -> None:
    one = end(broker.port, "one", subscriptions=[("big", 1)])
    payloads = [bytes([number]) * (256 << 10) for number in range(6)]
    for payload in payloads:
        assert one.link.publish("big", payload, 1)
    until(lambda: one.payloads() == payloads)


def test_what_the_socket_does_not_take_at_once_follows_at_once(end: Make) -> None:
    """Not at the next tick of the link's clock, half a second later. The server reads after the socket was full."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        one = end(server.getsockname()[1], "one", up=False)
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(b"\x20\x03\x00\x00\x00")
            one.link.wait_up(5.0)
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                assert one.link.publish("rest", bytes(1_000_000))
                left = 1_000_000
                while left > 0:
                    left -= len(connection.recv(65536))
                seconds.append(time.perf_counter() - start)
                time.sleep(0.01)
    assert sorted(seconds)[2] < 0.2


def test_the_servers_limits_are_obeyed(end: Make) -> None:
    """A server that announces Receive Maximum 1 and packets of 100 bytes at most, and acknowledges nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = end(server.getsockname()[1], "one", up=False)
        connection, _ = server.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(b"\x20\x0b\x00\x00\x08\x21\x00\x01\x27\x00\x00\x00\x64")
            one.link.wait_up(5.0)
            assert not one.link.publish("a", bytes(100))
            assert one.link.publish("a", bytes(50))
            for _ in range(3):
                assert one.link.publish("a", bytes(50), 1)
            assert one.link.counters().sent == 2


@mosquitto_only
def test_the_servers_receive_maximum_is_obeyed(end: Make) -> None:
    """Behind a delay, so that acknowledgements are late: never more in flight than the broker takes, all arrive."""
    with Broker.start(kind="mosquitto", receive_maximum=3) as broker, WanThread(("127.0.0.1", broker.port)) as wan:
        reader = end(broker.port, "reader", subscriptions=[("many", 0)])
        writer = end(wan.port, "writer")
        wan.set_outage("freeze")
        for number in range(20):
            writer.link.publish("many", bytes([number]), 1)
        assert writer.link.counters().sent == 3
        wan.set_outage(None)
        until(lambda: reader.payloads() == [bytes([number]) for number in range(20)])
        until(lambda: writer.link.counters().acknowledged == 20)


# Without a connection.


def test_qos_0_without_a_connection_is_dropped_at_once(end: Make) -> None:
    one = end(free_port(), "one", up=False)
    start = time.perf_counter()
    assert not any(one.link.publish("a", b"x") for _ in range(100))
    assert time.perf_counter() - start < 0.1
    assert one.link.counters().dropped == 100


def test_qos_1_waits_for_the_first_connection(end: Make) -> None:
    port = free_port()
    one = end(port, "one", up=False, subscriptions=[("later", 0)])
    assert all(one.link.publish("later", bytes([number]), 1) for number in range(5))
    until(lambda: one.states != [])
    with Broker.start(port):
        until(lambda: one.payloads() == [bytes([number]) for number in range(5)])


def test_a_full_queue_drops_its_oldest_and_says_so(end: Make) -> None:
    port = free_port()
    one = end(port, "one", up=False, subscriptions=[("q/+", 0)], config={"max_queued_messages": 2})
    for number in range(4):
        assert one.link.publish(f"q/{number}", b"", 1)
    until(lambda: one.acks == [("q/0", QUOTA_EXCEEDED), ("q/1", QUOTA_EXCEEDED)])
    with Broker.start(port):
        until(lambda: [topic for topic, _ in one.messages] == ["q/2", "q/3"])


def test_what_expired_while_it_waited_is_not_sent(end: Make) -> None:
    port = free_port()
    one = end(port, "one", up=False, subscriptions=[("old/+", 0)])
    one.link.publish("old/short", b"", 1, expiry_s=0.2)
    one.link.publish("old/long", b"", 1, expiry_s=60)
    time.sleep(0.3)
    with Broker.start(port):
        until(lambda: one.acks == [("old/short", EXPIRED), ("old/long", 0)])
        until(lambda: one.messages == [("old/long", b"")])
        assert one.link.counters().expired == 1


def test_the_will_is_published_when_the_process_vanishes(broker: Broker, end: Make) -> None:
    watcher = end(broker.port, "watcher", subscriptions=[("state/one", 1)])
    with WanThread(("127.0.0.1", broker.port)) as wan:
        end(wan.port, "one", will=Will("state/one", b"gone", retain=True, expiry_s=60))
        wan.set_outage("cut")
        until(lambda: watcher.payloads() == [b"gone"])


def test_the_will_is_not_published_after_close(broker: Broker, end: Make) -> None:
    watcher = end(broker.port, "watcher", subscriptions=[("state/two", 1)])
    one = end(broker.port, "one", will=Will("state/two", b"gone"))
    one.link.publish("state/two", b"bye", 1)
    assert one.link.close()
    time.sleep(0.3)
    assert watcher.payloads() == [b"bye"]
    assert one.states[-1] == (False, "closed")
    assert not one.link.publish("state/two", b"late", 1)


def test_close_sends_what_waits_at_qos_1(broker: Broker, end: Make) -> None:
    reader = end(broker.port, "reader", subscriptions=[("flush", 0)])
    with WanThread(("127.0.0.1", broker.port), rtt_s=0.1) as wan:
        writer = end(wan.port, "writer")
        for number in range(30):
            writer.link.publish("flush", bytes([number]), 1)
        assert writer.link.close(3.0)
    until(lambda: len(reader.messages) == 30)


def test_close_does_not_wait_for_ever(broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", broker.port)) as wan:
        one = end(wan.port, "one")
        wan.set_outage("freeze")
        one.link.publish("a", b"", 1)
        start = time.monotonic()
        assert not one.link.close(0.3)
        assert time.monotonic() - start < 2.0


def test_retained_state_is_sent_at_each_connect_refreshed_and_forgotten(end: Make) -> None:
    with Broker.start() as first:
        one = end(first.port, "one")
        one.link.retain("state/kept", b"on", expiry_s=1.0)
        one.link.retain("state/fixed", b"serial 7")
        watcher = end(first.port, "watcher", subscriptions=[("state/kept", 0)])
        until(lambda: len(watcher.messages) >= 3, 4.0)
        first.kill()
        with Broker.start(first.port):
            late = end(first.port, "late", subscriptions=[("state/kept", 0)])
            fixed = end(first.port, "fixed", subscriptions=[("state/fixed", 0)])
            until(lambda: b"on" in late.payloads() and b"serial 7" in fixed.payloads())
            one.link.forget("state/kept")
            until(lambda: late.payloads()[-1] == b"")
            quiet = len(late.messages)
            time.sleep(0.8)
            assert len(late.messages) == quiet
            later = end(first.port, "later", subscriptions=[("state/kept", 0)])
            time.sleep(0.2)
            assert later.messages == []


# When the network is frozen: nothing passes and nobody is told.


def test_publish_never_blocks_and_memory_is_bounded_in_a_freeze(broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", broker.port)) as wan:
        one = end(wan.port, "one", config={"backlog_bytes": 64 << 10, "max_queued_bytes": 64 << 10})
        wan.set_outage("freeze")
        calls = []
        for number in range(3000):
            start = time.perf_counter()
            one.link.publish("frozen", bytes(4096), qos=int(number % 10 == 0))
            calls.append(time.perf_counter() - start)
        calls.sort()
        assert calls[len(calls) // 2] < 0.001
        assert calls[len(calls) * 99 // 100] < 0.005, "the slowest hundredth is the machine's"
        counters = one.link.counters()
        held = 3000 - counters.sent - counters.dropped
        assert held * 4096 < 160 << 10, "waiting in our queues"
        assert counters.bytes_sent < 8 << 20, "waiting in the kernel's"
        assert counters.dropped > 500


def test_many_at_once_arrive_as_one_by_one(broker: Broker, end: Make) -> None:
    """In their order, with what is published alone before and after, whole and without a gap."""
    reader = end(broker.port, "reader", subscriptions=[("many/#", 0)])
    writer = end(broker.port, "writer")
    burst = [(f"many/{number % 7}", number.to_bytes(4, "big") + bytes(number)) for number in range(1, 300)]
    writer.link.publish("many/alone", b"first")
    assert writer.link.publish_all(burst) == 0
    writer.link.publish("many/alone", b"last")
    until(lambda: len(reader.messages) == 301)
    assert reader.messages == [("many/alone", b"first"), *burst, ("many/alone", b"last")]
    assert writer.link.counters().sent == 301


def test_many_at_once_are_held_to_the_same_limits(broker: Broker, end: Make) -> None:
    writer = end(broker.port, "writer", config={"max_packet_bytes": 1024})
    assert writer.link.publish_all([("few", b"x"), ("few", bytes(2000)), ("few", b"y")]) == 1
    assert writer.link.counters().refused == 1
    with pytest.raises(WireError, match="few"):
        writer.link.publish_all([("fine", b"x"), ("few/#", b"y")])
    assert writer.link.counters().sent == 2
    writer.link.close()
    assert writer.link.publish_all([("few", b"x")]) == 1


def test_messages_of_both_qos_arrive_in_the_order_of_their_sending(broker: Broker, end: Make) -> None:
    reader = end(broker.port, "reader", subscriptions=[("both", 1)])
    writer = end(broker.port, "writer")
    for number in range(60):
        writer.link.publish("both", bytes((number,)), qos=number % 3 == 0)
    until(lambda: len(reader.messages) == 60)
    for qos in (True, False):
        numbers = [payload[0] for payload in reader.payloads() if (payload[0] % 3 == 0) is qos]
        assert numbers == sorted(numbers)


def test_what_is_fresh_passes_first_after_a_freeze(broker: Broker, end: Make) -> None:
    """Drafts of before the freeze have expired or made room for newer ones."""
    with WanThread(("127.0.0.1", broker.port)) as wan:
        reader = end(broker.port, "reader", subscriptions=[("fresh", 0)])
        writer = end(wan.port, "writer", config={"backlog_bytes": 16 << 10})
        wan.set_outage("freeze")
        for number in range(1500):
            writer.link.publish("fresh", number.to_bytes(4, "big") + bytes(4092))
        wan.set_outage(None)
        until(lambda: bool(reader.messages) and reader.messages[-1][1][:4] == (1499).to_bytes(4, "big"))
        numbers = [int.from_bytes(payload[:4], "big") for payload in reader.payloads()]
        assert numbers == sorted(numbers)
        assert len(numbers) < 1500


def test_what_waited_at_qos_0_is_dropped_with_the_connection(broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", broker.port)) as wan:
        reader = end(broker.port, "reader", subscriptions=[("stale", 0)])
        writer = end(wan.port, "writer")
        wan.set_outage("freeze")
        for _ in range(2500):
            writer.link.publish("stale", bytes(4096))
        wan.set_outage("cut")
        until(lambda: not writer.link.up)
        wan.set_outage(None)
        writer.link.wait_up(5.0)
        writer.link.publish("stale", b"fresh")
        until(lambda: reader.payloads() == [b"fresh"])
        counters = writer.link.counters()
        assert counters.sent + counters.dropped == 2501


def test_a_dead_connection_is_noticed_by_the_keepalive(broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", broker.port)) as wan:
        one = end(wan.port, "one", config={"keepalive_s": 1})
        wan.set_outage("freeze")
        until(lambda: not one.link.up, 4.0)
        assert f"127.0.0.1:{wan.port}: connection lost" in one.states[-1][1]
        wan.set_outage(None)
        one.link.wait_up(5.0)


def test_many_threads_may_publish_at_once(broker: Broker, end: Make) -> None:
    reader = end(broker.port, "reader", subscriptions=[("threads/+", 0)])
    writer = end(broker.port, "writer")

    def write(name: int) -> None:
        for number in range(100):
            writer.link.publish(f"threads/{name}", bytes([number]) * (1 + 50 * name), qos=name % 2)

    threads = [threading.Thread(target=write, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: len(reader.messages) == 400)
    for name in range(4):
        got = [payload[0] for topic, payload in reader.messages if topic == f"threads/{name}"]
        assert got == list(range(100))


# TLS.


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[Broker]:
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    pytest.importorskip("cryptography")
    with Broker.start(kind="mosquitto", tls=True) as running:
        yield running


def test_tls_carries_large_and_small_messages(tls_broker: Broker, end: Make) -> None:
    tls = TlsConfig(ca=tls_broker.ca)
    one = end(tls_broker.port, "one", subscriptions=[("tls", 1)], config={"tls": tls})
    payloads = [bytes([number]) * size for number, size in enumerate([1, 300_000, 10, 70_000] * 3)]
    for payload in payloads:
        one.link.publish("tls", payload, 1)
    until(lambda: one.payloads() == payloads)


def test_a_certificate_that_is_not_trusted_is_named(tls_broker: Broker, end: Make) -> None:
    one = end(tls_broker.port, "one", up=False, config={"tls": TlsConfig()})
    until(lambda: one.states != [])
    assert f"127.0.0.1:{tls_broker.port}: TLS: " in one.states[0][1]
    assert "Check `ca`" in one.states[0][1]


def test_tls_to_a_plain_port_is_named(broker: Broker, end: Make) -> None:
    one = end(broker.port, "one", up=False, config={"tls": TlsConfig()})
    until(lambda: one.states != [])
    assert f"127.0.0.1:{broker.port}: " in one.states[0][1]
    assert not one.link.up


def test_files_that_are_no_certificates_are_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"ca\.pem"):
        MqttLink(BrokerConfig(tls=TlsConfig(ca=tmp_path / "ca.pem")), "x", on_message=lambda topic, payload: None)


def test_a_machine_that_is_not_enrolled_yet_is_told_to(tmp_path: Path) -> None:
    tls = TlsConfig(cert=tmp_path / "board.pem", key=tmp_path / "board.key")
    with pytest.raises(ConfigError, match=r"board\.key.*Enrol this machine"):
        MqttLink(BrokerConfig(tls=tls), "x", on_message=lambda topic, payload: None)


def test_over_tls_messages_that_came_together_are_read_together(
    tls_broker: Broker, end: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of TLS holds one message; read one by one, each would take paho's long way."""
    taken_by_paho: list[str] = []
    whole_way = MqttLink._received
    monkeypatch.setattr(MqttLink, "_received", lambda self, *given: (taken_by_paho.append(""), whole_way(self, *given)))
    tls = {"tls": TlsConfig(ca=tls_broker.ca)}
    held = threading.Event()
    two = end(tls_broker.port, "two", config=tls, subscriptions=[("many/#", 0)])
    one = end(tls_broker.port, "one", config=tls)
    two.link._on_message = lambda topic, payload: (held.wait(5), two.messages.append((topic, payload)))
    for number in range(400):
        one.link.publish("many/of", b"%d" % number)
    time.sleep(0.3)
    held.set()
    until(lambda: len(two.messages) == 400)
    assert two.payloads() == [b"%d" % number for number in range(400)]
    assert len(taken_by_paho) < 100


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="TCP_USER_TIMEOUT is Linux's")
def test_a_connection_whose_packets_nobody_acknowledges_is_given_up_within_seconds(broker: Broker, end: Make) -> None:
    """By the kernel; what it does for a board, `tests/faults` shows with packets that are lost."""
    one = end(broker.port, "one")
    assert one.link._client is not None
    sock = one.link._client.socket()
    assert sock is not None
    assert 2000 <= sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 5000
