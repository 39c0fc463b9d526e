"""One link to each of two brokers: who is answered where, and what is said at both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from link.config import BrokerConfig
from link.several import Links
from protocol import topics
from protocol.errors import LinkError
from tests.link.ends import Make, until
from tools.broker import Broker, available, free_port

pytestmark = pytest.mark.skipif(not available(), reason="no MQTT broker is installed")

BOARD, OTHER = "acme.one", "acme.two"


@pytest.fixture
def brokers() -> Iterator[tuple[Broker, Broker]]:
    with Broker.start() as first, Broker.start() as second:
        yield first, second


class Both:
    """Links to both, and what they heard."""

    def __init__(self, *ports: int) -> None:
        self.messages: list[tuple[str, bytes]] = []
        self.states: list[tuple[bool, str]] = []
        broker = BrokerConfig(port=ports[0], standby=tuple(f"127.0.0.1:{port}" for port in ports[1:]))
        self.link = Links(
            broker.places,
            "v",
            on_message=lambda topic, payload: self.messages.append((topic, payload)),
            on_state=lambda up, reason: self.states.append((up, reason)),
            subscriptions=[(topics.draft_topic("+", "v"), 0)],
        ).start()


@pytest.fixture
def both(brokers: tuple[Broker, Broker]) -> Iterator[Both]:
    made = Both(*(broker.port for broker in brokers))
    until(lambda: all(link.up for link in made.link.links))
    yield made
    made.link.close(0.0)


def test_a_device_is_answered_where_it_was_last_heard(brokers: tuple[Broker, Broker], both: Both, end: Make) -> None:
    verdict = topics.verdict_topic(BOARD)
    boards = [end(broker.port, "board", subscriptions=[(verdict, 0)]) for broker in brokers]
    other = end(brokers[0].port, "other", subscriptions=[(topics.verdict_topic(OTHER), 0)])
    for number in (0, 1, 0, 1, 1):
        boards[number].link.publish(topics.draft_topic(BOARD, "v"), b"draft")
        until(lambda: len(both.messages) == 1)
        both.messages.clear()
        both.link.publish_all([(verdict, b"1"), (topics.verdict_topic(OTHER), b"2"), (verdict, b"3")])
        until(lambda number=number: boards[number].payloads() == [b"1", b"3"] and other.payloads() == [b"2"])
        assert not boards[1 - number].messages
        for one in (*boards, other):
            one.messages.clear()


def test_what_is_said_to_all_is_said_at_both(brokers: tuple[Broker, Broker], both: Both, end: Make) -> None:
    ears = [end(broker.port, "ear", subscriptions=[("all/#", 1)]) for broker in brokers]
    both.link.publish("all/now", b"x", qos=1)
    both.link.retain("all/state", b"y", expiry_s=60)
    until(lambda: all(sorted(ear.payloads()) == [b"x", b"y"] for ear in ears))
    assert both.link.counters().acknowledged == 4
    both.link.subscribe("more")
    for ear in ears:
        ear.link.publish("more", b"z", qos=1)
    until(lambda: both.messages == [("more", b"z")] * 2)
    both.link.unsubscribe("more")
    for ear in ears:
        ear.link.publish("more", b"z", qos=1)
    until(lambda: all(ear.acks for ear in ears))


def test_one_that_is_away_is_named_and_the_other_is_enough(brokers: tuple[Broker, Broker]) -> None:
    port = free_port()
    made = Both(port, brokers[1].port)
    try:
        made.link.wait_up(5.0)
        until(lambda: f"127.0.0.1:{port}: connection refused" in str(made.link.failure))
        assert made.link.up
        first = made.link.links[0]
        tried = []
        first._on_state = lambda up, reason: (tried.append(reason), made.link._tell(0, up, reason))
        until(lambda: len(tried) >= 3)
        assert sum(not up for up, _ in made.states) == 1, "said again at each attempt"
    finally:
        made.link.close(0.0)


def test_both_away_is_a_failure() -> None:
    made = Both(free_port(), free_port())
    try:
        with pytest.raises(LinkError, match="connection refused"):
            made.link.wait_up(0.5)
        assert not made.link.up
    finally:
        made.link.close(0.0)


def test_a_link_goes_from_broker_to_broker_in_their_order(end: Make) -> None:
    """Each failure names its own; the one that answers is kept until it fails."""
    absent = [free_port(), free_port()]
    with Broker.start() as third:
        standby = (f"127.0.0.1:{absent[1]}", f"localhost:{third.port}")
        one = end(absent[0], "one", config={"standby": standby})
        assert [reason.split(": ")[0] for _, reason in one.states[:2]] == [f"127.0.0.1:{port}" for port in absent]
        assert one.link.address == f"localhost:{third.port}"
        with Broker.start(absent[0]) as first:
            third.kill()
            until(lambda: one.states[-1][0] is False)
            one.link.wait_up(5.0)
            assert one.link.address == f"127.0.0.1:{first.port}"
