"""Every role at every topic, publishing and reading, in a real mosquitto with the files that `tools.provision` writes.

What is allowed is read from the table in docs/provisioning.md, so that page and broker say the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

pytest.importorskip("cryptography")

from edge.cli import main as edge_cli
from link.client import share as read_share
from link.config import BrokerConfig, TlsConfig
from link.outbox import NOT_AUTHORIZED
from protocol import topics
from protocol.errors import LinkError
from tests.link.ends import End, until
from tools.broker import find_mosquitto, free_port
from tools.models import ROOT
from tools.provision.__main__ import main as provision_cli

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

DEVICE, NEIGHBOUR, STRANGER = "acme.kitchen", "acme.hall", "umbrella.lab"
TARGET, VERIFIER = "target-0123456789ab", "v0123456789"
FILLED = {
    "<device>": DEVICE,
    "<target>": TARGET,
    "<verifier>": VERIFIER,
    "<channel>": "stable",
    "<kind>": "model",
}
COLUMN = {DEVICE: "<device>", NEIGHBOUR: "<other>", STRANGER: "<other>", "verifier": "verifier", "operator": "operator"}
OWNERS = (DEVICE, "verifier", "operator")
QUIET_S = 0.4  # long enough for a message that must not come


def matrix() -> dict[str, dict[str, set[str]]]:
    """{topic: {column: rights}} of the page's table."""
    page = (ROOT / "docs" / "provisioning.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:3] == "| `"]
    heads = next(line for line in page.splitlines() if line.startswith("| topic |"))
    columns = [cell.strip().strip("`") for cell in heads.strip("|").split("|")][1:]
    table = {}
    for cells in rows:
        if len(cells) == len(columns) + 1:
            topic = cells[0].strip("`")
            for form, value in FILLED.items():
                topic = topic.replace(form, value)
            rights = [set() if cell == "-" else set(cell.split(", ")) for cell in cells[1:]]
            table[topic] = dict(zip(columns, rights, strict=True))
    return table


MATRIX = matrix()


def may(user: str, right: str, topic: str) -> bool:
    return right in MATRIX[topic][COLUMN[user]]


@dataclass
class Fleet:
    """The authority's folder, everybody's files, and the broker that was made from them."""

    folder: Path
    port: int
    second_port: int
    websockets_port: int | None = None
    process: subprocess.Popen[str] | None = None
    ends: list[End] = field(default_factory=list)

    def provision(self, *words: str) -> None:
        run(provision_cli, "--ca", str(self.folder / "ca"), *words)

    def enrol(self, device: str) -> None:
        tenant, board = device.split(".")
        home = self.folder / device
        home.mkdir()
        config = home / "edge.toml"
        config.write_text(
            f'[device]\nname = "{device}"\n[drafter]\nmodel = "drafter"\n'
            '[broker.tls]\nca = "ca.pem"\ncert = "cert.pem"\nkey = "key.pem"\n'
        )
        code, request, answer = home / "code", home / "request.json", home / "answer.json"
        self.provision("add", board, "--tenant", tenant, "--code-file", str(code))
        run(edge_cli, "enroll", "--config", str(config), "--code-file", str(code), "--request", str(request))
        self.provision("sign", str(request), "--out", str(answer))
        run(edge_cli, "enroll", "--config", str(config), "--answer", str(answer))

    def configure(self) -> None:
        """Write the broker's files."""
        out = self.folder / "broker"
        state = self.folder / "broker-state"
        state.mkdir(exist_ok=True)
        ports = ["--port", str(self.port), "--port", str(self.second_port)]
        if self.websockets_port is not None:
            ports += ["--mosquitto", "2.1", "--websockets-port", str(self.websockets_port)]
        self.provision("broker-config", "127.0.0.1", "localhost", "--out", str(out), "--state", str(state), *ports)

    def start(self) -> None:
        """Only the user that the broker runs as is added to what was written: this one."""
        conf = self.folder / "mosquitto.conf"
        text = (self.folder / "broker" / "mosquitto.conf").read_text()
        conf.write_text(text + "user root\n" if os.geteuid() == 0 else text)
        program = find_mosquitto()
        assert program is not None
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen([program, "-c", str(conf)], stderr=log, text=True)
        until(lambda: self.process.poll() is not None or self._listens())
        assert self.process.poll() is None, (self.folder / "log").read_text()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait()

    def reload(self) -> None:
        self.configure()
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def config(self, user: str, **other: str) -> BrokerConfig:
        home = self.folder / user
        files = {"ca": home / "ca.pem", "cert": home / "cert.pem", "key": home / "key.pem"}
        tls = TlsConfig(**{**files, **{name: self.folder / path for name, path in other.items()}})
        return BrokerConfig(port=self.port, tls=tls, connect_timeout_s=2.0, max_queued_messages=1000)

    def join(self, user: str, *subscriptions: str, **options) -> End:
        name = f"{user}-{time.monotonic_ns()}"
        end = End(self.config(user), name, subscriptions=[(one, 1) for one in subscriptions], **options)
        self.ends.append(end)
        end.link.wait_up(5.0)
        return end

    def _listens(self) -> bool:
        try:
            for port in (self.port, self.second_port, self.websockets_port):
                if port is not None:
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            return False
        return True


def run(command, *words: str) -> str:
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), free_port(), free_port())
    fleet.provision("init", "test")
    for device in (DEVICE, NEIGHBOUR, STRANGER):
        fleet.enrol(device)
    for role in ("verifier", "operator"):
        fleet.provision("issue", role, "one", "--out", str(fleet.folder / role))
    fleet.configure()
    fleet.start()
    yield fleet
    fleet.stop()


@pytest.fixture
def fleet(made: Fleet) -> Iterator[Fleet]:
    yield made
    for end in made.ends:
        end.link.close(0.0)
    made.ends.clear()


Shape = Callable[[str], list[str]]
SHAPES: dict[str, Shape] = {
    "by name": lambda user: list(MATRIX),
    "everything": lambda user: ["#", "$SYS/#", "$CONTROL/#"],
    "below the prefix": lambda user: ["outrider/#", "outrider/v1/#", f"outrider/v1/{DEVICE}/#"],
    "a plus at each level": lambda user: [
        "+",
        "/".join("+" * 3),
        "/".join("+" * 4),
        "/".join("+" * 5),
        "$SYS/broker/+",
    ],
    "shared, by name": lambda user: [f"$share/{user}/{topic}" for topic in MATRIX],
    "shared, everything": lambda user: [f"$share/{user}/#", f"$share/{user}/outrider/v1/+/+/+"],
}


def matches(subscription: str, topic: str) -> bool:
    if subscription.startswith("$share/"):
        subscription = subscription.split("/", 2)[2]
    return paho.topic_matches_sub(subscription, topic)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("retain", [False, True], ids=["live", "retained"])
def test_the_broker_does_what_the_table_says(fleet: Fleet, shape: str, retain: bool) -> None:
    """Everybody publishes at every topic; who subscribed, in each way, gets what the table grants and nothing else."""
    subscriptions = {user: SHAPES[shape](user) for user in COLUMN}
    ends = {user: fleet.join(user, *subscriptions[user]) for user in COLUMN}
    for user, end in ends.items():
        for topic in MATRIX:
            end.link.publish(topic, f"{user} {shape}".encode(), qos=1, retain=retain)
    until(lambda: all(len(end.acks) == len(MATRIX) for end in ends.values()))
    for user, end in ends.items():
        accepted = {topic for topic, reason in end.acks if reason != NOT_AUTHORIZED}
        assert accepted == {topic for topic in MATRIX if may(user, "publish", topic)}, user
    said = [(topic, user) for topic in MATRIX for user in COLUMN if may(user, "publish", topic)]
    for reader, end in ends.items():
        due = {
            (topic, f"{user} {shape}".encode())
            for topic, user in said
            if may(reader, "read", topic) and any(matches(one, topic) for one in subscriptions[reader])
        }
        until(lambda end=end, due=due: due <= set(end.messages))
    time.sleep(QUIET_S)
    for reader, end in ends.items():
        came = {(topic, payload) for topic, payload in end.messages if not topic.startswith("$SYS/")}
        assert {topic for topic, _ in came} <= {topic for topic in MATRIX if may(reader, "read", topic)}, reader
        assert {(topic, payload.split()[0].decode()) for topic, payload in came} <= set(said), reader
        told = {topic for topic, _ in end.messages if topic.startswith("$SYS/")}
        assert bool(told) <= may(reader, "read", "$SYS/broker/version"), reader
    for topic in MATRIX:
        for user in OWNERS:
            ends[user].link.publish(topic, b"", qos=1, retain=True)
    until(lambda: all(len(ends[user].acks) == 2 * len(MATRIX) for user in OWNERS))


def test_the_operator_reads_the_broker_s_own_figures(fleet: Fleet) -> None:
    operator = fleet.join("operator", "$SYS/broker/version")
    until(lambda: bool(operator.messages))


def test_qos_0_from_another_board_arrives_nowhere(fleet: Fleet) -> None:
    verifier, stranger, device = fleet.join("verifier", "#"), fleet.join(STRANGER), fleet.join(DEVICE)
    draft = topics.draft_topic(DEVICE, VERIFIER)
    stranger.link.publish(draft, b"forged")
    stranger.link.publish(topics.draft_topic(STRANGER, VERIFIER), b"own")
    until(lambda: b"own" in verifier.payloads())
    device.link.publish(draft, b"true")
    until(lambda: b"true" in verifier.payloads())
    assert (draft, b"forged") not in verifier.messages


@pytest.mark.parametrize("user", [NEIGHBOUR, STRANGER, "operator"])
@pytest.mark.parametrize(
    ("owner", "topic"),
    [
        (DEVICE, topics.device_state_topic(DEVICE)),
        ("verifier", topics.verifier_state_topic(VERIFIER)),
    ],
)
def test_retained_state_is_neither_forged_nor_wiped(fleet: Fleet, user: str, owner: str, topic: str) -> None:
    true, forger = fleet.join(owner), fleet.join(user)
    true.link.publish(topic, b"true", qos=1, retain=True)
    until(lambda: len(true.acks) == 1)
    for payload in (b"forged", b""):
        forger.link.publish(topic, payload, qos=1, retain=True)
    until(lambda: forger.acks == [(topic, NOT_AUTHORIZED)] * 2)
    late = fleet.join("operator", topic)
    until(lambda: bool(late.messages))
    assert late.messages == [(topic, b"true")]


def test_a_last_will_at_another_s_topic_is_never_said(fleet: Fleet) -> None:
    """The stranger vanishes without a goodbye; its own will, sent the same way, does arrive."""
    operator = fleet.join("operator", "outrider/v1/+/state", "outrider/v1/verifiers/+/state")
    for user, topic in (
        (STRANGER, topics.device_state_topic(DEVICE)),
        (STRANGER, topics.verifier_state_topic(VERIFIER)),
        (STRANGER, topics.device_state_topic(STRANGER)),
    ):
        vanish_with_will(fleet, user, topic)
    own = topics.device_state_topic(STRANGER)
    until(lambda: (own, b"will") in operator.messages)
    time.sleep(QUIET_S)
    assert [topic for topic, payload in operator.messages if payload == b"will"] == [own]


def client(fleet: Fleet, user: str, **options) -> paho.Client:
    tls = fleet.config(user).tls
    assert tls is not None
    one = paho.Client(CallbackAPIVersion.VERSION2, f"{user}-{time.monotonic_ns()}", protocol=paho.MQTTv5, **options)
    one.tls_set(str(tls.ca), str(tls.cert), str(tls.key))
    return one


def vanish_with_will(fleet: Fleet, user: str, topic: str) -> None:
    one = client(fleet, user)
    answers: list = []
    one.on_connect = lambda _client, _data, _flags, reason, _properties: answers.append(reason)
    one.will_set(topic, b"will", qos=1)
    one.connect("127.0.0.1", fleet.port)
    until(lambda: one.loop(0.05) != 0 or bool(answers))
    if (there := one.socket()) is not None:
        there.shutdown(socket.SHUT_RDWR)


def refused(config: BrokerConfig) -> None:
    end = End(config, f"nobody-{time.monotonic_ns()}")
    try:
        with pytest.raises(LinkError):
            end.link.wait_up(1.5)
    finally:
        end.link.close(0.0)


def test_nobody_without_a_certificate_gets_a_connection(fleet: Fleet) -> None:
    tls = TlsConfig(ca=fleet.folder / DEVICE / "ca.pem")
    refused(BrokerConfig(port=fleet.port, tls=tls, username=DEVICE, connect_timeout_s=1.0))


def test_nobody_speaks_in_the_clear(fleet: Fleet) -> None:
    refused(BrokerConfig(port=fleet.port, username=DEVICE, connect_timeout_s=1.0))


@pytest.fixture(scope="module")
def impostor(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Another authority, of the same name, that names a board like one of ours."""
    other = Fleet(tmp_path_factory.mktemp("impostor"), port=1, second_port=2)
    other.provision("init", "test")
    other.enrol(DEVICE)
    return other


def test_nobody_with_another_authority_s_certificate_gets_a_connection(fleet: Fleet, impostor: Fleet) -> None:
    home = impostor.folder / DEVICE
    tls = TlsConfig(ca=fleet.folder / DEVICE / "ca.pem", cert=home / "cert.pem", key=home / "key.pem")
    refused(BrokerConfig(port=fleet.port, tls=tls, connect_timeout_s=1.0))


def test_the_broker_s_own_certificate_opens_nothing(fleet: Fleet) -> None:
    refused(fleet.config(DEVICE, cert="broker/broker.pem", key="broker/broker.key"))


def test_a_board_cannot_pose_as_the_broker(fleet: Fleet) -> None:
    """Nothing but the certificate's purpose keeps a stolen board from answering in the broker's place."""
    home = fleet.folder / STRANGER
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "cert.pem", home / "key.pem")
    trusting = ssl.create_default_context(cafile=str(fleet.folder / DEVICE / "ca.pem"))
    trusting.check_hostname = False
    here, there = socket.socketpair()
    answering = threading.Thread(target=_answer, args=(context, there))
    answering.start()
    with here, pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        trusting.wrap_socket(here)
    answering.join()


def _answer(context: ssl.SSLContext, there: socket.socket) -> None:
    with there, contextlib.suppress(OSError):
        context.wrap_socket(there, server_side=True).close()


def share(fleet: Fleet) -> str:
    return read_share(BrokerConfig(share_file=fleet.folder / "verifier" / "share"))


def test_a_board_cannot_take_opens_out_of_the_verifiers_share(fleet: Fleet) -> None:
    """mosquitto lets anybody join a share and deals opens to it, though it then delivers none. Boards do not know the
    share's name: what they join instead gets opens of its own, and those are not delivered either.
    """
    verifier = fleet.join("verifier", topics.shared_open_filter(TARGET, share(fleet)))
    guesses = [topics.shared_open_filter(TARGET), topics.shared_open_filter(TARGET, "0" * 32), "$share/any/#", "#"]
    intruder, device = fleet.join(STRANGER, *guesses), fleet.join(DEVICE)
    opens = [b"open %d" % number for number in range(20)]
    for payload in opens:
        device.link.publish(topics.open_topic(DEVICE, TARGET), payload, qos=1)
    until(lambda: len(verifier.messages) >= len(opens))
    time.sleep(QUIET_S)
    assert sorted(verifier.payloads()) == sorted(opens)
    assert not set(intruder.payloads()) & set(opens)


def test_verifiers_with_one_secret_share_the_opens(fleet: Fleet) -> None:
    subscription = topics.shared_open_filter(TARGET, share(fleet))
    first, second, device = (
        fleet.join("verifier", subscription),
        fleet.join("verifier", subscription),
        fleet.join(DEVICE),
    )
    opens = [b"open %d" % number for number in range(20)]
    for payload in opens:
        device.link.publish(topics.open_topic(DEVICE, TARGET), payload, qos=1)
    until(lambda: len(first.messages) + len(second.messages) >= len(opens))
    assert sorted(first.payloads() + second.payloads()) == sorted(opens)
    assert first.messages and second.messages


def test_another_port_is_held_to_the_same_table(fleet: Fleet) -> None:
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
def websockets(made: Fleet) -> Iterator[Fleet]:
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


def test_websockets_are_held_to_the_same_table(websockets: Fleet, fleet: Fleet) -> None:
    assert websockets.websockets_port is not None
    verifier = fleet.join("verifier", "outrider/v1/+/open/+")
    one = client(fleet, STRANGER, transport="websockets")
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


def test_retained_states_survive_the_broker(fleet: Fleet) -> None:
    topic = topics.verifier_state_topic(VERIFIER)
    verifier = fleet.join("verifier")
    verifier.link.publish(topic, b"here", qos=1, retain=True)
    until(lambda: bool(verifier.acks))
    verifier.link.close(0.0)
    fleet.stop()
    fleet.start()
    device = fleet.join(DEVICE, topic)
    until(lambda: device.messages == [(topic, b"here")])


def test_a_revoked_board_falls_silent_at_once_and_does_not_come_back(fleet: Fleet) -> None:
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
    refused(fleet.config(NEIGHBOUR))
    fleet.join(DEVICE)
