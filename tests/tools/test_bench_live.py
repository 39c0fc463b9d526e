"""The live benchmark: its own client speaks MQTT, its clock rests, and what it takes apart adds up."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from link.config import BrokerConfig
from protocol.errors import LinkError
from protocol.messages import Draft, encode
from protocol.text import Ids
from tests.link.ends import End, until
from tools.bench.crowd import Crowd, Wire
from tools.bench.live_records import Book, Came, Left, Stepped, Verdict, read
from tools.bench.rests import Rests
from tools.bench.verifier_live import draft_key, join, play
from tools.broker import Broker, find_mosquitto


def test_a_crowd_speaks_with_the_link() -> None:
    """Both QoS, payloads longer than one read, many packets in one read."""
    with Broker.start() as broker:
        config = BrokerConfig(port=broker.port)
        peer = End(config, "peer", subscriptions=[("up/+", 1)])
        peer.link.wait_up(5.0)
        wires = [Wire(config, f"device-{i}", [f"down/{i}"]) for i in range(3)]
        heard: list[tuple[str, str, bytes]] = []
        crowd = Crowd(wires, lambda wire, topic, payload, at: heard.append((wire.name, topic, payload)))
        try:
            for i, wire in enumerate(wires):
                wire.publish(f"up/{i}", b"draft")
                wire.publish(f"up/{i}", b"open", qos=1)
            until(lambda: len(peer.messages) == 6)
            payloads = [bytes((i,)) * 5000 for i in range(40)]
            peer.link.publish_all([(f"down/{i % 3}", payload) for i, payload in enumerate(payloads)])
            deadline = time.monotonic() + 5.0
            while len(heard) < 40 and time.monotonic() < deadline:
                crowd.look(0.05)
            assert sorted(heard) == sorted(
                (f"device-{i % 3}", f"down/{i % 3}", payload) for i, payload in enumerate(payloads)
            )
            assert [(wire.sent, wire.acknowledged) for wire in wires] == [([1, 1], 1)] * 3
        finally:
            peer.link.close(0.0)
            for wire in wires:
                wire.close()


def test_a_wire_that_is_refused_says_so() -> None:
    with Broker.start(password=("user", "secret")) as broker, pytest.raises(LinkError, match=r"refused with 0x8"):
        Wire(BrokerConfig(port=broker.port), "stranger", ["x"])


def test_the_clock_rests_at_the_end_of_each_period() -> None:
    clock = Rests(start=100.0, period_s=5.0, rest_s=1.0)
    for shown, at in ((0.0, 100.0), (3.9, 103.9), (4.0, 105.0), (7.5, 108.5), (8.0, 110.0), (-4.5, 93.5)):
        assert clock.real(shown) == pytest.approx(at)


def test_the_clock_stands_still_in_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Rests(start=100.0, period_s=5.0, rest_s=1.0)
    shown = []
    for at in (100.0, 103.9, 104.2, 104.9, 105.0, 106.0):
        monkeypatch.setattr(time, "monotonic", lambda at=at: at)
        shown.append((round(clock(), 6), round(clock.rested_s(), 6)))
    assert shown == [(0.0, -4.0), (3.9, -0.1), (4.0, 0.2), (4.0, 0.9), (4.0, -4.0), (5.0, -3.0)]


@pytest.mark.parametrize("handle, epoch, seq", [(0, 0, 0), (127, 1, 255), (128, 300, 7), (65535, 65535, 128)])
def test_a_draft_is_known_by_its_first_bytes(handle: int, epoch: int, seq: int) -> None:
    payload = encode(Draft(handle, epoch, seq, 500, 0xFFFFFFFF, Ids((1, 2, 3))))
    assert draft_key(payload[:12]) == (handle, epoch, seq)


def test_a_verdict_is_taken_apart_at_the_gateway(tmp_path: Path) -> None:
    """Two drafts of one number, of sessions with the same handle: each belongs to the commit that follows it."""
    came, left, stepped = (
        Book(tmp_path / name, of) for name, of in (("came", Came), ("left", Left), ("stepped", Stepped))
    )
    head = encode(Draft(3, 0, 9, 40, 1, Ids((5,))))[:12]
    for at in (1.0, 11.0):
        came.note(at + 0.01, 2, head)
        stepped.note(at + 0.05, at + 0.15)
        left.note(at + 0.16, 2, 3, 0, 9, int(at) // 10)
        left.note(at + 0.50, 2, 3, 0, 9, int(at) // 10)  # said again later
    for book in (came, left, stepped):
        book.close()
    verdicts = [Verdict(at, at + 0.18, 2, 3, 0, 9) for at in (1.0, 11.0)] + [Verdict(12.0, 12.1, 2, 3, 0, 10)]
    parts, found = join(verdicts, tmp_path, 0.5)
    assert found == pytest.approx(2 / 3, abs=1e-4)
    np.testing.assert_allclose(parts, [[0.01, 0.04, 0.1, 0.01, 0.02]] * 2, atol=1e-9)


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
def test_a_small_fleet_loses_nothing() -> None:
    figures = play(6.0, devices=8, warm_s=2.0)
    assert not any(figures["lost"].values()), figures["lost"]
    assert figures["found"] == 1.0 and figures["verdicts"] > 50
    assert figures["texts"] and not figures["wrong_texts"]
    assert 0 < figures["echo_ms"]["p50"] < figures["verdict_ms"]["p50"]
    assert figures["step_ms"]["p50"] >= 100.0
    assert 0 < figures["beyond_engine_and_queue_ms"]["p50"] < 100.0


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    book = Book(tmp_path / "left", Left)
    kept = [Left(1.5, 7, 300, 2, 255, 70_000), Left(2.5, 0, 0, 0, 0, 0)]
    for one in kept:
        book.note(*one)
    book.close()
    assert read(tmp_path / "left", Left) == kept
