"""Certificates at a real mosquitto: who gets a connection, what a revocation does, and a text through all of it."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ec

from cloud.gateway import Gateway
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.board import Board
from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from edge.enroll import key_bytes, read_key
from link.config import BrokerConfig, TlsConfig
from link.outbox import NOT_AUTHORIZED
from protocol import topics
from protocol.errors import ConfigError, LinkError
from tests.boards import PROMPT, SAMPLED, TIMING, SlowEngine, make_request
from tests.certified import DEVICE, NEIGHBOUR, QUIET_S, STRANGER, CertifiedFleet, certified_fleet
from tests.link.ends import End, until
from tests.link.proxy import ConnectProxy
from tests.toys import TARGET as TOY_TARGET
from tests.toys import ToyDrafter, plain_decode
from tools.broker import find_mosquitto, free_port
from tools.provision.authority import pem
from tools.provision.folder import Folder

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

TARGET, VERIFIER = "target-0123456789ab", "v0123456789"
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CertifiedFleet]:
    with certified_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def fleet(made: CertifiedFleet) -> Iterator[CertifiedFleet]:
    yield made
    made.part()


def refused(config: BrokerConfig, why: str) -> None:
    """There is no connection, and the link says why."""
    end = End(config, f"nobody-{time.monotonic_ns()}")
    try:
        with pytest.raises(LinkError, match=why):
            end.link.wait_up(0.7)
    finally:
        end.link.close(0.0)


def test_nobody_without_a_certificate_gets_a_connection(fleet: CertifiedFleet) -> None:
    tls = TlsConfig(ca=fleet.folder / DEVICE / "ca.pem")
    refused(BrokerConfig(port=fleet.port, tls=tls, username=DEVICE, connect_timeout_s=1.0), "wants a certificate")


def test_nobody_speaks_in_the_clear(fleet: CertifiedFleet) -> None:
    refused(BrokerConfig(port=fleet.port, username=DEVICE, connect_timeout_s=1.0), "connection lost")


@pytest.fixture(scope="module")
def impostor(tmp_path_factory: pytest.TempPathFactory) -> CertifiedFleet:
    """Another authority, of the same name, that names a board like one of ours."""
    other = CertifiedFleet(tmp_path_factory.mktemp("impostor"), port=1, second_port=2)
    other.provision("init", "test")
    other.enrol(DEVICE)
    return other


def test_nobody_with_another_authority_s_certificate_gets_a_connection(
    fleet: CertifiedFleet, impostor: CertifiedFleet
) -> None:
    home = impostor.folder / DEVICE
    tls = TlsConfig(ca=fleet.folder / DEVICE / "ca.pem", cert=home / "cert.pem", key=home / "key.pem")
    refused(BrokerConfig(port=fleet.port, tls=tls, connect_timeout_s=1.0), "does not know the authority")


def test_the_broker_s_own_certificate_opens_nothing(fleet: CertifiedFleet) -> None:
    refused(fleet.config(DEVICE, cert="broker/broker.pem", key="broker/broker.key"), "another purpose")


@pytest.mark.parametrize(
    ("offset", "why"), [(-9 * DAY, "`cert` has expired"), (9 * DAY, "it may not be valid yet")], ids=["late", "early"]
)
def test_a_certificate_outside_of_its_dates_opens_nothing(fleet: CertifiedFleet, offset: timedelta, why: str) -> None:
    home = fleet.folder / DEVICE
    key = read_key((home / "key.pem").read_bytes(), "")
    authority = Folder(fleet.folder / "ca").authority()
    made_at = datetime.now(timezone.utc) + offset
    (home / "other.pem").write_text(pem(authority.client(DEVICE, "", key.public_key(), made_at, DAY)))
    refused(fleet.config(DEVICE, cert=f"{DEVICE}/other.pem"), why)


@contextlib.contextmanager
def server(context: ssl.SSLContext) -> Iterator[int]:
    """The port of somebody who shakes hands as a broker would, over and over."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                there, _ = listening.accept()
            except OSError:
                return
            with there, contextlib.suppress(OSError):
                context.wrap_socket(there, server_side=True).close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()


def test_a_board_whose_clock_is_wrong_is_told_what_it_shows(fleet: CertifiedFleet, tmp_path: Path) -> None:
    """A board without a battery starts in the past; seen from there the broker's certificate begins in the future."""
    key = ec.generate_private_key(ec.SECP256R1())
    authority = Folder(fleet.folder / "ca").authority()
    later = datetime.now(timezone.utc) + 9 * DAY
    (tmp_path / "cert.pem").write_text(pem(authority.server(["127.0.0.1"], key.public_key(), later, DAY)))
    (tmp_path / "key.pem").write_bytes(key_bytes(key))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with server(context) as port:
        config = msgspec.structs.replace(fleet.config(DEVICE), port=port)
        refused(config, rf"not yet valid. This machine's clock says {datetime.now(timezone.utc):%Y-%m-%d}")


def test_a_client_id_that_can_be_guessed_ends_nobody_s_connection(fleet: CertifiedFleet) -> None:
    """mosquitto ends the older of two connections with one id, whoever they are; so ids hold what only a key tells."""
    device = fleet.join(DEVICE, name=f"outrider-{DEVICE}")
    for guess in (f"outrider-{DEVICE}", f"outrider-{DEVICE}-0000000000000000"):
        thief = msgspec.structs.replace(fleet.config(STRANGER), client_id=guess)
        end = End(thief, "thief")
        fleet.ends.append(end)
        end.link.wait_up(5.0)
    device.link.publish(topics.open_topic(DEVICE, TARGET), b"x", qos=1)
    until(lambda: bool(device.acks))
    assert [up for up, _ in device.states] == [True]


def test_two_with_one_identity_are_noticed(fleet: CertifiedFleet) -> None:
    first = fleet.join(DEVICE, name=f"outrider-{DEVICE}")
    fleet.join(DEVICE, name=f"outrider-{DEVICE}")
    until(lambda: any("another process" in reason.lower() for _, reason in first.states))


def test_a_board_cannot_pose_as_the_broker(fleet: CertifiedFleet) -> None:
    """Nothing but the certificate's purpose keeps a stolen board from answering in the broker's place."""
    home = fleet.folder / STRANGER
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "cert.pem", home / "key.pem")
    trusting = ssl.create_default_context(cafile=str(fleet.folder / DEVICE / "ca.pem"))
    trusting.check_hostname = False
    with (
        server(context) as port,
        socket.create_connection(("127.0.0.1", port)) as here,
        pytest.raises(ssl.SSLCertVerificationError, match="purpose"),
    ):
        trusting.wrap_socket(here)


def test_another_port_is_held_to_the_same_table(fleet: CertifiedFleet) -> None:
    """443, say, which networks and their proxies let through."""
    verifier = fleet.join("verifier", "outrider/v1/+/open/+")
    second = msgspec.structs.replace(fleet.config(STRANGER), port=fleet.second_port)
    stranger = End(second, f"second-{time.monotonic_ns()}")
    fleet.ends.append(stranger)
    forged, own = topics.open_topic(DEVICE, TARGET), topics.open_topic(STRANGER, TARGET)
    for topic in (forged, own):
        stranger.link.publish(topic, b"x", qos=1)
    until(lambda: verifier.messages == [(own, b"x")])
    until(lambda: (forged, NOT_AUTHORIZED) in stranger.acks)


@pytest.fixture
def websockets(made: CertifiedFleet) -> Iterator[CertifiedFleet]:
    """The same fleet at a broker of its own, with WebSocket."""
    made.stop()
    made.websockets_port = free_port()
    made.configure()
    made.start()
    yield made
    made.stop()
    made.websockets_port = None
    made.configure()
    made.start()


def test_websockets_are_held_to_the_same_table(websockets: CertifiedFleet, fleet: CertifiedFleet) -> None:
    assert websockets.websockets_port is not None
    verifier = fleet.join("verifier", "outrider/v1/+/open/+")
    one = fleet.client(STRANGER, transport="websockets")
    acks: dict[int, str] = {}
    one.on_publish = lambda _client, _data, mid, reason, _properties: acks.update({mid: str(reason)})
    one.connect("127.0.0.1", websockets.websockets_port)
    one.loop_start()
    try:
        until(one.is_connected)
        forged = one.publish(topics.open_topic(DEVICE, TARGET), b"forged", qos=1).mid
        own = one.publish(topics.open_topic(STRANGER, TARGET), b"own", qos=1).mid
        until(lambda: {forged, own} <= set(acks) and bool(verifier.messages))
        assert acks[forged] == "Not authorized"
        assert verifier.messages == [(topics.open_topic(STRANGER, TARGET), b"own")]
    finally:
        one.disconnect()
        one.loop_stop()


def test_a_text_goes_through_a_proxy_in_a_websocket(
    websockets: CertifiedFleet, fleet: CertifiedFleet, tmp_path: Path
) -> None:
    """With certificates at both ends: the proxy sees none of it, and who has another fleet's is told so."""
    assert websockets.websockets_port is not None
    with ConnectProxy("out", "word") as proxy, verifier(fleet, "v-1"):
        way = {
            "port": websockets.websockets_port,
            "transport": "websocket",
            "proxy": f"http://out:word@127.0.0.1:{proxy.port}",
        }
        with board(fleet, DEVICE, tmp_path, **way) as one:
            stream = one.open(make_request(1))
            assert [token for ids in stream for token in ids] == plain_decode(PROMPT, SAMPLED, 100)
        assert set(proxy.targets) == {f"127.0.0.1:{websockets.websockets_port}"}
        uncertified = TlsConfig(ca=fleet.folder / DEVICE / "ca.pem")
        refused(BrokerConfig(tls=uncertified, username=DEVICE, connect_timeout_s=1.0, **way), "wants a certificate")


def test_retained_states_survive_the_broker(fleet: CertifiedFleet) -> None:
    topic = topics.verifier_state_topic(VERIFIER)
    verifier = fleet.join("verifier")
    verifier.link.publish(topic, b"here", qos=1, retain=True)
    until(lambda: bool(verifier.acks))
    verifier.link.close(0.0)
    fleet.stop()
    fleet.start()
    device = fleet.join(DEVICE, topic)
    until(lambda: device.messages == [(topic, b"here")])


@pytest.fixture
def small(made: CertifiedFleet) -> Iterator[CertifiedFleet]:
    """The same fleet at a broker with 16 MB for messages."""
    made.stop()
    made.start(memory_limit=16_000_000)
    yield made
    made.part()
    made.stop()
    (made.folder / "broker-state" / "mosquitto.db").unlink(missing_ok=True)
    made.start()


def test_who_fills_the_broker_s_memory_is_refused_and_the_others_go_on(small: CertifiedFleet) -> None:
    """Retained messages under names of its own are what the access list cannot forbid."""
    verifier, device, stranger = (
        small.join("verifier", "outrider/v1/+/open/+"),
        small.join(DEVICE),
        small.join(STRANGER),
    )
    for number in range(30):
        stranger.link.publish(topics.open_topic(STRANGER, f"n{number}"), bytes(900_000), qos=1, retain=True)
    until(lambda: f"Client {STRANGER}" in (log := (small.folder / "log").read_text()) and "out of memory" in log)
    own = topics.open_topic(DEVICE, TARGET)
    device.link.publish(own, b"still here", qos=1)
    until(lambda: (own, b"still here") in verifier.messages)
    small.join(NEIGHBOUR)
    assert [up for up, _ in device.states + verifier.states] == [True, True]


def test_a_revoked_board_falls_silent_at_once_and_does_not_come_back(fleet: CertifiedFleet) -> None:
    """Its open connection neither says nor hears anything from the reload on; all others go on as they were."""
    revoked, other = fleet.join(NEIGHBOUR, topics.verdict_topic(NEIGHBOUR)), fleet.join(DEVICE)
    verifier = fleet.join("verifier", "outrider/v1/+/open/+")
    fleet.provision("revoke", NEIGHBOUR)
    fleet.reload()
    topic = topics.open_topic(NEIGHBOUR, TARGET)

    def is_refused() -> bool:
        revoked.link.publish(topic, b"still", qos=1)
        time.sleep(0.05)
        return (topic, NOT_AUTHORIZED) in revoked.acks

    until(is_refused)
    heard = len(revoked.messages)
    verifier.link.publish(topics.verdict_topic(NEIGHBOUR), b"verdict", qos=1)
    other.link.publish(topics.open_topic(DEVICE, TARGET), b"other", qos=1)
    until(lambda: b"other" in verifier.payloads() and bool(verifier.acks))
    time.sleep(QUIET_S)
    assert len(revoked.messages) == heard
    refused(fleet.config(NEIGHBOUR), "is revoked")
    fleet.join(DEVICE)


def with_share(fleet: CertifiedFleet) -> BrokerConfig:
    return msgspec.structs.replace(fleet.config("verifier"), share_file=fleet.folder / "verifier" / "share")


@contextlib.contextmanager
def verifier(fleet: CertifiedFleet, name: str) -> Iterator[Gateway]:
    engine = SlowEngine(step_s=0.004)
    gateway = Gateway(Verifier(name, engine, scheduler=Scheduler(), bounds=Bounds()), with_share(fleet))
    thread = threading.Thread(target=gateway.run, daemon=True)
    thread.start()
    try:
        gateway.link.wait_up(5.0)
        yield gateway
    finally:
        gateway.stop()
        thread.join(10.0)


@contextlib.contextmanager
def board(fleet: CertifiedFleet, device: str, state: Path, **way: Any) -> Iterator[Board]:
    config = EdgeConfig(
        device=DeviceConfig(name=device, state=state),
        drafter=DrafterConfig(model=Path("none")),
        broker=msgspec.structs.replace(fleet.config(device), **way),
        timing=TIMING,
    )
    made = Board(config, ToyDrafter(lambda position: position % 5 == 0, context=2000)).start()
    try:
        made.link.wait_up(5.0)
        yield made
    finally:
        made.close()


def test_boards_of_two_tenants_write_their_texts_while_one_of_them_is_in_the_old_share(
    fleet: CertifiedFleet, tmp_path: Path
) -> None:
    """No open is lost: none of the sessions has to be opened a second time."""
    intruder = fleet.join(STRANGER, topics.shared_open_filter(TOY_TARGET))
    with (
        verifier(fleet, "v-1") as first,
        verifier(fleet, "v-2") as second,
        board(fleet, DEVICE, tmp_path / "1") as one,
        board(fleet, STRANGER, tmp_path / "2") as other,
    ):
        streams = [made.open(make_request(number + 1)) for number in range(3) for made in (one, other)]
        for stream in streams:
            assert [token for ids in stream for token in ids] == plain_decode(PROMPT, SAMPLED, 100)
            assert stream.run is not None and stream.run.window.epoch == 0
        assert first.verifier.tally.committed and second.verifier.tally.committed
    assert not intruder.messages


def test_a_share_s_secret_is_never_shown(tmp_path: Path, fleet: CertifiedFleet) -> None:
    path = tmp_path / "share"
    path.write_text("not/a/level\n")
    config = msgspec.structs.replace(fleet.config("verifier"), share_file=path)
    with pytest.raises(ConfigError, match="share_file") as raised:
        Gateway(Verifier("v", SlowEngine(), scheduler=Scheduler(), bounds=Bounds()), config)
    assert "not/a/level" not in str(raised.value)
