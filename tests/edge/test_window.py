"""The board's session, one behaviour a test; the first lines of each tell the packets, `>` from the board."""

from __future__ import annotations

from math import inf

import pytest

from protocol.messages import (
    Close,
    Draft,
    Limits,
    Open,
    Opened,
    Resync,
    VerifierState,
)
from protocol.text import owner_hash, prefix_hashes
from tests.edge.windows import LIMITS, PROMPT, SESSION, TIMING, commit, grow, opened, owned, said, window

# -- opening ----------------------------------------------------------------------------------------------------------


def test_it_opens_at_once_with_all_that_it_has():
    session = window(committed=(21, 22), epoch=3)
    session.tick(0.0)
    (send,) = session.take()
    assert send.topic == "outrider/v1/a.b/open/t" and send.qos == 1
    assert isinstance(send.message, Open)
    assert (send.message.ids, send.message.prompt_len, send.message.epoch) == ((*PROMPT, 21, 22), 3, 3)


def test_an_unanswered_open_is_repeated_with_the_next_epoch():
    """> open 0, ... > open 1"""
    session = window()
    session.tick(0.0)
    session.take()
    session.tick(TIMING.open_s - 0.01)
    assert said(session) == []
    assert session.wake_at() == TIMING.open_s
    session.tick(TIMING.open_s)
    (again,) = said(session)
    assert isinstance(again, Open) and again.epoch == 1
    assert "t" in session.problem


def test_an_open_that_nobody_serves_is_a_problem_to_report_and_is_repeated():
    """> open, < no subscribers, ... > open"""
    session = window()
    session.tick(0.0)
    session.take()
    session.unserved(0.1)
    assert "no verifier serves t" in session.problem
    session.tick(0.1 + TIMING.unserved_s - 0.01)
    assert said(session) == []
    session.tick(0.1 + TIMING.unserved_s)
    assert isinstance(said(session)[0], Open)
    session.receive(opened(epoch=session.epoch), 2.2)
    assert session.owned and session.problem == ""


def test_days_without_a_verifier_use_up_no_epochs():
    """> open, < no subscribers, 100,000 times"""
    session = window()
    now = 0.0
    for _ in range(100_000):
        session.tick(now)
        session.unserved(now)
        now += TIMING.unserved_s
    assert {message.epoch for message in said(session)} == {0}


def test_the_first_owner_is_the_owner_and_a_second_is_sent_away():
    """> open 0, < opened by v, < opened by w, > close to w"""
    session = owned()
    session.receive(opened(verifier="w"), 0.1)
    (send,) = session.take()
    assert isinstance(send.message, Close) and send.topic.endswith("/draft/w")
    assert session.verifier == "v"


def test_a_late_answer_to_an_old_open_is_sent_a_close():
    """> open 0, > open 1, < opened 0, > close 0, < opened 1"""
    session = window()
    session.tick(0.0)
    session.tick(TIMING.open_s)
    session.take()
    session.receive(opened(verifier="slow", epoch=0), 4.1)
    (send,) = session.take()
    assert isinstance(send.message, Close) and send.message.epoch == 0 and send.topic.endswith("/draft/slow")
    assert not session.owned
    session.receive(opened(epoch=1), 4.2)
    assert session.owned


def test_an_answer_for_another_session_is_not_ours_to_close():
    """> open, < opened of another session of this device"""
    session = window()
    session.tick(0.0)
    session.take()
    session.receive(Opened(SESSION + 1, 0, "v", 1, 3, LIMITS), 0.1)
    assert not session.owned and said(session) == []


def test_an_owner_that_has_another_length_is_asked():
    """> open 3 tokens, < opened with 5 tokens, > resync from 3"""
    session = window()
    session.tick(0.0)
    session.take()
    session.receive(opened(length=5), 0.1)
    (asks,) = said(session)
    assert isinstance(asks, Resync) and asks.ask and asks.have == 3


# -- commits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        commit(PROMPT, [1], verifier="w"),
        commit(PROMPT, [1], epoch=1),
        commit(PROMPT, [1], handle=8),
        commit((11, 12, 14), [1]),
        commit(PROMPT[:2], [13, 1]),
    ],
    ids=["owner", "epoch", "handle", "text", "inside the prompt"],
)
def test_a_commit_that_is_not_of_this_text_and_owner_is_not_applied(other):
    session = owned()
    session.receive(other, 0.1)
    assert session.committed == []
    session.receive(commit(PROMPT, [1]), 0.2)
    assert session.committed == [1]


def test_a_commit_before_there_is_an_owner_is_not_applied():
    session = window()
    session.tick(0.0)
    session.receive(commit(PROMPT, [1]), 0.1)
    assert session.committed == []


def test_doubled_and_overlapping_commits_apply_what_is_new():
    """< 1, < 1, < 1 2, < 2 3"""
    session = owned()
    session.receive(commit(PROMPT, [1]), 0.1)
    session.receive(commit(PROMPT, [1]), 0.1)
    session.receive(commit(PROMPT, [1, 2]), 0.2)
    session.receive(commit([*PROMPT, 1], [2, 3]), 0.3)
    assert session.committed == [1, 2, 3]
    assert session.tally.committed == 3
    assert [ids for ids, _ in session.moves] == [[1], [2], [3]]


def test_after_a_gap_it_asks_from_its_own_length_and_not_too_often():
    """< 1, < 3 (2 was lost), > ask from 4, < 4, < 2 3 4"""
    session = owned()
    session.receive(commit(PROMPT, [1]), 1.0)
    session.receive(commit([*PROMPT, 1, 2], [3]), 1.1)
    (asks,) = said(session)
    assert isinstance(asks, Resync) and asks.ask and asks.have == 4
    session.receive(commit([*PROMPT, 1, 2, 3], [4]), 1.1 + TIMING.repair_s / 4 - 0.01)
    assert said(session) == []
    session.receive(commit([*PROMPT, 1, 2, 3], [4]), 1.1 + TIMING.repair_s / 4)
    assert len(said(session)) == 1
    session.receive(commit([*PROMPT, 1], [2, 3, 4]), 1.5)
    assert session.committed == [1, 2, 3, 4]


def test_what_may_be_anothers_commit_does_not_hide_that_the_owner_is_silent():
    """< commits ahead of this text, whose owner cannot be checked, for ever: > open elsewhere"""
    session = owned()
    now = 0.0
    while session.epoch == 0 and now < 60:
        now += 0.5
        session.receive(commit([*PROMPT, 1, 2], [3], verifier="w"), now)
        session.tick(now)
    assert session.epoch == 1 and now <= TIMING.silence_s + 0.5


def test_right_guesses_stay_and_wrong_ones_go():
    session = owned()
    first, second, third = grow(session, [1, 2, 3])
    wrong = session.guess(session.tree.root, 9, 0.1)
    session.receive(commit(PROMPT, [1]), 0.1)
    assert session.tree.root is first and list(session.tree) == [second, third]
    assert not session.holds(wrong) and session.holds(third) and session.holds(first)
    assert session.tally.guessed == 1
    assert [kept for _, kept in session.moves] == [[first]]
    assert third.note.path == pytest.approx(0.81)


def test_ids_outside_the_vocabulary_are_not_text():
    """< 100 where 100 ids exist, > close, > open with the next epoch"""
    session = owned()
    session.receive(commit(PROMPT, [1, LIMITS.vocab_size]), 0.1)
    session.tick(0.1)
    assert session.committed == []
    assert [type(message) for message in said(session)] == [Close, Open]
    assert session.epoch == 1


def test_a_verifier_that_contradicts_itself_is_left():
    """< 1 2, < 1 7, > close, > open with the next epoch and the text as it was"""
    session = owned()
    session.receive(commit(PROMPT, [1, 2]), 0.1)
    session.receive(commit(PROMPT, [1, 7]), 0.2)
    session.tick(0.2)
    close, open = said(session)
    assert isinstance(close, Close) and close.epoch == 0
    assert isinstance(open, Open) and open.ids == (*PROMPT, 1, 2)
    assert "contradicted" in session.problem


# -- drafts -----------------------------------------------------------------------------------------------------------


def test_a_draft_carries_the_new_guesses_once():
    """> draft 1 2, > draft 3 behind them"""
    session = owned()
    grow(session, [1, 2])
    session.flush(0.1)
    session.flush(0.1)
    (first,) = said(session)
    assert isinstance(first, Draft) and (first.base, first.have, first.ids, first.deltas) == (3, 3, (1, 2), ())
    grow(session, [3])
    session.flush(0.2)
    (second,) = said(session)
    assert (second.base, second.ids, second.seq) == (5, (3,), first.seq + 1)
    assert session.in_flight == 3 and session.unsent == []


def test_a_guess_that_came_true_before_it_was_sent_is_no_draft():
    """> open, < opened, (guess 21), < commit 21, and nothing to send."""
    session = owned()
    grow(session, [21])
    session.receive(commit(PROMPT, [21], seq=0), 0.1)
    session.flush(0.1)
    assert said(session) == [] and not session.unsent


def test_nothing_is_drafted_to_nobody():
    session = window()
    grow(session, [1, 2])
    session.flush(0.0)
    assert said(session) == [] and len(session.unsent) == 2
    session.tick(0.0)
    session.receive(opened(), 0.1)
    session.flush(0.1)
    assert [type(message) for message in said(session)] == [Open, Draft]


def test_guesses_that_the_owner_does_not_hold_are_sent_again_and_only_once():
    """> draft 1 2 3 (seq 1), > draft 4 (seq 2), < commit 1, seen 2, holds nothing, > draft 2 3 4, < doubled"""
    session = owned()
    grow(session, [1, 2, 3])
    session.flush(0.1)
    grow(session, [4])
    session.flush(0.1)
    session.take()
    lost = commit(PROMPT, [1], seq=2, held=0)
    session.receive(lost, 0.2)
    session.flush(0.2)
    (again,) = said(session)
    assert isinstance(again, Draft) and again.ids == (2, 3, 4)
    session.receive(lost, 0.3)
    session.receive(commit([*PROMPT, 1], [], seq=2, held=0), 0.3)
    session.flush(0.3)
    assert said(session) == []


def test_guesses_that_are_still_on_their_way_are_not_sent_again():
    """> draft 1 2 3 (seq 1), > draft 4 5 (seq 2), < commit 1, seen 1, holds 2 3"""
    session = owned()
    grow(session, [1, 2, 3])
    session.flush(0.1)
    grow(session, [4, 5])
    session.flush(0.1)
    session.take()
    session.receive(commit(PROMPT, [1], seq=1, held=2), 0.2)
    session.flush(0.2)
    assert said(session) == []


def test_a_new_owner_gets_the_guesses_under_its_own_hash():
    """> draft, < gone, > open 1, < opened by w, > draft of the same guesses behind w's text"""
    session = owned()
    grow(session, [1, 2])
    session.flush(0.1)
    session.receive(VerifierState("v", "gone"), 0.2)
    session.tick(0.2)
    session.take()
    session.receive(opened(verifier="w", epoch=1), 0.3)
    session.flush(0.3)
    (send,) = session.take()
    assert send.topic.endswith("/draft/w")
    assert send.message.ids == (1, 2)
    assert send.message.hash == prefix_hashes(owner_hash(SESSION, "w", 1), PROMPT)[-1]


def test_a_new_owner_that_takes_fewer_rows_gets_the_first_ones():
    session = window()
    grow(session, [1, 2, 3, 4, 5])
    session.tick(0.0)
    session.take()
    session.receive(opened(limits=Limits(3, 16, 200, 100)), 0.1)
    session.flush(0.1)
    assert said(session)[0].ids == (1, 2, 3)
    assert not session.can_guess(session.tree.root)


def test_a_new_owner_that_takes_chains_gets_the_first_branch():
    session = window()
    first, *_ = grow(session, [1, 2])
    session.guess(session.tree.root, 8, 0.1)
    session.guess(first, 9, 0.1)
    session.tick(0.0)
    session.take()
    session.receive(opened(limits=Limits(8, 16, 200, 100, trees=False)), 0.1)
    assert [node.id for node in session.tree] == [1, 2]
    assert not session.branches


def test_no_guess_for_the_last_token_and_none_over_the_limit():
    session = owned(max_tokens=4)
    *_, last = grow(session, [1, 2, 3])
    assert not session.can_guess(last) and session.can_guess(last.parent)
    full = owned(limits=Limits(2, 16, 200, 100))
    *_, tip = grow(full, [1, 2])
    assert not full.can_guess(tip)


def test_a_drafter_that_stops_says_so_again_to_each_owner():
    """> resync alone, < gone, > open, < opened, > resync alone"""
    session = owned()
    session.give_up_drafting(0.1)
    session.give_up_drafting(0.1)
    (tells,) = said(session)
    assert isinstance(tells, Resync) and tells.alone and not tells.ask
    session.receive(VerifierState("v", "gone"), 0.2)
    session.tick(0.2)
    session.take()
    session.receive(opened(verifier="w", epoch=1), 0.3)
    (tells,) = said(session)
    assert tells.alone


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_finished_text_closes_and_a_repeated_last_commit_is_answered_with_a_close():
    """< 1 finish, > close (lost), < 1 finish, > close"""
    session = owned()
    last = commit(PROMPT, [1], finish="stop")
    session.receive(last, 0.1)
    assert session.done and session.finish == "stop" and session.committed == [1]
    assert [type(message) for message in said(session)] == [Close]
    session.receive(last, 1.6)
    assert [type(message) for message in said(session)] == [Close]
    session.receive(commit([*PROMPT, 1], [], finish="stop"), 3.1)
    assert [type(message) for message in said(session)] == [Close]
    assert session.committed == [1] and session.wake_at() == inf


def test_a_finish_counts_only_once_everything_before_it_is_there():
    """< 1, < 3 finish (2 was lost), > ask, < 2 3 finish"""
    session = owned()
    session.receive(commit(PROMPT, [1]), 1.0)
    session.receive(commit([*PROMPT, 1, 2], [3], finish="length"), 1.1)
    assert not session.done
    session.receive(commit([*PROMPT, 1], [2, 3], finish="length"), 1.2)
    assert session.finish == "length" and session.committed == [1, 2, 3]


def test_after_a_cancel_nothing_is_text_any_more():
    """> close, < 1 that was under way, > close"""
    session = owned()
    session.cancel()
    assert session.done and "cancelled" in str(session.failure)
    assert [type(message) for message in said(session)] == [Close]
    session.receive(commit(PROMPT, [1], finish="stop"), 0.1)
    assert session.committed == [] and session.finish == "" and session.moves == []
    assert [type(message) for message in said(session)] == [Close]


def test_a_session_that_was_cancelled_while_it_opened_is_closed_when_an_owner_answers():
    """> open, cancel, < opened, > close"""
    session = window()
    session.tick(0.0)
    session.take()
    session.cancel()
    session.receive(opened(), 0.1)
    (send,) = session.take()
    assert isinstance(send.message, Close) and send.topic.endswith("/draft/v")


def test_a_process_that_ends_leaves_its_text_with_the_owner():
    """< 1; the process ends, < 2, nothing is said: the next process opens with the next epoch"""
    session = owned()
    session.receive(commit(PROMPT, [1]), 0.1)
    session.leave()
    session.receive(commit([*PROMPT, 1], [2]), 0.2)
    session.tick(50.0)
    assert session.done and "journal" in str(session.failure)
    assert session.committed == [1] and said(session) == []
