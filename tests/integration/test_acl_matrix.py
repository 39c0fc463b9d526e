"""Every role at every topic, publishing and reading, in a real mosquitto with the files that `tools.provision` writes.

What is allowed is read from the table in docs/provisioning.md, so that page and broker say the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from paho.mqtt import client as paho

pytest.importorskip("cryptography")

from link.client import share as read_share
from link.config import BrokerConfig
from link.outbox import NOT_AUTHORIZED
from protocol import topics
from tests.certified import DEVICE, NEIGHBOUR, QUIET_S, STRANGER, CertifiedFleet, certified_fleet
from tests.link.ends import until
from tools.broker import find_mosquitto
from tools.models import ROOT

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")

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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CertifiedFleet]:
    with certified_fleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


@pytest.fixture
def fleet(made: CertifiedFleet) -> Iterator[CertifiedFleet]:
    yield made
    made.part()


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
def test_the_broker_does_what_the_table_says(fleet: CertifiedFleet, shape: str, retain: bool) -> None:
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


def test_the_operator_reads_the_broker_s_own_figures(fleet: CertifiedFleet) -> None:
    operator = fleet.join("operator", "$SYS/broker/version")
    until(lambda: bool(operator.messages))


def test_qos_0_from_another_board_arrives_nowhere(fleet: CertifiedFleet) -> None:
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
def test_retained_state_is_neither_forged_nor_wiped(fleet: CertifiedFleet, user: str, owner: str, topic: str) -> None:
    true, forger = fleet.join(owner), fleet.join(user)
    true.link.publish(topic, b"true", qos=1, retain=True)
    until(lambda: len(true.acks) == 1)
    for payload in (b"forged", b""):
        forger.link.publish(topic, payload, qos=1, retain=True)
    until(lambda: forger.acks == [(topic, NOT_AUTHORIZED)] * 2)
    late = fleet.join("operator", topic)
    until(lambda: bool(late.messages))
    assert late.messages == [(topic, b"true")]


def test_a_last_will_at_another_s_topic_is_never_said(fleet: CertifiedFleet) -> None:
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


def vanish_with_will(fleet: CertifiedFleet, user: str, topic: str) -> None:
    one = fleet.client(user)
    answers: list = []
    one.on_connect = lambda _client, _data, _flags, reason, _properties: answers.append(reason)
    one.will_set(topic, b"will", qos=1)
    one.connect("127.0.0.1", fleet.port)
    until(lambda: one.loop(0.05) != 0 or bool(answers))
    if (there := one.socket()) is not None:
        there.shutdown(socket.SHUT_RDWR)


def share(fleet: CertifiedFleet) -> str:
    return read_share(BrokerConfig(share_file=fleet.folder / "verifier" / "share"))


def test_a_board_cannot_take_opens_out_of_the_verifiers_share(fleet: CertifiedFleet) -> None:
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


def test_verifiers_with_one_secret_share_the_opens(fleet: CertifiedFleet) -> None:
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
