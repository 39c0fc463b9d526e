"""What the board's session does about silence, refusals and nonsense; `>` is from the board."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf

import pytest

from edge.window import MAX_FRUITLESS_OPENS
from protocol.errors import WireError
from protocol.messages import (
    Close,
    Error,
    ErrorCode,
    Open,
    Resync,
    VerifierState,
    decode,
    encode,
)
from tests.edge.windows import LIMITS, PROMPT, SESSION, TIMING, commit, grow, opened, owned, said, window

# -- timers -----------------------------------------------------------------------------------------------------------


def test_new_text_is_acknowledged_where_no_draft_does_it():
    """< 1, ... > resync 4"""
    session = owned()
    session.receive(commit(PROMPT, [1]), 0.1)
    session.tick(0.4)
    assert said(session) == []
    assert session.wake_at() == pytest.approx(TIMING.acknowledge_s)
    session.tick(0.5)
    (tells,) = said(session)
    assert isinstance(tells, Resync) and (tells.have, tells.ask) == (4, False)
    session.tick(0.6)
    assert said(session) == []


def test_a_draft_is_an_acknowledgement():
    """< 1, > draft with have 4"""
    session = owned()
    session.receive(commit(PROMPT, [1]), 0.1)
    grow(session, [2])
    session.flush(0.2)
    (draft,) = said(session)
    assert draft.have == 4
    session.tick(0.6)
    assert said(session) == []


def test_a_quarter_of_the_owners_lead_is_acknowledged_at_once():
    session = owned()
    session.receive(commit(PROMPT, [1, 2, 3, 4]), 0.01)
    session.tick(0.01)
    assert [message.have for message in said(session)] == [7]


def test_a_silent_owner_is_asked_then_left_for_the_next_epoch():
    """> ask, > ask, ... > close, > open 1"""
    session = owned()
    grow(session, [1])
    session.flush(0.0)
    session.take()
    asked = []
    now = 0.0
    while session.epoch == 0:
        now = session.wake_at()
        session.tick(now)
        asked += [now for message in said(session) if isinstance(message, Resync) and message.ask]
    assert asked == [1.0, 2.0, 3.0, 4.0, 5.0] and now == TIMING.silence_s
    session.tick(now)
    assert session.epoch == 1 and not session.owned
    assert "silent" in session.problem


def test_an_owner_that_comes_back_to_the_broker_after_us_is_asked_at_once():
    """> ask (lost), < up, > ask; not again once it has answered"""
    session = owned()
    session.link_down("the broker has gone")
    session.link_up(5.0)
    assert [message.ask for message in said(session)] == [True]
    session.receive(VerifierState("v", "up"), 5.5)
    assert [(message.ask, message.have) for message in said(session)] == [(True, 3)]
    session.receive(VerifierState("other", "up"), 5.9)
    session.receive(commit(PROMPT, [1]), 5.9)
    session.receive(VerifierState("v", "up"), 6.5)
    assert said(session) == [] and session.epoch == 0


def test_asking_says_all_guesses_again():
    """> draft 1 2 (lost), ... > ask, > draft 1 2"""
    session = owned()
    grow(session, [1, 2])
    session.flush(0.0)
    session.take()
    session.tick(TIMING.repair_s)
    session.flush(TIMING.repair_s)
    asks, draft = said(session)
    assert asks.ask and draft.ids == (1, 2)


def test_no_timer_runs_while_the_link_is_down_and_it_asks_when_it_is_up():
    session = owned()
    grow(session, [1])
    session.link_down("broker gone")
    assert session.problem == "broker gone" and session.wake_at() == inf
    session.tick(100.0)
    session.flush(100.0)
    assert said(session) == [] and session.epoch == 0
    session.link_up(100.0)
    assert session.problem == ""
    session.flush(100.0)
    asks, draft = said(session)
    assert asks.ask and draft.ids == (1,)
    session.tick(100.5)
    assert session.owned


def test_an_open_that_was_under_way_when_the_link_broke_is_sent_again():
    session = window()
    session.link_down("broker gone")
    session.tick(0.0)
    assert said(session) == []
    session.link_up(9.0)
    session.tick(9.0)
    assert [type(message) for message in said(session)] == [Open]


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(ErrorCode.REOPEN))
def test_an_error_that_another_verifier_may_mend(code):
    """< error, > close, > open with the next epoch"""
    session = owned()
    session.receive(Error(SESSION, 0, code, "why"), 0.1)
    session.tick(0.1)
    messages = said(session)
    assert isinstance(messages[-1], Open) and messages[-1].epoch == 1
    assert code in session.problem and "why" in session.problem


@pytest.mark.parametrize("code", [ErrorCode.BAD_OPEN, ErrorCode.WRONG_TARGET, ErrorCode.OVER_CONTEXT, "made-up-later"])
def test_an_error_that_nobody_can_mend_ends_the_session(code):
    session = owned()
    session.receive(Error(SESSION, 0, code, "why"), 0.1)
    assert session.done and session.failure is not None and session.failure.code == code
    assert "why" in str(session.failure)
    session.tick(50.0)
    assert said(session) == [] and session.wake_at() == inf


def test_an_owner_that_forgot_the_session_names_the_handle_alone():
    """> draft, < error unknown-session with our handle, > open; < the same with another handle is not ours"""
    session = owned()
    session.receive(Error(0, 0, ErrorCode.UNKNOWN_SESSION, handle=8), 0.1)
    assert session.owned
    session.receive(Error(0, 0, ErrorCode.UNKNOWN_SESSION, handle=7), 0.1)
    assert not session.owned and session.epoch == 1


def test_a_late_error_of_an_old_epoch_changes_nothing():
    session = window(epoch=4)
    session.tick(0.0)
    session.receive(Error(SESSION, 3, ErrorCode.BAD_OPEN), 0.1)
    assert not session.done
    session.receive(opened(epoch=4), 0.2)
    assert session.owned


def test_it_tries_again_when_it_was_told_to():
    """> open 0, < no-room, in 2 s, ... > open 1"""
    session = window()
    session.tick(0.0)
    session.take()
    session.receive(Error(SESSION, 0, ErrorCode.NO_ROOM, retry_ms=2000), 0.1)
    session.tick(2.0)
    assert said(session) == []
    session.tick(2.1)
    assert isinstance(said(session)[0], Open)


def test_after_many_refusals_it_gives_up():
    session = window()
    now, opens = 0.0, 0
    while not session.done:
        now = session.wake_at()
        session.tick(now)
        opens += sum(isinstance(message, Open) for message in said(session))
        session.receive(Error(SESSION, session.epoch, ErrorCode.NO_ROOM, "full", 2000), now)
    assert opens == MAX_FRUITLESS_OPENS + 1
    assert session.failure is not None and session.failure.code == ErrorCode.NO_ROOM


def test_refusals_without_a_time_wait_longer_and_longer():
    session = window()
    times = []
    while not session.done:
        now = session.wake_at()
        times.append(now)
        session.tick(now)
        session.receive(Error(SESSION, session.epoch, ErrorCode.ENGINE), now)
    pauses = [b - a for a, b in pairwise(times)]
    assert pauses == sorted(pauses) and pauses[0] == 0.0 and max(pauses) <= TIMING.retry_most_s


def test_progress_makes_refusals_count_from_one_again():
    session = owned()
    text = [*PROMPT]
    now = 0.0
    for i in range(3 * MAX_FRUITLESS_OPENS):
        session.receive(commit(text, [i], epoch=session.epoch), now)
        text.append(i)
        session.receive(Error(SESSION, session.epoch, ErrorCode.ENGINE), now)
        now = max(now, session.wake_at())
        session.tick(now)
        session.receive(opened(epoch=session.epoch, length=len(text)), now)
    assert not session.done and session.frontier == 3 + 3 * MAX_FRUITLESS_OPENS


def test_an_owner_that_is_gone_or_draining_is_left_and_another_is_not_minded():
    session = owned()
    session.receive(VerifierState("w", "gone"), 0.1)
    session.receive(VerifierState("v", "up"), 0.1)
    assert session.owned
    session.receive(VerifierState("v", "draining"), 0.1)
    assert not session.owned and session.epoch == 1


# -- a storm ----------------------------------------------------------------------------------------------------------


def test_20_000_mutated_messages_of_verifiers_stop_no_window():
    """Whatever can be decoded, from owners, false owners and nobody: nothing is raised, the prompt stays."""
    rng = random.Random(3)
    text = [*PROMPT, 1, 2]
    originals = [
        encode(message)
        for message in (
            opened(),
            opened(verifier="w", epoch=1),
            commit(PROMPT, [1, 2], seq=1, held=2, step_us=5, advice=3),
            commit(text, [3], seq=200),
            commit([*text, 3], [4], epoch=1),
            Error(SESSION, 0, ErrorCode.ENGINE, "why", 5),
            Error(0, 0, ErrorCode.UNKNOWN_SESSION, handle=7),
            VerifierState("v", "gone", limits=LIMITS),
            Close(SESSION, 0),
        )
    ]
    received, committed = 0, 0
    for _ in range(1000):
        session, now = rng.choice([window, owned])(max_tokens=30), 0.0
        for _ in range(20):
            data = bytearray(rng.choice(originals))
            for _ in range(rng.randint(0, 2)):
                at = rng.randrange(len(data))
                data[at : at + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
            try:
                message = decode(bytes(data))
            except WireError:
                continue
            received += 1
            session.receive(message, now)
            now += rng.random() / 4
            session.tick(now)
            if not session.tree.root.children and session.can_guess(session.tree.root):
                grow(session, [1])
            session.flush(now)
            for sent in said(session):
                decode(encode(sent))
            assert session.text[:3] == list(PROMPT) and session.wake_at() > 0
        committed += len(session.committed)
    assert received > 4_000 and committed > 200


def test_a_verifier_that_says_tomorrow_is_not_waited_for():
    """< over-limit with a retry time of hours: the application is told, with the time. Of seconds: the window waits."""
    session = owned()
    session.receive(Error(SESSION, 0, ErrorCode.OVER_LIMIT, "its tokens of the day", 7_200_000), 1.0)
    assert session.done and session.failure.code == ErrorCode.OVER_LIMIT and session.failure.retry_s == 7200.0
    session = owned()
    session.receive(Error(SESSION, 0, ErrorCode.OVER_LIMIT, "its rows a second", 1500), 1.0)
    assert not session.done and session.wake_at() == 2.5
