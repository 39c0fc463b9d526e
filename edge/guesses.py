"""The tree of guesses behind a text: what each is worth, and which part of it a draft has to carry."""

from __future__ import annotations

from protocol.tree import DraftTree, Node, subtree

LEAST_PROBABILITY = 1e-6
LEAST_PATH = 1e-300  # a product of many small probabilities must stay above 0: paths are divided by each other


def path_of(parent: Node, probability: float) -> float:
    """The chance of a guess of this probability behind a node, and of all that leads to it."""
    return max(parent.note.path * max(probability, LEAST_PROBABILITY), LEAST_PATH)


def revalue(node: Node, probability: float, *, main: bool) -> None:
    """Give a guess another probability. What is behind it is as likely as before, given this one.

    main: it and all before it are first candidates.
    """
    assert node.parent is not None
    scale = path_of(node.parent, probability) / node.note.path
    for one in subtree(node):
        one.note.path = max(one.note.path * scale, LEAST_PATH)
        if one is not node:
            above = one.parent.note  # type: ignore[union-attr]
            main = above.main and bool(above.candidates) and above.candidates[0].id == one.id
        one.note.main = main


def spanning(tree: DraftTree, fresh: set[Node]) -> tuple[Node, list[Node]]:
    """(node to graft at, nodes to send): the smallest subtree that holds `fresh`, parents first."""
    wanted = set(fresh)
    for node in fresh:
        at = node.parent
        while at is not None and at is not tree.root and at not in wanted:
            wanted.add(at)
            at = at.parent
    graft = tree.root
    while True:
        inside = [child for child in graft.children.values() if child in wanted]
        if len(inside) != 1 or inside[0] in fresh:
            break
        graft = inside[0]
        wanted.discard(graft)
    return graft, [node for node in tree if node in wanted]
