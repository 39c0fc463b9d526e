"""How often a session's guesses are accepted, by where they stand, and what that promises of a row."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.tree import Node

DEPTHS, PLACES = 3, 4
PRIOR = (0.75, 0.6, 0.35, 0.25)  # of an only child, the first of several, the second, and those behind it
PRIOR_WEIGHT = 8.0
FLEET_FADE = 0.9995  # of what was seen of all sessions, a guess
AGE = 0.995


class Rates:
    """Shares of guesses that were right, given that all before them in the tree were, and that their elder siblings
    were wrong. By depth behind the text (0, 1, further) and place (alone, first, second and later of siblings).
    """

    def __init__(self, prior: Rates | None = None, fade: float = FLEET_FADE) -> None:
        self._prior, self._fade = prior, fade
        self._hits = [0.0] * (DEPTHS * PLACES)
        self._tries = [0.0] * (DEPTHS * PLACES)

    def rate(self, depth: int, place: int) -> float:
        at = min(depth, DEPTHS - 1) * PLACES + place
        before = PRIOR[place] if self._prior is None else self._prior.rate(depth, place)
        return (self._hits[at] + PRIOR_WEIGHT * before) / (self._tries[at] + PRIOR_WEIGHT)

    def learn(self, depth: int, place: int, hit: bool) -> None:
        at = min(depth, DEPTHS - 1) * PLACES + place
        self._hits[at] = self._hits[at] * self._fade + hit
        self._tries[at] = self._tries[at] * self._fade + 1
        if self._prior is not None:
            self._prior.learn(depth, place, hit)

    def age(self) -> None:
        """A token came without a guess: what is known counts a little less, so that nobody is bad for ever."""
        self._hits = [hits * AGE for hits in self._hits]
        self._tries = [tries * AGE for tries in self._tries]

    def judge(self, depth: int, children: Mapping[int, Node], drawn: int) -> None:
        """The token behind a node at `depth` is known, so its children, in the order they came, are judged."""
        place = 1 if len(children) > 1 else 0
        for id in children:
            self.learn(depth, place, id == drawn)
            if id == drawn:
                break
            place = min(place + 1, PLACES - 1)

    def of_children(self, depth: int, children: Mapping[int, Node]) -> list[tuple[float, Node]]:
        """Siblings with their chances, given that their parent is right: each has what its elders left."""
        place, left = 1 if len(children) > 1 else 0, 1.0
        chances: list[tuple[float, Node]] = []
        for node in children.values():
            chance = left * self.rate(depth, place)
            left -= chance
            chances.append((chance, node))
            place = min(place + 1, PLACES - 1)
        return chances
