"""What a message costs on the wire, counted at a proxy, and that what makes it short never delivers a wrong topic."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from link.config import TlsConfig
from tests.link.ends import End, Make, until
from tools.broker import KINDS, Broker, available, find_mosquitto
from tools.wan import Counters, WanThread

mosquitto_only = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

TOPIC = "outrider/v1/acme.board-0001/draft/v0123456789"
PUBLISH = 2 + 2 + 1  # bytes: fixed header, length of the topic, length of the properties
ALIAS, EXPIRY, PACKET_ID = 3, 5, 2  # bytes
TLS_RECORD = 5 + 1 + 16  # bytes: header, type, tag of AES-GCM in TLS 1.3


@pytest.fixture(params=KINDS)
def each_broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    if request.param not in available():
        pytest.skip(f"{request.param} is not installed")
    with Broker.start(kind=request.param) as running:
        yield running


def settled(wan: WanThread) -> Counters:
    """The counters once nothing has come in for a while."""
    while True:
        before = wan.counters()
        time.sleep(0.15)
        if (after := wan.counters()).since(before).bytes_up == 0:
            return after


def sent_bytes(wan: WanThread, writer: End, num: int, payload: bytes, **options: Any) -> float:
    """Bytes a message from the writer to the broker, of `num` on one topic after a first one."""
    writer.link.publish(TOPIC, payload, **options)
    mark = settled(wan)
    for _ in range(num):
        assert writer.link.publish(TOPIC, payload, **options)
    return settled(wan).since(mark).bytes_up / num


def test_a_topic_is_sent_once(each_broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", each_broker.port)) as wan:
        reader = end(each_broker.port, "reader", subscriptions=[("outrider/v1/+/draft/v0123456789", 0)])
        writer = end(wan.port, "writer")
        assert sent_bytes(wan, writer, 50, bytes(21)) == PUBLISH + ALIAS + 21
        until(lambda: reader.messages == [(TOPIC, bytes(21))] * 51)


@mosquitto_only
def test_a_topic_is_sent_each_time_where_the_broker_grants_no_aliases(end: Make) -> None:
    with (
        Broker.start(kind="mosquitto", topic_aliases=0) as broker,
        WanThread(("127.0.0.1", broker.port)) as wan,
    ):
        reader = end(broker.port, "reader", subscriptions=[(TOPIC, 0)])
        writer = end(wan.port, "writer")
        assert sent_bytes(wan, writer, 50, bytes(21)) == PUBLISH + len(TOPIC) + 21
        until(lambda: reader.messages == [(TOPIC, bytes(21))] * 51)


@mosquitto_only
def test_tls_adds_one_record_a_message(end: Make) -> None:
    with (
        Broker.start(kind="mosquitto", tls=True) as broker,
        WanThread(("127.0.0.1", broker.port)) as wan,
    ):
        config = {"tls": TlsConfig(ca=broker.ca)}
        reader = end(broker.port, "reader", subscriptions=[(TOPIC, 0)], config=config)
        writer = end(wan.port, "writer", config=config)
        assert sent_bytes(wan, writer, 50, bytes(21)) == PUBLISH + ALIAS + 21 + TLS_RECORD
        until(lambda: reader.messages == [(TOPIC, bytes(21))] * 51)


def test_the_broker_is_told_of_an_expiry_only_where_it_keeps_the_message(broker: Broker, end: Make) -> None:
    with WanThread(("127.0.0.1", broker.port)) as wan:
        writer = end(wan.port, "writer")
        end(broker.port, "reader", subscriptions=[(TOPIC, 1)])
        assert sent_bytes(wan, writer, 20, b"", expiry_s=2) == PUBLISH + ALIAS
        assert sent_bytes(wan, writer, 20, b"", expiry_s=2, retain=True) == PUBLISH + ALIAS + EXPIRY
        assert sent_bytes(wan, writer, 20, b"", qos=1, expiry_s=2) == PUBLISH + len(TOPIC) + PACKET_ID + EXPIRY


def test_what_may_be_sent_again_carries_its_topic(each_broker: Broker, end: Make) -> None:
    """In flight at QoS 1 while the connection is cut: the next one does not know the aliases of the last."""
    with WanThread(("127.0.0.1", each_broker.port)) as wan:
        reader = end(each_broker.port, "reader", subscriptions=[("again/#", 1)])
        writer = end(wan.port, "writer")
        writer.link.publish("again/one", b"short")
        writer.link.publish("again/one", b"short")
        until(lambda: len(reader.messages) == 2)
        wan.set_outage("freeze")
        for number in range(5):
            writer.link.publish("again/one", bytes([number]), 1)
        wan.set_outage("cut")
        until(lambda: not writer.link.up)
        wan.set_outage(None)
        until(lambda: writer.link.counters().acknowledged == 5)
        until(lambda: set(reader.payloads()) == {b"short", *(bytes([number]) for number in range(5))})
        assert {topic for topic, _ in reader.messages} == {"again/one"}


def test_aliases_begin_anew_with_each_connection(each_broker: Broker, end: Make) -> None:
    """Each payload names its topic; between connections, topics come in another order and so get other aliases."""
    topics = [f"anew/{name}" for name in ("alpha", "beta", "gamma")]
    with WanThread(("127.0.0.1", each_broker.port)) as wan:
        reader = end(each_broker.port, "reader", subscriptions=[("anew/+", 0)])
        writer = end(wan.port, "writer")
        for connection in range(4):
            for topic in 3 * (topics[connection % 3 :] + topics[: connection % 3]):
                assert writer.link.publish(topic, f"{topic} {connection}".encode())
            until(lambda connection=connection: len(reader.messages) == 9 * (connection + 1))  # type: ignore[misc]
            wan.set_outage("cut")
            until(lambda: not writer.link.up)
            wan.set_outage(None)
            writer.link.wait_up(5.0)
        assert writer.link.counters().connects == 5
        assert all(payload.decode().split()[0] == topic for topic, payload in reader.messages)


@mosquitto_only
def test_a_restarted_broker_may_grant_less(end: Make) -> None:
    topics = [f"less/{number}" for number in range(5)]

    def publish(port: int) -> None:
        writer.link.wait_up(5.0)
        reader = end(port, "reader", subscriptions=[("less/+", 0)])
        for topic in topics * 4:
            assert writer.link.publish(topic, topic.encode())
        until(lambda: len(reader.messages) == 20)
        assert all(payload.decode() == topic for topic, payload in reader.messages)

    with Broker.start(kind="mosquitto") as first:
        writer = end(first.port, "writer")
        publish(first.port)
        first.kill()
        until(lambda: not writer.link.up)
        for connects, granted in ((2, 2), (3, 0)):
            with Broker.start(first.port, kind="mosquitto", topic_aliases=granted) as restarted:
                publish(restarted.port)
                assert writer.link.counters().connects == connects
            until(lambda: not writer.link.up)


@mosquitto_only
def test_more_topics_than_aliases(end: Make) -> None:
    """A verifier of 24 boards, four of them three times as busy, with mosquitto's own limit of ten aliases."""
    boards = [f"outrider/v1/acme.board-{number:04}/verdict" for number in range(24)]
    chosen = random.Random(7).choices(boards, weights=[3] * 4 + [1] * 20, k=600)
    with (
        Broker.start(kind="mosquitto", topic_aliases=10) as broker,
        WanThread(("127.0.0.1", broker.port)) as wan,
    ):
        reader = end(broker.port, "reader", subscriptions=[("outrider/v1/+/verdict", 0)])
        writer = end(wan.port, "writer")
        mark = wan.counters()
        for topic in chosen:
            assert writer.link.publish(topic, topic.encode())
        until(lambda: len(reader.messages) == len(chosen))
        assert reader.messages == [(topic, topic.encode()) for topic in chosen]
        in_full = len(chosen) * (PUBLISH + len(boards[0]) * 2)
        saved = in_full - wan.counters().since(mark).bytes_up
        assert saved > 0.35 * len(chosen) * len(boards[0])
        assert writer.link.counters().connects == 1


# What the broker shortens. A scripted broker, since mosquitto 2.0 sends no aliases, and rumqttd wrong ones.

CONNACK = b"\x20\x03\x00\x00\x00"
SUBACK = b"\x90\x04\x00\x01\x00\x00"
OFFER = b"\x22\x00\x10"  # Topic Alias Maximum 16


def aliased(topic: bytes, alias: int, payload: bytes) -> bytes:
    body = len(topic).to_bytes(2, "big") + topic + b"\x03\x23" + alias.to_bytes(2, "big") + payload
    return bytes([0x30, len(body)]) + body


def accept(server: socket.socket) -> tuple[socket.socket, bytes]:
    """The next connection, subscribed, and the client's CONNECT."""
    connection, _ = server.accept()
    connection.settimeout(5.0)
    connect = connection.recv(1024)
    connection.sendall(CONNACK)
    connection.recv(1024)
    connection.sendall(SUBACK)
    return connection, connect


def test_topics_that_the_broker_shortens_are_restored(end: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        options: dict[str, Any] = {"subscriptions": [("#", 0)], "config": {"topic_aliases": 16}}
        one = end(server.getsockname()[1], "one", up=False, **options)
        connection, connect = accept(server)
        with connection:
            assert OFFER in connect
            connection.sendall(
                aliased(b"a", 1, b"a") + aliased(b"", 1, b"a") + aliased(b"b", 1, b"b") + aliased(b"", 1, b"b")
            )
            until(lambda: one.messages == [("a", b"a"), ("a", b"a"), ("b", b"b"), ("b", b"b")])
        connection, _ = accept(server)
        with connection:  # which does not know what the last one bound
            one.link.wait_up(5.0)
            connection.sendall(aliased(b"", 1, b"?"))
            assert connection.recv(1024) == b"\xe0\x01\x94", "DISCONNECT, topic alias invalid"
        until(lambda: "topic alias 1 stands for no topic" in one.states[-1][1])
        assert len(one.messages) == 4


def test_the_broker_is_not_asked_to_shorten_unless_configured(broker: Broker, end: Make) -> None:
    """rumqttd binds an alias to a subscription, so that with a wildcard topics would be mixed up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end(server.getsockname()[1], "one", up=False, subscriptions=[("#", 0)])
        connection, connect = accept(server)
        connection.close()
        assert connect[12:14] == b"\x05\x27", "its properties: Maximum Packet Size alone"
    reader = end(broker.port, "reader", subscriptions=[("mixed/+", 0)])
    writer = end(broker.port, "writer")
    for topic in ["mixed/a", "mixed/b"] * 3:
        writer.link.publish(topic, topic.encode())
    until(lambda: len(reader.messages) == 6)
    assert all(payload.decode() == topic for topic, payload in reader.messages)
