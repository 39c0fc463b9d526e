"""Queues that drop their oldest, and the window of what the broker has not acknowledged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from link.outbox import Message, Queue, Retained, Window


def message(name: str, size: int = 0, expiry_s: float | None = None, at: float = 0.0) -> Message:
    return Message(name, bytes(size), 1, False, expiry_s, at)


def names(messages: list[Message]) -> str:
    return "".join(m.topic for m in messages)


def test_a_full_queue_drops_its_oldest() -> None:
    queue = Queue(max_messages=2, max_bytes=1 << 20)
    assert [names(queue.put(message(name))) for name in "abcd"] == ["", "", "a", "b"]
    assert names([queue.pop(), queue.pop()]) == "cd"


def test_bytes_are_bounded_too_but_the_newest_always_fits() -> None:
    queue = Queue(max_messages=100, max_bytes=1000)
    for name in "abc":
        queue.put(message(name, 300))
    assert names(queue.put(message("d", 300))) == "a"
    assert names(queue.put(message("e", 5000))) == "bcd"
    assert names([queue.pop()]) == "e"
    assert queue.put(message("f", 900)) == [], "bytes of popped messages must be given back"


@given(st.lists(st.tuples(st.sampled_from(["put", "pop", "back", "clear"]), st.integers(0, 400)), max_size=60))
def test_the_queue_is_the_newest_messages_in_order(steps: list[tuple[str, int]]) -> None:
    """Against a plain list, whatever the order of calls."""
    queue, model = Queue(5, 1000), list[Message]()
    for number, (step, size) in enumerate(steps):
        if step == "put":
            model.append(message(f"{number}", size))
            dropped = queue.put(model[-1])
            assert dropped == model[: len(dropped)]
            model = model[len(dropped) :]
            assert len(model) == 1 or (len(model) <= 5 and sum(m.size for m in model) <= 1000)
        elif step == "pop" and model:
            assert queue.pop() == model.pop(0)
        elif step == "back":
            again = [message(f"{number}x", size), message(f"{number}y", size)]
            queue.put_back(again)
            model = again + model
        elif step == "clear":
            assert queue.clear() == model
            model = []
        assert len(queue) == len(model)


def test_the_window_holds_at_most_the_receive_maximum() -> None:
    window = Window()
    assert not window.has_room, "closed until there is a connection"
    window.open(2)
    window.sent(1, message("a"))
    assert window.has_room
    window.sent(2, message("b"))
    assert not window.has_room
    assert window.acknowledged(1) == message("a")
    assert window.acknowledged(1) is None, "acknowledged twice"
    assert window.has_room


def test_a_lost_connection_gives_back_what_was_not_acknowledged_in_order() -> None:
    window = Window()
    window.open(10)
    for packet_id, name in enumerate("abcd", 1):
        window.sent(packet_id, message(name))
    window.acknowledged(2)
    assert names(window.close()) == "acd"
    assert not window.has_room and len(window) == 0


def test_retained_state_is_due_at_connect_and_at_half_of_its_life() -> None:
    retained = Retained()
    retained.set("a", b"1", 60.0)
    retained.set("b", b"2", None)
    assert names(retained.due(100.0)) == "ab"
    assert retained.due(129.9) == []
    assert names(retained.due(130.0)) == "a"
    retained.set("b", b"3", None)
    assert [m.payload for m in retained.due(131.0)] == [b"3"]
    retained.forget("a")
    retained.disconnected()
    assert names(retained.due(132.0)) == "b"


@pytest.mark.parametrize(("now", "left"), [(10.0, 5), (12.5, 3), (14.9, 1), (15.0, 0), (99.0, 0)])
def test_a_message_that_waited_has_less_life_left(now: float, left: int) -> None:
    assert message("a", expiry_s=5.0, at=10.0).expiry_left(now) == left


def test_a_message_without_expiry_lives_for_ever() -> None:
    assert message("a", at=0.0).expiry_left(1e9) is None
