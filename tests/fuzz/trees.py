"""What is true of every tree of guesses."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.text import extend_hash
from protocol.tree import DraftTree


def check_tree(tree: DraftTree, text: Sequence[int], hash: int) -> None:
    """The tree stands behind `text`, whose hash is `hash`; its nodes hang together, and each is found by its text."""
    root = tree.root
    assert (root.id, root.position, root.hash, root.parent) == (text[-1], len(text) - 1, hash, None)
    alive, num_children = {root}, len(root.children)
    for node in tree:
        parent = node.parent
        assert parent in alive, "a child before its parent, or of a node that is gone"
        assert parent.children[node.id] is node
        assert (node.position, node.hash) == (parent.position + 1, extend_hash(parent.hash, node.id))
        assert tree.find(node.position + 1, node.hash) is node
        alive.add(node)
        num_children += len(node.children)
    assert num_children == len(tree) == len(alive) - 1
