"""What a guess is worth once it is known better."""

from __future__ import annotations

import pytest

from edge.drafters.base import Candidate
from edge.guesses import revalue
from tests.edge.passes import window


def test_what_is_behind_a_guess_is_worth_more_or_less_with_it():
    session = window()
    a = session.guess(session.tree.root, 1, 0.8, main=True)
    b = session.guess(a, 2, 0.5)
    other = session.guess(session.tree.root, 3, 0.1)
    revalue(a, 0.2, main=True)
    assert [node.note.path for node in (a, b, other)] == pytest.approx([0.2, 0.1, 0.1])
    revalue(a, 0.9, main=True)
    assert [node.note.path for node in (a, b, other)] == pytest.approx([0.9, 0.45, 0.1])


def test_a_guess_that_was_thought_impossible_can_still_become_likely():
    session = window()
    node = session.tree.root
    for id in range(30):
        node = session.guess(node, id, 0.0 if id else 0.5)
    revalue(next(iter(session.tree)), 0.9, main=False)
    assert all(0 < one.note.path <= 0.9 for one in session.tree)


def test_first_candidates_behind_a_guess_are_of_the_main_path_when_it_is():
    session = window()
    root = session.tree.root
    first, second = session.guess(root, 1, 0.6, main=True), session.guess(root, 2, 0.3)
    second.note.candidates = [Candidate(5, 0.9), Candidate(6, 0.1)]
    best, least = session.guess(second, 5, 0.9), session.guess(second, 6, 0.1)
    first.note.candidates = [Candidate(7, 0.9)]
    behind = session.guess(first, 7, 0.9, main=True)
    revalue(first, 0.1, main=False)
    revalue(second, 0.9, main=True)
    assert [node.note.main for node in (first, behind, second, best, least)] == [False, False, True, True, False]
