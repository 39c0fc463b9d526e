"""What the project needs of a broker, asked of each kind that is installed with a plain MQTT 5 client."""

from __future__ import annotations

import queue
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from protocol.errors import OutriderError
from tools.broker import KINDS, LACKS, Broker, available, end_process, free_port

LIMIT_S = 5.0


@pytest.fixture(scope="module", params=KINDS)
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    if request.param not in available():
        pytest.skip(f"{request.param} is not installed")
    with Broker.start(kind=request.param) as running:
        yield running


def need(broker: Broker, feature: str) -> None:
    """Skip what a broker is known, and documented, to lack."""
    if feature in LACKS[broker.kind]:
        pytest.skip(f"{broker.kind} lacks it: {LACKS[broker.kind][feature]}")


class Peer:
    """A connected client whose messages, publish acknowledgements and connect answer can be waited for."""

    def __init__(self, broker: Broker, name: str, will: tuple[str, bytes] | None = None) -> None:
        self.messages: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.acks: queue.Queue[tuple[int, int]] = queue.Queue()
        self.grants: queue.Queue[list[int]] = queue.Queue()
        self.connack: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = client = paho.Client(CallbackAPIVersion.VERSION2, client_id=name, protocol=paho.MQTTv5)
        client.on_connect = lambda c, u, flags, reason, properties: self.connack.put((reason, properties))
        client.on_message = lambda c, u, message: self.messages.put(message)
        client.on_publish = lambda c, u, mid, reason, properties: self.acks.put((mid, reason.value))
        client.on_subscribe = lambda c, u, mid, reasons, properties: self.grants.put([r.value for r in reasons])
        if will is not None:
            client.will_set(will[0], will[1], qos=1, retain=True)
        client.connect(broker.host, broker.port, keepalive=10)
        client.loop_start()
        self.reason, self.limits = self.connack.get(timeout=LIMIT_S)

    def subscribe(self, topic_filter: str, qos: int = 1) -> Peer:
        self.client.subscribe(topic_filter, options=SubscribeOptions(qos=qos))
        assert self.grants.get(timeout=LIMIT_S) == [qos]
        return self

    def publish(self, topic: str, payload: bytes, qos: int = 1, retain: bool = False, expiry_s: int = 0) -> int:
        """The reason code that the broker acknowledged with."""
        properties = Properties(PacketTypes.PUBLISH)
        if expiry_s:
            properties.MessageExpiryInterval = expiry_s
        mid = self.client.publish(topic, payload, qos, retain, properties).mid
        while True:
            acknowledged, reason = self.acks.get(timeout=LIMIT_S)
            if acknowledged == mid:
                return reason

    def next(self, timeout: float = LIMIT_S) -> paho.MQTTMessage:
        return self.messages.get(timeout=timeout)

    def nothing_for(self, seconds: float) -> bool:
        try:
            self.messages.get(timeout=seconds)
        except queue.Empty:
            return True
        return False

    def vanish(self) -> None:
        """End the connection without a goodbye."""
        sock = self.client.socket()
        self.client.reconnect_delay_set(60, 60)
        sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


@pytest.fixture
def peer(broker: Broker) -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(name: str, **options: Any) -> Peer:
        peers.append(Peer(broker, f"{name}-{time.monotonic_ns()}", **options))
        return peers[-1]

    yield make
    for one in peers:
        one.client.disconnect()
        one.client.loop_stop()


@contextmanager
def unique(base: str) -> Iterator[str]:
    yield f"{base}/{time.monotonic_ns()}"


@pytest.mark.parametrize("qos", [0, 1])
def test_carries_messages_both_ways(peer: Callable[..., Peer], qos: int) -> None:
    with unique("both") as topic:
        one, two = peer("one").subscribe(f"{topic}/one", qos), peer("two").subscribe(f"{topic}/two", qos)
        assert one.publish(f"{topic}/two", b"ping", qos) == 0
        assert two.next().payload == b"ping"
        assert two.publish(f"{topic}/one", b"pong", qos) == 0
        assert one.next().payload == b"pong"


def test_keeps_the_order(peer: Callable[..., Peer]) -> None:
    with unique("order") as topic:
        reader, writer = peer("reader").subscribe(topic, 0), peer("writer")
        for number in range(200):
            writer.client.publish(topic, bytes([number]), 0)
        assert [reader.next().payload[0] for _ in range(200)] == list(range(200))


def test_wildcards_match_one_level(peer: Callable[..., Peer]) -> None:
    with unique("wild") as topic:
        reader, writer = peer("reader").subscribe(f"{topic}/+/draft/v1"), peer("writer")
        writer.publish(f"{topic}/tenant.board/draft/v2", b"other")
        writer.publish(f"{topic}/tenant.board/draft/v1", b"mine")
        assert reader.next().payload == b"mine"


@pytest.mark.parametrize("qos", [0, 1])
def test_a_shared_subscription_gives_each_message_to_one_and_spreads_them(peer: Callable[..., Peer], qos: int) -> None:
    with unique("share") as topic:
        readers = [peer(f"reader{n}").subscribe(f"$share/target/{topic}/+/open", qos) for n in range(2)]
        writer = peer("writer")
        for number in range(40):
            writer.publish(f"{topic}/b{number}/open", bytes([number]), qos)
        time.sleep(0.5)
        got = [[reader.messages.get().payload[0] for _ in range(reader.messages.qsize())] for reader in readers]
        assert Counter(got[0] + got[1]) == Counter(range(40))
        assert min(len(part) for part in got) >= 8


def test_who_leaves_the_share_gets_no_more(peer: Callable[..., Peer]) -> None:
    with unique("leave") as topic:
        stays, leaves = (peer(name).subscribe(f"$share/target/{topic}", 1) for name in ("stays", "leaves"))
        leaves.client.unsubscribe(f"$share/target/{topic}")
        time.sleep(0.3)
        writer = peer("writer")
        for number in range(10):
            writer.publish(topic, bytes([number]))
        assert [stays.next().payload[0] for _ in range(10)] == list(range(10))
        assert leaves.nothing_for(0.1)


def test_who_vanishes_from_the_share_gets_no_more(broker: Broker, peer: Callable[..., Peer]) -> None:
    with unique("gone") as topic:
        stays, gone = (peer(name).subscribe(f"$share/target/{topic}", 1) for name in ("stays", "gone"))
        gone.vanish()
        time.sleep(0.3)
        writer = peer("writer")
        for number in range(10):
            writer.publish(topic, bytes([number]))
        assert [stays.next().payload[0] for _ in range(10)] == list(range(10))


def test_a_retained_message_is_given_to_who_comes_later_until_it_expires(peer: Callable[..., Peer]) -> None:
    with unique("retained") as topic:
        peer("writer").publish(topic, b"state", retain=True, expiry_s=2)
        message = peer("early").subscribe(topic).next()
        assert message.payload == b"state" and message.retain
        time.sleep(2.5)
        assert peer("late").subscribe(topic).nothing_for(0.4)


def test_a_retained_message_is_removed_by_an_empty_one(peer: Callable[..., Peer]) -> None:
    with unique("removed") as topic:
        writer = peer("writer")
        writer.publish(topic, b"state", retain=True)
        writer.publish(topic, b"", retain=True)
        assert peer("late").subscribe(topic).nothing_for(0.4)


def test_announces_the_life_that_a_message_has_left(peer: Callable[..., Peer]) -> None:
    with unique("left") as topic:
        peer("writer").publish(topic, b"state", retain=True, expiry_s=30)
        time.sleep(2.1)
        assert 25 <= peer("late").subscribe(topic).next().properties.MessageExpiryInterval <= 28


def test_publishes_the_will_of_who_vanishes(peer: Callable[..., Peer]) -> None:
    with unique("will") as topic:
        watcher = peer("watcher").subscribe(topic)
        peer("mortal", will=(topic, b"gone")).vanish()
        assert watcher.next().payload == b"gone"
        assert peer("late").subscribe(topic).next().payload == b"gone"


def test_does_not_publish_the_will_of_who_says_goodbye(peer: Callable[..., Peer]) -> None:
    with unique("goodbye") as topic:
        watcher = peer("watcher").subscribe(topic)
        peer("polite", will=(topic, b"gone")).client.disconnect()
        assert watcher.nothing_for(0.5)


def test_carries_large_payloads(peer: Callable[..., Peer]) -> None:
    payload = bytes(range(256)) * 1024
    with unique("large") as topic:
        reader, writer = peer("reader").subscribe(topic), peer("writer")
        for _ in range(4):
            assert writer.publish(topic, payload) == 0
            assert reader.next().payload == payload


def test_tells_that_nobody_subscribes(broker: Broker, peer: Callable[..., Peer]) -> None:
    need(broker, "no matching subscribers")
    with unique("nobody") as topic:
        assert peer("writer").publish(topic, b"hello?") == 0x10


def test_announces_its_receive_maximum(broker: Broker, peer: Callable[..., Peer]) -> None:
    need(broker, "receive maximum")
    assert peer("any").limits.ReceiveMaximum == 64


def test_delivers_at_the_lower_of_both_qos(broker: Broker, peer: Callable[..., Peer]) -> None:
    need(broker, "lower qos")
    with unique("qos") as topic:
        reader = peer("reader").subscribe(topic, 1)
        peer("writer").publish(topic, b"x", 0)
        assert reader.next().qos == 0


@pytest.mark.parametrize("kind", KINDS)
def test_refuses_a_wrong_password(kind: str) -> None:
    if kind not in available():
        pytest.skip(f"{kind} is not installed")
    with Broker.start(kind=kind, password=("board", "secret")) as broker:
        for password, welcome in (("secret", True), ("wrong", False)):
            answers: queue.Queue[bool] = queue.Queue()
            client = paho.Client(CallbackAPIVersion.VERSION2, client_id="x", protocol=paho.MQTTv5)
            client.username_pw_set("board", password)
            client.on_connect = lambda c, u, f, reason, p, answers=answers: answers.put(not reason.is_failure)
            client.on_disconnect = lambda c, u, f, reason, p, answers=answers: answers.put(False)
            client.connect(broker.host, broker.port)
            client.loop_start()
            assert answers.get(timeout=LIMIT_S) is welcome
            client.disconnect()
            client.loop_stop()


def test_tls_with_a_certificate_for_loopback() -> None:
    if "mosquitto" not in available():
        pytest.skip("mosquitto is not installed")
    pytest.importorskip("cryptography")
    with Broker.start(kind="mosquitto", tls=True, password=("board", "secret")) as broker:
        assert broker.ca is not None
        for host in ("127.0.0.1", "localhost"):
            answers: queue.Queue[bool] = queue.Queue()
            client = paho.Client(CallbackAPIVersion.VERSION2, client_id="x", protocol=paho.MQTTv5)
            client.username_pw_set("board", "secret")
            client.tls_set_context(strict_context(broker.ca))
            client.on_connect = lambda c, u, f, reason, p, answers=answers: answers.put(not reason.is_failure)
            client.connect(host, broker.port)
            client.loop_start()
            assert answers.get(timeout=LIMIT_S)
            client.disconnect()
            client.loop_stop()
        with pytest.raises(ssl.SSLCertVerificationError), socket.create_connection((broker.host, broker.port)) as sock:
            ssl.create_default_context().wrap_socket(sock, server_hostname="localhost")
    with Broker.start(kind="mosquitto") as plain:
        assert plain.ca is None


def strict_context(ca: Path) -> ssl.SSLContext:
    """As Python 3.13 checks certificates by default: the authority's must say all that RFC 5280 asks of it."""
    context = ssl.create_default_context(cafile=ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    return context


def test_tls_where_there_is_none_is_told() -> None:
    if "iotcore" not in available():
        pytest.skip("iotcore is not installed")
    with pytest.raises(OutriderError, match="no TLS with iotcore"):
        Broker.start(kind="iotcore", tls=True)


def test_resolves_topic_aliases_and_rebinds_them(broker: Broker, peer: Callable[..., Peer]) -> None:
    with unique("alias") as topic:
        reader, writer = peer("reader").subscribe(f"{topic}/+", 0), peer("writer")
        assert writer.limits.TopicAliasMaximum >= 10
        for name in ("a", "", "b", "", "a"):
            properties = Properties(PacketTypes.PUBLISH)
            properties.TopicAlias = 10
            writer.client.publish(f"{topic}/{name}" if name else "", b"", 0, properties=properties)
        assert [reader.next().topic for _ in range(5)] == [f"{topic}/{name}" for name in "aabba"]


@pytest.mark.parametrize("granted", [0, 3])
def test_grants_as_many_topic_aliases_as_asked(granted: int) -> None:
    if "mosquitto" not in available():
        pytest.skip("mosquitto is not installed")
    with Broker.start(kind="mosquitto", topic_aliases=granted) as broker:
        client = Peer(broker, "any")
        assert getattr(client.limits, "TopicAliasMaximum", 0) == granted
        client.client.disconnect()
        client.client.loop_stop()


def test_a_taken_port_is_told(broker: Broker) -> None:
    with pytest.raises(OutriderError, match=f"port {broker.port}"):
        Broker.start(broker.port, kind=broker.kind, timeout_s=3.0)


def test_stop_frees_the_port() -> None:
    port = free_port()
    for kind in available():
        broker = Broker.start(port, kind=kind)
        broker.stop()
        broker.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=1)


@pytest.mark.parametrize(("heeded", "code"), [(2, 0), (1000, -signal.SIGKILL)])
def test_a_broker_that_misses_the_first_signal_ends_all_the_same(heeded: int, code: int) -> None:
    """As mosquitto does when the signal comes right after it began to listen."""
    script = (
        "import signal, sys, time\n"
        "got = []\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (got.append(1), len(got) < {heeded} or sys.exit(0)))\n"
        "print(flush=True)\n"
        "while True: time.sleep(9)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        end_process(process)
    assert process.returncode == code


def test_a_kind_that_is_not_there_is_named() -> None:
    with pytest.raises(OutriderError, match="no MQTT broker"):
        Broker.start(kind="emqx")
