"""The tree of guesses behind a text, as the board grows it and as the verifier grafts it.

A node stands for one token at one position; the root is the text's last token. Nodes are found by the hash of the
text that ends with them, so that a draft needs no numbering that both sides would have to keep in step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from protocol.text import extend_hash


class Node:
    """One guessed token. position: its absolute index; hash: of the text up to and including it.

    note: whatever the side that owns the tree wants to remember of the node.
    """

    __slots__ = ("children", "hash", "id", "note", "parent", "position")

    def __init__(self, id: int, position: int, hash: int, parent: Node | None) -> None:
        self.id, self.position, self.hash, self.parent = id, position, hash, parent
        self.children: dict[int, Node] = {}
        self.note: Any = None


class DraftTree:
    """Guesses behind one text; parents come before children in iteration order."""

    def __init__(self, last_id: int, length: int, hash: int) -> None:
        """last_id: the text's last token; length: of the text; hash: of the whole text."""
        self.root = Node(last_id, length - 1, hash, None)
        self._nodes: dict[tuple[int, int], Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def find(self, length: int, hash: int) -> Node | None:
        """The node (or root) whose text has this length and this hash."""
        if (length - 1, hash) == (self.root.position, self.root.hash):
            return self.root
        return self._nodes.get((length - 1, hash))

    def add(self, parent: Node, id: int) -> Node:
        """The child of `parent` for `id`, made if it is new."""
        child = parent.children.get(id)
        if child is None:
            child = Node(id, parent.position + 1, extend_hash(parent.hash, id), parent)
            parent.children[id] = child
            self._nodes[child.position, child.hash] = child
        return child

    def drop(self, node: Node) -> None:
        """Forget a node and everything behind it."""
        assert node.parent is not None
        del node.parent.children[node.id]
        for gone in subtree(node):
            del self._nodes[gone.position, gone.hash]

    def advance(self, ids: Sequence[int]) -> list[Node]:
        """Append `ids` to the text. Returns the nodes that had guessed it, in order: all guesses beside or past the
        first miss are forgotten, the subtree behind a full match stays.
        """
        kept: list[Node] = []
        for i, id in enumerate(ids):
            node = self.root.children.get(id)
            if node is None:
                self._restart(ids[i:])
                break
            kept.append(node)
            self.root = node
        else:
            if kept:
                self.root.parent = None
                alive = set(subtree(self.root)) - {self.root}
                self._nodes = {key: node for key, node in self._nodes.items() if node in alive}
        return kept

    def rehash(self, hash: int) -> None:
        """Give the text another hash (a new owner) and the guesses theirs."""
        self.root.hash = hash
        nodes = list(self._nodes.values())
        self._nodes = {}
        for node in nodes:
            assert node.parent is not None
            node.hash = extend_hash(node.parent.hash, node.id)
            self._nodes[node.position, node.hash] = node

    def _restart(self, ids: Sequence[int]) -> None:
        position, hash = self.root.position, self.root.hash
        for id in ids:
            position, hash = position + 1, extend_hash(hash, id)
        self.root = Node(ids[-1], position, hash, None)
        self._nodes = {}


def subtree(node: Node) -> Iterator[Node]:
    """The node and everything behind it, parents first."""
    stack = [node]
    while stack:
        top = stack.pop()
        yield top
        stack.extend(reversed(top.children.values()))


def path_to(node: Node) -> list[Node]:
    """The nodes from the root's child to `node`; empty for the root."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
    return path[::-1]


def deltas_of(parents: Sequence[int]) -> tuple[int, ...]:
    """Parents as they travel: i - parents[i], or nothing at all for a chain."""
    deltas = tuple(i - p for i, p in enumerate(parents))
    return () if all(d == 1 for d in deltas) else deltas


def parents_of(num_ids: int, deltas: Sequence[int]) -> list[int] | None:
    """Parents for `num_ids` guesses: an index into them, or -1 for the place the draft is grafted at.

    None when the deltas do not describe a tree whose parents come first.
    """
    if not deltas:
        return list(range(-1, num_ids - 1))
    if len(deltas) != num_ids or any(not 1 <= d <= i + 1 for i, d in enumerate(deltas)):
        return None
    return [i - d for i, d in enumerate(deltas)]
