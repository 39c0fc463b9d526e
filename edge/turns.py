"""Conversations: which verifier may still hold the KV of the text that a new prompt goes on from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from edge.window import Window

MOST = 8  # texts: a board has few conversations at a time
LEAST = 16  # tokens in common: below, it is the same system prompt at most


@dataclass(frozen=True, slots=True)
class Turn:
    """A complete text. session, verifier: under which it was written, and by whom."""

    session: int
    target: str
    verifier: str
    text: Sequence[int]


@dataclass(frozen=True, slots=True)
class Former:
    """Where to open first. prefix: (session, length) of the text that the verifier should still have."""

    verifier: str
    prefix: tuple[int, int]


class Turns:
    """The latest texts of a board."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque(maxlen=MOST)

    def ended(self, window: Window) -> None:
        """A session is over; it counts if its text is complete."""
        if window.finish and window.verifier:
            request = window.request
            self._turns.append(Turn(request.session, request.target, window.verifier, tuple(window.text)))

    def former(self, target: str, prompt: Sequence[int]) -> Former | None:
        """The text that a prompt has most in common with, of those of its target."""
        best = None
        for turn in self._turns:
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, turn.text, strict=False)))
            if turn.target == target and common >= (best.prefix[1] if best else LEAST):
                best = Former(turn.verifier, (turn.session, common))
        return best

    def forget(self, verifier: str) -> None:
        """The verifier is gone, and what it held."""
        self._turns = deque((turn for turn in self._turns if turn.verifier != verifier), MOST)
