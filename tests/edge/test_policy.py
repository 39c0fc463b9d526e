"""When a board guesses what, and when it sends it."""

from __future__ import annotations

from math import inf

import pytest

from edge.policy import ChainPolicy, NoDraftPolicy, SyncPolicy, TreePolicy
from tests.edge.passes import UNSURE, commit, depth, evaluate, passes, window


def test_a_chain_grows_by_one_guess_a_pass_as_far_as_it_looks_ahead():
    session = window()
    done = passes(ChainPolicy(lookahead=6, floor=0.01), session)
    assert [len(nodes) for nodes in done] == [1] * 6
    assert [node.id for node in session.tree] == [1] * 6 and depth(session) == 6


@pytest.mark.parametrize(("floor", "length"), [(0.3, 2), (0.1, 4), (0.9, 1)])
def test_a_chain_that_is_probably_wrong_by_now_stops(floor, length):
    """Each guess at .5: the path's probability falls by half a pass."""
    session = window()
    passes(ChainPolicy(floor=floor), session, ranked=UNSURE)
    assert depth(session) == length


def test_one_guess_is_always_worth_a_pass():
    session = window()
    passes(ChainPolicy(floor=0.99), session, ranked=[(1, 0.001)])
    assert depth(session) == 1


@pytest.mark.parametrize("policy", [ChainPolicy(), TreePolicy(), SyncPolicy(gamma=50)])
def test_nothing_is_guessed_past_the_owners_limit_or_for_the_last_token(policy):
    small = window(rows=5)
    passes(policy, small, ranked=[(1, 0.99), (2, 0.3)])
    assert len(small.tree) == 5
    short = window(max_tokens=4)
    passes(policy, short)
    assert depth(short) == 3


@pytest.mark.parametrize("policy", [ChainPolicy(), TreePolicy()])
def test_while_the_text_is_unread_there_is_nothing_to_grow_from(policy):
    assert policy.grow(window(), 0.0) == []


def test_after_a_commit_the_chain_goes_on_from_what_was_right():
    session = window()
    policy = ChainPolicy(lookahead=4, floor=0.01)
    passes(policy, session)
    commit(session, [1, 1])
    (node,) = policy.grow(session, 0.0)
    assert node.position == session.frontier + 2
    evaluate(policy, session, [node])
    commit(session, [9])
    assert policy.grow(session, 0.0) == []
    evaluate(policy, session, [session.tree.root])
    (node,) = policy.grow(session, 0.0)
    assert node.position == session.frontier


def test_a_guess_whose_evaluation_is_missing_is_evaluated_before_it_is_built_on():
    session = window()
    tip = session.guess(session.tree.root, 1, 0.9)
    evaluate(ChainPolicy(), session, [session.tree.root])
    assert ChainPolicy().grow(session, 0.0) == [tip]


def test_a_tree_branches_where_the_drafter_is_unsure_and_not_where_it_is_sure():
    unsure = window()
    passes(TreePolicy(), unsure, most=1, ranked=UNSURE)
    assert sorted(unsure.tree.root.children) == [1, 2], "not the third, which is too unlikely"
    sure = window()
    passes(TreePolicy(), sure, most=3)
    assert len(sure.tree) == depth(sure)


def test_a_tree_evaluates_the_likeliest_nodes_first_parents_before_children():
    session = window()
    policy = TreePolicy(rows=2)
    for nodes in passes(policy, session, most=6, ranked=UNSURE):
        assert 1 <= len(nodes) <= 2
        assert all(node.parent.note.row is not None for node in nodes)
        assert [node.note.path for node in nodes] == sorted((node.note.path for node in nodes), reverse=True)


def test_a_tree_is_a_chain_for_an_owner_that_takes_chains():
    session = window(trees=False)
    passes(TreePolicy(), session, most=5, ranked=UNSURE)
    assert len(session.tree) == depth(session) > 1


@pytest.mark.parametrize("policy", [ChainPolicy(), TreePolicy()])
def test_a_verifier_that_waits_gets_a_few_guesses_at_once_and_the_rest_before_its_step_ends(policy):
    session = window(step_us=100_000, patience_s=inf)
    assert policy.send_at(session, 1.0, 0.01) == inf
    tip = session.tree.root
    for id in (1, 2):
        tip = session.guess(tip, id, 0.95)
        assert policy.send_at(session, 1.0, 0.01) == inf
    assert policy.send_at(session, 1.0, 0.0) == 1.0, "an idle board has nothing to add"
    tip = session.guess(tip, 3, 0.95)
    assert policy.send_at(session, 1.0, 0.01) == 1.0
    session.flush(1.0)
    assert policy.send_at(session, 1.0, 0.01) == inf
    session.guess(tip, 4, 0.9)
    assert policy.send_at(session, 1.01, 0.01) == pytest.approx(1.085)
    commit(session, [9])
    session.guess(session.tree.root, 1, 0.4)
    assert policy.send_at(session, 1.02, 0.01) == 1.02, "an unsure guess is not worth waiting for company"


def test_a_verifier_that_never_waits_gets_drafts_once_a_step():
    session = window(step_us=100_000)
    policy = ChainPolicy()
    tip = session.guess(session.tree.root, 1, 0.9)
    assert policy.send_at(session, 1.0, 0.0) == 1.0
    session.flush(1.0)
    session.guess(tip, 2, 0.9)
    assert policy.send_at(session, 1.01, 0.0) == pytest.approx(1.1)


def test_a_short_lookahead_does_not_wait_for_guesses_that_never_come():
    session = window(patience_s=inf)
    session.guess(session.tree.root, 1, 0.99)
    assert ChainPolicy(lookahead=1).send_at(session, 1.0, 0.0) == 1.0


def test_sync_sends_gamma_guesses_and_waits_for_the_verdict():
    policy = SyncPolicy(gamma=3)
    session = window()
    evaluate(policy, session, [session.tree.root])
    while nodes := policy.grow(session, 0.0):
        if len(session.tree) < 3:
            assert policy.send_at(session, 1.0, 0.0) == inf
        evaluate(policy, session, nodes)
    assert len(session.tree) == 3 and policy.send_at(session, 1.0, 0.0) == 1.0
    session.flush(1.0)
    assert policy.grow(session, 0.0) == [] and policy.send_at(session, 1.0, 0.0) == inf
    commit(session, [1, 1, 1, 5])
    evaluate(policy, session, [session.tree.root])
    assert len(policy.grow(session, 0.0)) == 1


def test_sync_sends_fewer_where_the_text_ends():
    policy = SyncPolicy(gamma=5)
    session = window(max_tokens=3)
    passes(policy, session)
    assert len(session.tree) == 2 and policy.send_at(session, 1.0, 0.0) == 1.0


def test_no_drafts():
    session = window()
    evaluate(NoDraftPolicy(), session, [session.tree.root])
    assert NoDraftPolicy().grow(session, 0.0) == [] and NoDraftPolicy().send_at(session, 1.0, 0.0) == inf
