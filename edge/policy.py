"""When to guess what, and when to send it. A policy sees the window after each pass of the drafter and answers two
questions; a better one is another class.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from edge.pacing import FIRST_GUESSES, departure
from edge.window import Window
from protocol.tree import Node


class Policy(Protocol):
    """candidates: how many guesses per evaluated row the policy wants to choose from."""

    candidates: int

    def grow(self, window: Window, now: float) -> list[Node]:
        """Add guesses to the window's tree and name the nodes to evaluate in the next pass, parents first.

        Every evaluated node, the root too, has its candidates in its note. Empty: nothing is worth a pass now.
        """

    def send_at(self, window: Window, now: float, pass_s: float) -> float:
        """When the unsent guesses should leave; inf while they should wait for something else to happen.

        pass_s: of the pass that begins now, 0 when none does; nothing can leave before its end.
        """


@dataclass(slots=True)
class ChainPolicy:
    """One chain, ahead as long as it is likely enough to be still right.

    lookahead: most guesses beyond the frontier; floor: the least product of probabilities worth another pass.
    """

    lookahead: int = 24
    floor: float = 0.05
    paced: bool = True
    candidates: int = 1

    def grow(self, window: Window, now: float) -> list[Node]:
        tip = window.tree.root
        while tip.children:
            tip = next(iter(tip.children.values()))
        if tip.note.candidates is None:
            return [tip] if tip is not window.tree.root and tip.note.row is None else []
        if not self._worth_it(window, tip):
            return []
        best = tip.note.candidates[0]
        return [window.guess(tip, best.id, best.probability)]

    def send_at(self, window: Window, now: float, pass_s: float) -> float:
        return departure(window, now, pass_s, paced=self.paced, enough=min(FIRST_GUESSES, self.lookahead))

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

    def grow(self, window: Window, now: float) -> list[Node]:
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

    def send_at(self, window: Window, now: float, pass_s: float) -> float:
        return departure(window, now, pass_s, paced=self.paced, enough=min(FIRST_GUESSES, self.lookahead))

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

    def grow(self, window: Window, now: float) -> list[Node]:
        if window.in_flight:
            return []
        return ChainPolicy(lookahead=self.gamma, floor=0.0).grow(window, now)

    def send_at(self, window: Window, now: float, pass_s: float) -> float:
        unsent = window.unsent
        if window.in_flight or not unsent:
            return inf
        full = len(unsent) >= self.gamma or not window.can_guess(unsent[-1])
        return now if full else inf


@dataclass(slots=True)
class NoDraftPolicy:
    """Plain streaming from the cloud."""

    candidates: int = 1

    def grow(self, window: Window, now: float) -> list[Node]:
        return []

    def send_at(self, window: Window, now: float, pass_s: float) -> float:
        return inf
