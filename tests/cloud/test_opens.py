"""Which sessions a verifier takes, and what becomes of one that is opened again."""

from __future__ import annotations

import pytest

from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Close, Draft, Error, ErrorCode, Opened, encode
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.cloud.dialogue import (
    DEVICE,
    PROMPT,
    Limited,
    answers,
    hash_of,
    opening,
    resync,
    run_until,
    say,
    step,
    text_of,
    verifier,
)
from tests.toys import TARGET, VOCAB, plain_decode

# -- admission --------------------------------------------------------------------------------------------------------


def test_an_open_is_answered_with_id_handle_and_limits():
    at = verifier(draft_rows=9, ahead=5)
    (answer,) = say(at, opening())
    assert isinstance(answer, Opened)
    assert (answer.session, answer.epoch, answer.verifier, answer.length) == (1, 0, "v", 4)
    assert (answer.limits.draft_rows, answer.limits.ahead, answer.limits.context) == (9, 5, 64)
    assert (answer.limits.vocab_size, answer.limits.trees) == (VOCAB, True)


@pytest.mark.parametrize(
    ("code", "wrong", "names"),
    [
        (ErrorCode.WRONG_TARGET, {"target": "other-target"}, "other-target"),
        (ErrorCode.BAD_OPEN, {"ids": Ids((3, 4, 5, VOCAB))}, str(VOCAB)),
        (ErrorCode.BAD_OPEN, {"max_tokens": 0}, "max_tokens"),
        (ErrorCode.OVER_CONTEXT, {"ids": Ids([3] * 65)}, "65"),
        (ErrorCode.OVER_CONTEXT, {"ids": Ids([3] * 64), "prompt_len": 64}, "64"),
        (ErrorCode.UNKNOWN_PREFIX, {"prefix": (0xABC, 4)}, "abc"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_code(code, wrong, names):
    at = verifier()
    (answer,) = say(at, opening(**wrong))
    assert isinstance(answer, Error) and (answer.code, answer.session, answer.epoch) == (code, 1, 0)
    assert names in answer.what
    assert at.num_sessions == 0 and at.tally.errors[code] == 1


def test_a_full_verifier_says_when_to_come_back():
    at = verifier(sessions=2)
    say(at, opening(1), device="t.a")
    say(at, opening(2), device="t.b")
    (answer,) = say(at, opening(3), device="t.c")
    assert answer.code == ErrorCode.NO_ROOM and answer.retry_ms
    say(at, Close(1, 0), device="t.a")
    assert isinstance(say(at, opening(3), device="t.c")[0], Opened)


def test_an_open_that_was_not_looked_at_in_time_is_not_served():
    """Its device has opened again by then, and would only take a prefill and a place from others."""
    at = verifier(open_s=4.0)
    at.receive(topics.open_topic(DEVICE, TARGET), encode(opening()), 0.0, 4.1)
    assert answers(at) == [] and at.num_sessions == 0 and at.tally.late == 1
    at.receive(topics.open_topic(DEVICE, TARGET), encode(opening()), 0.0, 3.9)
    assert at.num_sessions == 1


def test_one_device_cannot_take_all_sessions():
    at = verifier(sessions_per_device=2)
    say(at, opening(1))
    say(at, opening(2))
    assert say(at, opening(3))[0].code == ErrorCode.OVER_LIMIT
    assert isinstance(say(at, opening(3), device="t.other")[0], Opened)


def test_no_memory_for_a_session_of_this_length():
    at = verifier(Limited(room_for=20))
    (answer,) = say(at, opening(max_tokens=17))
    assert answer.code == ErrorCode.OVER_CONTEXT and "too small" in answer.what and answer.retry_ms is None
    assert at.num_sessions == 0 and not at.plan(0.0).work
    assert isinstance(say(at, opening(max_tokens=16))[0], Opened)


def test_a_draining_verifier_sends_its_sessions_away_and_takes_none():
    at = verifier()
    say(at, opening(1))
    at.drain()
    (moved,) = answers(at)
    assert (moved.code, moved.session) == (ErrorCode.DRAINING, 1)
    assert say(at, opening(2))[0].code == ErrorCode.DRAINING
    assert at.num_sessions == 0 and at.engine.sessions == {}


def test_a_text_that_is_already_complete_is_answered_at_once():
    at = verifier()
    opened, commit = say(at, opening(ids=Ids((*PROMPT, 9)), stop_ids=(9,)))
    assert isinstance(opened, Opened) and (commit.finish, list(commit.ids)) == ("stop", [])
    assert at.engine.sessions == {}


# -- the same session again -------------------------------------------------------------------------------------------


def test_the_same_open_twice_is_one_session():
    """> open 0, < opened, < commits, > open 0, < opened, < all commits again"""
    at = verifier()
    (first,) = say(at, opening())
    drawn = text_of(step(at, 0.1) + step(at, 0.2))
    again, news = say(at, opening(), 0.3)
    assert isinstance(again, Opened) and again.handle == first.handle and again.length == 4 + len(drawn)
    assert news.base == 4 and list(news.ids) == drawn
    assert at.num_sessions == len(at.engine.sessions) == 1


def test_an_older_epoch_is_ignored_and_a_newer_one_replaces():
    """> open 3, > open 2 (late), > open 4"""
    at = verifier()
    say(at, opening(epoch=3))
    assert say(at, opening(epoch=2)) == []
    (opened,) = say(at, opening(epoch=4))
    assert opened.epoch == 4
    assert at.num_sessions == len(at.engine.sessions) == 1
    assert step(at, 0.1)[0].epoch == 4


def test_a_board_that_was_killed_gets_what_was_drawn_meanwhile():
    """> open 0, < 6 tokens of which the device has 2, > open 1 with those, < opened, < the other 4 under epoch 1"""
    at = verifier(ahead=6)
    say(at, opening())
    drawn = text_of(run_until(at, 0.0, 1.0))
    assert len(drawn) == 6
    opened, news = say(at, opening(epoch=1, ids=Ids((*PROMPT, *drawn[:2])), patience_ms=None), 2.0)
    assert (opened.epoch, opened.length, opened.patience_ms) == (1, 10, None)
    assert (news.base, list(news.ids), news.epoch) == (6, drawn[2:], 1)
    assert news.hash == hash_of([*PROMPT, *drawn[:2]], epoch=1)
    assert at.tally.committed == 6 and at.engine.pending(1) == 1
    say(at, resync(opened, [*PROMPT, *drawn]), 2.1)
    hash = hash_of([*PROMPT, *drawn], epoch=1)
    (right,) = plain_decode([*PROMPT, *drawn], Sampling(), 1)
    say(at, Draft(opened.handle, 1, 1, 10, hash, Ids((right,))), 2.2)
    (commit,) = step(at, 2.3)
    assert [*drawn, *commit.ids] == plain_decode(PROMPT, Sampling(), 8)


@pytest.mark.parametrize(
    "other",
    [
        {"ids": Ids((*PROMPT, 63, 63))},
        {"ids": Ids((3, 4, 5, 7))},
        {"max_tokens": 11},
        {"stop_ids": (9,)},
        {"ids": Ids([*PROMPT, *plain_decode(PROMPT, Sampling(), 9)])},
    ],
    ids=["text", "prompt", "length", "stop ids", "further"],
)
def test_another_text_under_a_newer_epoch_starts_anew(other):
    at = verifier(ahead=6)
    say(at, opening())
    run_until(at, 0.0, 1.0)
    request = opening(epoch=1, **other)
    opened, *news = say(at, request, 2.0)
    assert (opened.epoch, opened.length, news) == (1, len(request.ids), [])
    assert at.num_sessions == len(at.engine.sessions) == 1


def test_a_late_close_of_an_older_epoch_closes_nothing():
    at = verifier()
    say(at, opening(epoch=3))
    say(at, Close(1, 2))
    assert at.num_sessions == 1
    say(at, Close(1, 3))
    assert at.num_sessions == 0 and at.engine.sessions == {}


def test_what_is_said_in_an_old_epoch_is_of_an_unknown_session():
    at = verifier()
    (old,) = say(at, opening(epoch=3))
    say(at, opening(epoch=4))
    (answer,) = say(at, resync(old, PROMPT, ask=True))
    assert (answer.code, answer.epoch) == (ErrorCode.UNKNOWN_SESSION, 3)
    assert at.num_sessions == 1


def test_an_unknown_handle_is_named_in_the_answer():
    at = verifier()
    (answer,) = say(at, Draft(77, 5, 1, 4, 0, Ids((1,))))
    assert (answer.code, answer.session, answer.epoch, answer.handle) == (ErrorCode.UNKNOWN_SESSION, 0, 5, 77)


def test_another_devices_handle_is_unknown():
    at = verifier()
    (opened,) = say(at, opening())
    (answer,) = say(at, resync(opened, PROMPT, ask=True), device="t.thief")
    assert answer.code == ErrorCode.UNKNOWN_SESSION
    say(at, Close(1, 9), device="t.thief")
    assert at.num_sessions == 1


def test_two_sessions_of_a_device_at_two_verifiers_differ_in_their_handles():
    """Both verifiers answer on the one topic of the device, which tells its sessions apart by their handles."""
    first = say(verifier(), opening(0x100))[0].handle
    second = say(Verifier("w", Limited(), scheduler=Scheduler(), bounds=Bounds()), opening(0x201))[0].handle
    assert first != second


def test_handles_of_one_device_differ_even_where_its_session_ids_end_alike():
    at = verifier(sessions_per_device=8)
    handles = [say(at, opening(0x7F + (i << 16)))[0].handle for i in range(8)]
    assert len(set(handles)) == 8
