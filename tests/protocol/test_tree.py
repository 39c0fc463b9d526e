"""The draft tree: grafting by hash, keeping what was guessed right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.text import extend_hash, prefix_hashes
from protocol.tree import DraftTree, deltas_of, parents_of, path_to


def grown() -> DraftTree:
    """Text [9]; guesses 1 -> 2 -> 3 and 1 -> 4, and 5."""
    tree = DraftTree(9, 1, prefix_hashes(0, [9])[-1])
    one = tree.add(tree.root, 1)
    tree.add(tree.add(one, 2), 3)
    tree.add(one, 4)
    tree.add(tree.root, 5)
    return tree


def test_a_node_is_found_by_length_and_hash_of_its_text():
    tree = grown()
    node = tree.find(3, prefix_hashes(0, [9, 1, 4])[-1])
    assert node is not None and node.id == 4 and [n.id for n in path_to(node)] == [1, 4]
    assert tree.find(1, prefix_hashes(0, [9])[-1]) is tree.root
    assert tree.find(4, prefix_hashes(0, [9, 1, 4])[-1]) is None
    assert tree.find(3, prefix_hashes(0, [9, 4, 1])[-1]) is None


def test_adding_twice_adds_once():
    tree = grown()
    assert tree.add(tree.root, 1) is tree.add(tree.root, 1) and len(tree) == 5


def test_a_right_guess_keeps_its_subtree():
    tree = grown()
    assert [n.id for n in tree.advance([1])] == [1]
    assert [n.id for n in tree] == [2, 3, 4] and tree.root.id == 1
    assert path_to(next(iter(tree)))[0].id == 2


def test_a_miss_forgets_all_guesses_and_moves_the_root():
    tree = grown()
    assert [n.id for n in tree.advance([1, 7, 8])] == [1]
    assert len(tree) == 0 and (tree.root.id, tree.root.position) == (8, 3)
    assert tree.root.hash == prefix_hashes(0, [9, 1, 7, 8])[-1]


def test_a_new_owner_renames_every_text():
    tree = grown()
    tree.rehash(1234)
    assert all(node.hash == extend_hash(node.parent.hash, node.id) for node in tree)
    assert tree.find(2, extend_hash(1234, 5)).id == 5


def test_a_dropped_node_takes_its_descendants():
    tree = grown()
    tree.drop(tree.root.children[1])
    assert [n.id for n in tree] == [5]


def test_a_chain_travels_without_parents():
    assert deltas_of([-1, 0, 1]) == ()
    assert parents_of(3, ()) == [-1, 0, 1]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=50))
def test_parents_survive_the_wire(raw):
    parents = [r % (i + 1) - 1 for i, r in enumerate(raw)]
    assert parents_of(len(parents), deltas_of(parents)) == parents


@pytest.mark.parametrize("deltas", [(1,), (1, 1, 4), (0, 1, 1), (1, 3, 1), (1, 1, 1, 1)])
def test_deltas_that_are_no_tree_are_refused(deltas):
    assert parents_of(3, deltas) is None
