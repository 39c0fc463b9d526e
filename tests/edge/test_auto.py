"""The policy that measures: what it guesses, how much, and when it stops."""

from __future__ import annotations

from math import inf

import pytest

from edge.auto import MOST_ROWS, PROBE, AutoPolicy
from edge.calibration import EVIDENCE, Calibration
from edge.drafters.base import Candidate
from edge.window import Window
from tests.edge.passes import UNSURE, commit, depth, evaluate, passes, window

PASS_S = 0.010


def measured(session: Window, *, share: float) -> Window:
    """A board whose pass and price of a row are known."""
    session.cadence.cost.first_s, session.cadence.cost.share = PASS_S, share
    return session


def auto() -> AutoPolicy:
    return AutoPolicy(Calibration())


def test_sure_guesses_become_one_deep_chain():
    session = measured(window(), share=0.15)
    assert all(len(nodes) == 1 for nodes in passes(auto(), session, most=10))
    assert depth(session) >= 10


def test_unsure_guesses_are_followed_together_where_rows_are_cheap_and_one_by_one_where_they_are_dear():
    cheap = [len(nodes) for nodes in passes(auto(), measured(window(), share=0.05), most=6, ranked=UNSURE)]
    dear = [len(nodes) for nodes in passes(auto(), measured(window(), share=0.6), most=6, ranked=UNSURE)]
    assert max(cheap) > 1 and max(dear) == 1
    assert max(cheap) <= MOST_ROWS


def test_siblings_are_guessed_without_costing_a_pass():
    session = measured(window(), share=1.0)
    policy = auto()
    evaluate(policy, session, [session.tree.root], UNSURE)
    (first,) = policy.grow(session, 0.0)
    assert first.id == 1 and set(session.tree.root.children) == {1, 2, 3}
    assert session.unsent == list(session.tree)


def test_a_verifier_that_takes_no_trees_gets_a_chain():
    session = measured(window(trees=False), share=0.05)
    passes(auto(), session, most=8, ranked=UNSURE)
    assert len(session.tree) == depth(session)


def test_it_stops_when_nothing_is_worth_a_pass():
    session = measured(window(), share=0.15)
    done = passes(auto(), session, most=60, ranked=UNSURE)
    assert 3 < len(done) < 60


def test_the_verifiers_advice_limits_the_guesses_and_none_are_made_where_none_are_welcome():
    def guesses(advice: int | None) -> int:
        session = measured(window(), share=0.15)
        session.advice = advice
        session.cadence.round_trip_s, session.cadence.beat_at = 0.05, 0.0
        passes(auto(), session, most=40)
        return len(session.tree)

    assert guesses(0) == 0
    assert guesses(1) <= 3 < guesses(4) < guesses(None)


def test_advice_that_comes_back_is_followed():
    session = measured(window(), share=0.15)
    policy = auto()
    session.advice = 0
    assert passes(policy, session) == []
    session.advice = 8
    commit(session, [1])
    evaluate(policy, session, [session.tree.root])
    assert policy.grow(session, 0.0)


def test_what_is_left_of_the_tree_after_a_commit_is_gone_on_with():
    session = measured(window(), share=0.15)
    policy = auto()
    passes(policy, session, most=6)
    before = depth(session)
    commit(session, [1, 1])
    (nodes,) = [policy.grow(session, 0.0)]
    evaluate(policy, session, nodes)
    assert policy.grow(session, 0.0) and depth(session) >= before - 2


def known(session: Window, ids: list[int], probability: float) -> list:
    """A run of guesses that was made without the model."""
    root = session.tree.root
    nodes = [root]
    for id in ids:
        nodes[-1].note.candidates = [Candidate(id, probability)]
        nodes.append(session.guess(nodes[-1], id, probability, main=True))
    for node in nodes:
        node.note.row, node.note.unread = object(), True
        node.note.candidates = node.note.candidates or []
    return nodes


def test_a_run_that_was_guessed_without_the_model_is_read_while_there_is_time_and_no_further_than_pays():
    session, policy = measured(window(), share=0.1), auto()
    nodes = known(session, list(range(1, 15)), 0.95)
    (asked,) = policy.grow(session, 0.0)
    assert asked is nodes[MOST_ROWS - 1], "so many rows from the root on"
    for node in nodes[:MOST_ROWS]:
        node.note.unread = False
    (asked,) = policy.grow(session, 0.0)
    assert asked is nodes[-1], "then what is left of it"


def test_what_is_as_good_as_certain_is_not_read():
    session, policy = measured(window(), share=0.1), auto()
    known(session, [1, 2, 3], 0.95)
    for node in session.tree:
        node.note.path = 1.0 - 1e-6
        node.note.unread = bool(node.children)
    assert policy.grow(session, 0.0) == []


def test_where_the_model_thinks_otherwise_its_guess_goes_beside_and_is_gone_on_with():
    session, policy = measured(window(), share=0.1), auto()
    nodes = known(session, [1, 2, 3, 4, 5, 6], 0.95)
    policy.grow(session, 0.0)
    session.unsent.clear()
    found = [Candidate(9, 0.99), Candidate(3, 0.1)]
    session.reconsider([(node.note.row, node.note.candidates) for node in nodes[:2]] + [(nodes[2].note.row, found)])
    picked = policy.grow(session, 0.0)
    assert [(node.id, node.parent) for node in picked] == [(9, nodes[2])]
    assert session.unsent == picked and picked[0].note.main
    assert nodes[3].note.path < 0.3 < picked[0].note.path
    assert not nodes[5].note.main and nodes[6].note.path < nodes[3].note.path


def test_more_room_is_used_as_soon_as_there_is_some():
    session, policy = measured(window(), share=0.1), auto()
    session.advice = 1
    session.cadence.round_trip_s, session.cadence.beat_at = 0.05, 0.0
    passes(policy, session, most=40)
    few = len(session.tree)
    session.advice = 12
    assert policy.grow(session, 0.0) and len(session.tree) > few


def judge(policy: AutoPolicy, session: Window, ids: list[int]) -> None:
    for id in ids:
        evaluate(policy, session, [session.tree.root], UNSURE)
        policy.grow(session, 0.0)
        commit(session, [id])


@pytest.mark.parametrize(
    ("patience_s", "right", "alone"), [(inf, False, True), (inf, True, False), (0.0, False, False)]
)
def test_a_verifier_that_waits_in_vain_is_told_not_to(patience_s, right, alone):
    session = measured(window(patience_s=patience_s), share=0.15)
    policy = auto()
    judge(policy, session, [1 if right else 9] * (EVIDENCE + 2))
    evaluate(policy, session, [session.tree.root], UNSURE)
    policy.grow(session, 1.0)
    assert session.alone == alone


def test_the_next_text_of_a_hopeless_drafter_is_given_up_sooner_and_a_good_one_is_not():
    calibration = Calibration()
    judge(AutoPolicy(calibration), measured(window(patience_s=inf), share=0.15), [9] * (EVIDENCE + 2))
    session, policy = measured(window(patience_s=inf), share=0.15), AutoPolicy(calibration)
    judge(policy, session, [9] * PROBE)
    policy.grow(session, 1.0)
    assert session.alone
    session, policy = measured(window(patience_s=inf), share=0.15), AutoPolicy(calibration)
    judge(policy, session, [1] * (PROBE + 4))
    policy.grow(session, 1.0)
    assert not session.alone


def test_drafts_that_are_never_right_shrink():
    session, policy = measured(window(max_tokens=190), share=0.15), auto()
    early = sum(map(len, passes(policy, session, most=30, ranked=UNSURE)))
    judge(policy, session, [9] * 60)
    late = sum(map(len, passes(policy, session, most=30, ranked=UNSURE)))
    assert late < early / 2
