"""A device that floods waits alone."""

from __future__ import annotations

from cloud.intake import Intake
from protocol import topics
from protocol.messages import Error, ErrorCode
from tests.cloud.dialogue import answers, verifier


def topic(device: str) -> str:
    return topics.draft_topic(device, "v")


def taken(intake: Intake) -> list[tuple[str, bytes, float]]:
    return [intake.take() for _ in range(len(intake))]


def test_messages_come_in_their_order_with_their_times():
    intake = Intake(10, per_s=5)
    intake.put(topic("a.b"), b"1", 0.0)
    intake.put(topic("a.c"), b"2", 0.5)
    assert taken(intake) == [(topic("a.b"), b"1", 0.0), (topic("a.c"), b"2", 0.5)]
    assert len(intake) == 0


def test_a_device_may_say_so_much_a_second_and_the_others_do_not_wait_for_it():
    intake = Intake(1000, per_s=5)
    for i in range(300):
        intake.put(topic("mad.board"), b"", i / 100)
        if i % 100 == 99:
            intake.put(topic("good.board"), b"", i / 100)
    said = [one for one, _, _ in taken(intake)]
    assert said.count(topic("good.board")) == 3
    assert 5 + 2.9 * 5 - 1 <= said.count(topic("mad.board")) <= 5 + 3 * 5
    assert intake.overflow() == {"mad.board": 300 - said.count(topic("mad.board"))}
    assert intake.overflow() == {}


def test_one_that_was_quiet_may_say_a_seconds_worth_at_once_and_no_more():
    intake = Intake(1000, per_s=5)
    for now in (0.0, 100.0):
        for _ in range(20):
            intake.put(topic("a.b"), b"", now)
        assert len(taken(intake)) == 5


def test_the_oldest_gives_way():
    intake = Intake(2, per_s=5)
    for name in ("a.a", "a.b", "a.c"):
        intake.put(topic(name), b"", 0.0)
    assert [one for one, _, _ in taken(intake)] == [topic("a.b"), topic("a.c")]


def test_names_without_end_take_no_memory_without_end(monkeypatch):
    monkeypatch.setattr("cloud.intake.MOST_DEVICES", 50)
    intake = Intake(10, per_s=5)
    for i in range(1000):
        intake.put(topic(f"a.{i}"), b"", 0.0)
    assert len(intake._left) <= 50


def test_who_floods_is_told_and_counted():
    at = verifier(messages_per_s=20.0)
    at.flooded("mad.board", 7)
    (error,) = answers(at)
    assert isinstance(error, Error) and error.code == ErrorCode.OVER_LIMIT
    assert error.what == "7 messages over 20 a second were dropped" and at.tally.errors[ErrorCode.OVER_LIMIT] == 1
