"""Every role at every topic, publishing and reading, in a real mosquitto with the files that `tools.provision` writes.

What is allowed is read from the table in docs/provisioning.md, so that page and broker say the same.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

pytest.importorskip("cryptography")

from edge.cli import main as edge_cli
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
COLUMN = {DEVICE: "<device>", NEIGHBOUR: "<other>", STRANGER: "<other>", "verifier": "verifier", "operator": "operator"}
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
            topic = cells[0].strip("`").replace("<device>", DEVICE).replace("<target>", TARGET)
            rights = [set() if cell == "-" else set(cell.split(", ")) for cell in cells[1:]]
            table[topic.replace("<verifier>", VERIFIER)] = dict(zip(columns, rights, strict=True))
    return table


MATRIX = matrix()


def may(user: str, right: str, topic: str) -> bool:
    return right in MATRIX[topic][COLUMN[user]]


@dataclass
class Fleet:
    """The authority's folder, everybody's files, and the broker that was made from them."""

    folder: Path
    port: int
    websockets_port: int
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
        """Write the broker's files; only what binds it to this machine's user is added."""
        ports = ("--port", str(self.port), "--websockets-port", str(self.websockets_port))
        out = self.folder / "broker"
        state = self.folder / "broker-state"
        state.mkdir(exist_ok=True)
        self.provision("broker-config", "127.0.0.1", "localhost", "--out", str(out), "--state", str(state), *ports)

    def start(self) -> None:
        conf = self.folder / "mosquitto.conf"
        text = (self.folder / "broker" / "mosquitto.conf").read_text()
        conf.write_text(text + "user root\n" if os.geteuid() == 0 else text)
        program = find_mosquitto()
        assert program is not None
        log = open(self.folder / "log", "a")
        self.process = subprocess.Popen([program, "-c", str(conf)], stderr=log, text=True)
        log.close()
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
            socket.create_connection(("127.0.0.1", self.port), 0.2).close()
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
    "a plus at each level": lambda user: ["+", "/".join("+" * 3), "/".join("+" * 4), "/".join("+" * 5), "$SYS/broker/+"],
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
        ends["verifier"].link.publish(topic, b"", qos=1, retain=True)
        ends[DEVICE].link.publish(topic, b"", qos=1, retain=True)
    until(lambda: all(len(ends[user].acks) == 2 * len(MATRIX) for user in ("verifier", DEVICE)))


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
