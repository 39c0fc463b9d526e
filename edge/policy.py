"""When to guess what, and when to send it. A policy sees the window after each pass of the drafter and answers two
questions; a better one is another class.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from edge.window import Window
from protocol.tree import Node

# Found by replaying recorded drafts: fewer steps and bytes, and hardly a token later.
FIRST_GUESSES, UNSURE = 3, 0.5
WORTH_A_MESSAGE = 0.12  # what is less likely to be still right waits for the verdict on what is under way
GATHERED_SHARE = 0.85  # of a step that has begun with our last draft: what leaves then is in time for the next


class Policy(Protocol):
    """candidates: how many guesses per evaluated row the policy wants to choose from."""

    candidates: int

    def grow(self, window: Window) -> list[Node]:
        """Add guesses to the window's tree and name the nodes to evaluate in the next pass, parents first.

        Every evaluated node, the root too, has its candidates in its note. Empty: nothing is worth a pass now.
        """

    def send_at(self, window: Window, now: float) -> float:
        """When the unsent guesses should leave; inf while they should wait for something else to happen."""


def gathered_send_at(window: Window, now: float, lookahead: int, paced: bool) -> float:
    """When gathered guesses should leave; not paced, each leaves as soon as it is made.

    A verifier that steps without pause takes them at its next step, so they leave just in time for that. One that
    waits for drafts gets a few at once, or as many as the drafter is sure of, and what comes during a step before its
    end.
    """
    unsent = window.unsent()
    if not unsent:
        return inf
    if not paced:
        return now
    under_way = window.in_flight()
    if under_way and max(node.note.path for node in unsent) < WORTH_A_MESSAGE:
        return inf
    if not window.request.patience_s:
        return window.cadence.departure(now)
    if not under_way:
        tip = unsent[-1]
        enough = len(unsent) >= min(FIRST_GUESSES, lookahead) or tip.note.path < UNSURE or not window.can_guess(tip)
        return now if enough else inf
    return window.cadence.sent_at + GATHERED_SHARE * window.cadence.step_s


@dataclass(slots=True)
class ChainPolicy:
    """One chain, ahead as long as it is likely enough to be still right.

    lookahead: most guesses beyond the frontier; floor: the least product of probabilities worth another pass.
    """

    lookahead: int = 24
    floor: float = 0.05
    paced: bool = True
    candidates: int = 1

    def grow(self, window: Window) -> list[Node]:
        tip = window.tree.root
        while tip.children:
            tip = next(iter(tip.children.values()))
        if tip.note.candidates is None:
            return [tip] if tip is not window.tree.root and tip.note.row is None else []
        if not self._worth_it(window, tip):
            return []
        best = tip.note.candidates[0]
        return [window.guess(tip, best.id, best.probability)]

    def send_at(self, window: Window, now: float) -> float:
        return gathered_send_at(window, now, self.lookahead, self.paced)

    def _worth_it(self, window: Window, tip: Node) -> bool:
        if not window.can_guess(tip) or not tip.note.candidates:
            return False
        depth = tip.position - window.tree.root.position
        return depth == 0 or (depth < self.lookahead and tip.note.path >= self.floor)


@dataclass(slots=True)
class TreePolicy:
    """A chain with siblings where the drafter is unsure: the likeliest open nodes are evaluated first.

    rows: most nodes of one pass; sibling_floor: the least probability, given its parent, of a sibling that is sent.
    """

    lookahead: int = 24
    floor: float = 0.05
    rows: int = 2
    sibling_floor: float = 0.15
    paced: bool = True
    candidates: int = 3

    def grow(self, window: Window) -> list[Node]:
        root = window.tree.root
        if root.note.candidates is None:
            return []
        for node in [root, *window.tree]:
            if node.note.candidates and not node.children:
                self._branch(window, node)
        open_nodes = [node for node in window.tree if node.note.row is None and self._ready(node)]
        open_nodes.sort(key=lambda node: -node.note.path)
        first = open_nodes[:1]
        return first + [node for node in open_nodes[1 : self.rows] if node.note.path >= self.floor]

    def send_at(self, window: Window, now: float) -> float:
        return gathered_send_at(window, now, self.lookahead, self.paced)

    def _branch(self, window: Window, node: Node) -> None:
        depth = node.position - window.tree.root.position
        if depth and (depth >= self.lookahead or node.note.path < self.floor):
            return
        for rank, candidate in enumerate(node.note.candidates):
            worth = rank == 0 or (window.branches and candidate.probability >= self.sibling_floor)
            if worth and window.can_guess(node):
                window.guess(node, candidate.id, candidate.probability)

    @staticmethod
    def _ready(node: Node) -> bool:
        return node.parent is not None and node.parent.note.row is not None


@dataclass(slots=True)
class SyncPolicy:
    """The classic scheme: gamma guesses, then wait for the verdict. For comparison."""

    gamma: int = 4
    candidates: int = 1

    def grow(self, window: Window) -> list[Node]:
        if window.in_flight():
            return []
        return ChainPolicy(lookahead=self.gamma, floor=0.0).grow(window)

    def send_at(self, window: Window, now: float) -> float:
        unsent = window.unsent()
        if window.in_flight() or not unsent:
            return inf
        full = len(unsent) >= self.gamma or not window.can_guess(unsent[-1])
        return now if full else inf


@dataclass(slots=True)
class NoDraftPolicy:
    """Plain streaming from the cloud."""

    candidates: int = 1

    def grow(self, window: Window) -> list[Node]:
        return []

    def send_at(self, window: Window, now: float) -> float:
        return inf
