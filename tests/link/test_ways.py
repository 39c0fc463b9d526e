"""Ways out of a network that lets little through: an HTTP proxy, MQTT in a WebSocket, both, with and without TLS."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from link.config import BrokerConfig, TlsConfig
from link.tunnel import Proxy
from link.websocket import WebSocket
from tests.link.ends import Make, until
from tests.link.proxy import ConnectProxy, refusal
from tools.broker import Broker, find_mosquitto, free_port
from tools.wan import WanThread

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

WAYS = ["proxy", "websocket", "proxy, websocket"]


class Place:
    """A broker at the end of one way, and what a link to it is configured with."""

    def __init__(self, stack: ExitStack, way: str, tls: bool) -> None:
        self.way, self.stack = way, stack
        self.options = {"tls": tls, "websockets": "websocket" in way}
        self.broker = stack.enter_context(Broker.start(**self.options))
        self.port = self.broker.websockets_port or self.broker.port
        self.proxy = stack.enter_context(ConnectProxy("me", "p@ss:/%")) if "proxy" in way else None
        self.config: dict[str, Any] = {"transport": "websocket" if "websocket" in way else "tcp"}
        if tls:
            self.config["tls"] = TlsConfig(ca=self.broker.ca)
        if self.proxy is not None:
            self.config["proxy"] = f"http://me:p%40ss%3A%2F%25@127.0.0.1:{self.proxy.port}"


@pytest.fixture(params=[(way, tls) for way in WAYS for tls in (False, True)], ids=lambda p: p[0] + ", TLS" * p[1])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, *request.param)


def test_messages_of_all_sizes_arrive_in_order(place: Place, end: Make) -> None:
    """Small ones in a burst at QoS 0 and larger ones at QoS 1 there and back, and what no socket takes whole on the way
    to the broker. mosquitto 2.0 hands a WebSocket ten pieces of 4 KiB a second, so back comes nothing as large.
    """
    plain = {"tls": place.config["tls"]} if "tls" in place.config else {}
    reader = end(place.broker.port, "reader", subscriptions=[("t/huge", 1)], config=plain)
    one = end(place.port, "one", subscriptions=[("t/large", 1), ("t/small", 1)], config=place.config)
    huge = [bytes([number]) * (300_000 + number) for number in range(4)]
    large = [bytes([number]) * (4000 + number) for number in range(4)]
    small = [b"small %d" % number for number in range(200)]
    for payloads, topic in ((huge, "t/huge"), (large, "t/large")):
        for payload in payloads:
            one.link.publish(topic, payload, 1)
    one.link.publish_all([("t/small", payload) for payload in small])
    until(lambda: len(one.messages) == len(small) + len(large) and len(reader.messages) == len(huge))
    assert reader.payloads() == huge
    assert [payload for topic, payload in one.messages if topic == "t/large"] == large
    assert [payload for topic, payload in one.messages if topic == "t/small"] == small
    if place.proxy is not None:
        assert set(place.proxy.targets) == {f"127.0.0.1:{place.port}"}
        assert place.proxy.bytes_through > sum(map(len, huge))


def test_the_link_comes_back_when_the_way_was_cut(place: Place, end: Make) -> None:
    with WanThread(("127.0.0.1", place.port)) as wan:
        one = end(wan.port, "one", subscriptions=[("again", 1)], config=place.config)
        wan.set_outage("cut")
        until(lambda: any(not up for up, _ in one.states))
        wan.set_outage(None)
        one.link.wait_up(5.0)
        one.link.publish("again", b"x", 1)
        until(lambda: one.payloads() == [b"x"])


def test_nagle_s_algorithm_is_off(place: Place, end: Make) -> None:
    one = end(place.port, "one", config=place.config)
    client = one.link._client
    assert client is not None
    with socket.socket(fileno=socket.dup(client.socket().fileno())) as same:
        assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# What a person is told.


def said(end: Make, port: int, **config: Any) -> str:
    """What the first attempt that failed was reported with."""
    one = end(port, "one", up=False, config={"connect_timeout_s": 1.0} | config)
    until(lambda: one.states != [])
    assert one.states[0][0] is False
    return one.states[0][1].removeprefix(f"{one.link.failure.where}: ")


@pytest.mark.parametrize(
    ("answer", "url", "words"),
    [
        (refusal(407, "Proxy-Authenticate: Basic realm=x\r\n"), "http://", "wants a user and a password (407). Write"),
        (refusal(407, "Proxy-Authenticate: Basic realm=x\r\n"), "http://me:no@", "does not take the user 'me' with"),
        (
            refusal(407, "Proxy-Authenticate: NTLM\r\nProxy-Authenticate: Negotiate\r\n"),
            "http://me:no@",
            "wants NTLM or Negotiate authentication (407). This link knows Basic only",
        ),
        (refusal(401), "http://me:no@", "does not take the user 'me' with this password (401)"),
        (b"HTTP/1.1 103 Early\r\n\r\n" + refusal(403), "http://", "does not let 127.0.0.1:8883 through (403)"),
        (refusal(403), "http://", "does not let 127.0.0.1:8883 through (403). Most let only port 443"),
        (refusal(503), "http://", "cannot reach 127.0.0.1:8883 (503). Check `host`"),
        (refusal(404), "http://", "answers 404 to CONNECT"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "http://", "is no HTTP proxy. Check host and port of `proxy`"),
        (b"", "http://", "ended the connection"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000, "http://", "is no HTTP proxy"),
    ],
    ids=[
        "no user",
        "password",
        "other scheme",
        "tinyproxy",
        "early",
        "forbidden",
        "unreachable",
        "404",
        "SSH",
        "nothing",
        "endless",
    ],
)
def test_a_proxy_that_refuses_is_named_with_what_to_do(end: Make, answer: bytes, url: str, words: str) -> None:
    with ConnectProxy(answer=answer) as proxy:
        text = said(end, 8883, proxy=f"{url}127.0.0.1:{proxy.port}")
        assert text.startswith(f"proxy 127.0.0.1:{proxy.port} ")
        assert words in text and "no@" not in text


def test_a_proxy_that_is_not_there_is_named_and_not_the_broker(end: Make) -> None:
    port = free_port()
    text = said(end, 8883, proxy=f"http://127.0.0.1:{port}")
    assert f"proxy 127.0.0.1:{port}: " in text and "refused" in text and "`proxy` in [broker]" in text
    assert "proxy proxy.invalid:3128: " in said(end, 8883, proxy="http://proxy.invalid:3128")


def test_a_proxy_that_says_nothing_is_named(end: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        text = said(end, 8883, proxy=f"http://127.0.0.1:{port}", connect_timeout_s=0.3)
        assert f"proxy 127.0.0.1:{port} does not answer: timed out" in text


def test_a_proxy_that_opens_tls_is_thought_of(end: Make) -> None:
    with Broker.start(tls=True) as broker, ConnectProxy() as proxy:
        text = said(end, broker.port, proxy=f"http://127.0.0.1:{proxy.port}", tls=TlsConfig())
        assert "TLS: " in text and "A proxy that opens TLS must make an exception" in text


def test_a_new_password_in_the_proxy_s_hands_is_not_in_the_configuration_s_words() -> None:
    assert "secret" not in repr(Proxy.parse("http://me:secret@proxy:3128"))
    assert Proxy.parse("http://[::1]:3128") == Proxy("::1", 3128)


@pytest.mark.parametrize(
    "url", ["proxy:3128", "http://proxy", "https://proxy:3128", "http://s3cret:x@:1", "socks5://p:1"]
)
def test_a_proxy_that_cannot_be_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match="http://host:port") as raised:
        BrokerConfig(proxy=url)
    assert "s3cret" not in str(raised.value)


def test_a_port_without_websocket_is_named(end: Make) -> None:
    with Broker.start() as broker:
        text = said(end, broker.port, transport="websocket")
        assert text.startswith("no WebSocket: ") and "Check that `port` is the broker's WebSocket port" in text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "no WebSocket at /elsewhere: the answer is 404"),
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "the answer is 302"),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "opens no WebSocket"),
        (b"\x20\x03\x00\x84\x00", "does not speak HTTP"),
    ],
    ids=["404", "login", "no key", "MQTT"],
)
def test_what_is_no_websocket_is_named(end: Make, answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def talk() -> None:
            with suppress(OSError):
                while True:
                    there, _ = server.accept()
                    with there:
                        assert b"GET /elsewhere HTTP/1.1" in there.recv(4096)
                        there.sendall(answer)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        assert words in said(end, server.getsockname()[1], transport="websocket", path="/elsewhere")
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5.0)


def test_a_websocket_to_a_plain_port_and_back(end: Make) -> None:
    """The other way round: plain MQTT at a WebSocket's port ends with a named failure too."""
    with Broker.start(websockets=True) as broker:
        assert broker.websockets_port is not None
        assert "Protocol error" in said(end, broker.websockets_port)


# The frames, against a server that is scripted.


@pytest.fixture
def pair() -> Iterator[tuple[WebSocket, Any, socket.socket]]:
    """A WebSocket, the server's end of its protocol, and the server's socket."""
    from wsproto import ConnectionType, WSConnection
    from wsproto.events import AcceptConnection

    here, there = socket.socketpair()
    server = WSConnection(ConnectionType.SERVER)

    def accept() -> None:
        server.receive_data(there.recv(4096))
        (request,) = server.events()
        assert request.subprotocols == ["mqtt"] and request.host == "broker:8080" and request.target == "/mqtt"
        there.sendall(server.send(AcceptConnection(subprotocol="mqtt")))

    thread = threading.Thread(target=accept)
    thread.start()
    made = WebSocket(here, "broker:8080", "/mqtt")
    thread.join()
    made.setblocking(False)
    there.settimeout(5.0)
    with here, there:
        yield made, server, there


def test_messages_in_pieces_of_any_size_are_put_together(pair: tuple[WebSocket, Any, socket.socket]) -> None:
    from wsproto.events import BytesMessage, Ping

    made, server, there = pair
    wire = server.send(BytesMessage(data=b"one", message_finished=False)) + server.send(Ping(payload=b"?"))
    wire += server.send(BytesMessage(data=b"two" * 100)) + server.send(BytesMessage(data=b""))
    got = b""
    for at in range(len(wire)):
        there.sendall(wire[at : at + 1])
        with suppress(BlockingIOError):
            got += made.recv(7)
    assert got == b"one" + b"two" * 100
    server.receive_data(there.recv(4096))
    assert [type(event).__name__ for event in server.events()] == ["Pong"]


def test_a_ping_between_the_parts_of_a_message_that_waits_breaks_neither(
    pair: tuple[WebSocket, Any, socket.socket],
) -> None:
    from wsproto.events import BytesMessage, Ping

    made, server, there = pair
    data = bytes(range(256)) * 16_000
    with pytest.raises(BlockingIOError):
        made.send(data)
    there.sendall(server.send(Ping(payload=b"?")))
    with pytest.raises(BlockingIOError):
        made.recv(10)
    got, pongs, sent = b"", 0, 0
    while len(got) < len(data) or not pongs:
        server.receive_data(there.recv(1 << 20))
        for event in server.events():
            got += event.data if isinstance(event, BytesMessage) else b""
            pongs += type(event).__name__ == "Pong"
        with suppress(BlockingIOError):
            sent = sent or made.send(data)
    assert got == data and sent == len(data)


def test_a_goodbye_is_the_end(pair: tuple[WebSocket, Any, socket.socket]) -> None:
    from wsproto.events import BytesMessage, CloseConnection

    made, server, there = pair
    there.sendall(server.send(BytesMessage(data=b"last")) + server.send(CloseConnection(code=1001)))
    time.sleep(0.01)
    assert made.recv(100) == b"last" and made.recv(100) == b""
    with pytest.raises(ConnectionError):
        made.send(b"too late")


def test_what_is_no_frame_ends_the_connection(pair: tuple[WebSocket, Any, socket.socket]) -> None:
    made, _, there = pair
    there.sendall(b"\xff" * 50)
    time.sleep(0.01)
    assert made.recv(100) == b""
