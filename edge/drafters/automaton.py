"""A suffix automaton over a growing text: where the end of a text occurred before, and what came next there.

Built online in amortised constant time a token: Blumer, Blumer, Haussler, Ehrenfeucht, Chen, Seiferas, "The smallest
automaton recognizing the subwords of a text", Theoretical Computer Science 40, 1985. A state stands for all strings
that end at the same places of the text; its link leads to the longest suffix that ends at more of them.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_CONTINUATIONS = 64  # of a string that still says something about what comes next
MOST_COUNTED = 16  # suffixes of each new end whose occurrences are counted: a text of one token alone has them all


class Match(NamedTuple):
    """A string that occurs in the text. length: its tokens, 0 for the empty string, of which nothing is known."""

    state: int
    length: int


class Continuation(NamedTuple):
    """What came after a string. times: how often; end: where it last did, so a greater one is more recent."""

    id: int
    times: int
    end: int


NOTHING = Match(0, 0)


class SuffixAutomaton:
    """At most two states a token of the text, and at most three transitions."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]  # of the longest string of each state
        self._count = [0]  # occurrences; of strings behind the longest MOST_COUNTED of an end, some are missing
        self._end = [-1]  # of the latest occurrence that was counted
        self._last = 0

    def append(self, id: int) -> None:
        """Let the text grow by a token."""
        nexts, link, length = self._next, self._link, self._length
        made = self._add({}, 0, length[self._last] + 1, 0, -1)
        at = self._last
        while at >= 0 and id not in nexts[at]:
            nexts[at][id] = made
            at = link[at]
        if at >= 0:
            before = nexts[at][id]
            if length[at] + 1 == length[before]:
                link[made] = before
            else:
                # Of the strings of `before` only those up to this length end here too: they get a state of their own.
                twin = self._add(
                    dict(nexts[before]), link[before], length[at] + 1, self._count[before], self._end[before]
                )
                while at >= 0 and nexts[at].get(id) == before:
                    nexts[at][id] = twin
                    at = link[at]
                link[before] = link[made] = twin
        self._last = made
        self._note_end(made)
        self.text.append(id)

    def longest(self) -> Match:
        """The longest suffix of the text that occurred before."""
        state = self._link[self._last]
        return Match(state, self._length[state]) if state > 0 else NOTHING

    def step(self, match: Match, id: int) -> Match:
        """The longest suffix of (the match's string, id) that occurs in the text, and is not longer than both."""
        state, matched = match
        nexts, link, length = self._next, self._link, self._length
        while state and length[link[state]] >= matched:  # its string has got a state of its own since
            state = link[state]
        while state and id not in nexts[state]:
            state = link[state]
            matched = length[state]
        after = nexts[state].get(id)
        return NOTHING if after is None else Match(after, matched + 1)

    def continuations(self, match: Match) -> list[Continuation]:
        """What came after the string of a match, the most frequent first, of equals the most recent; nothing where more
        than MOST_CONTINUATIONS ids did.
        """
        state, matched = match
        while state and self._length[self._link[state]] >= matched:
            state = self._link[state]
        count, end, nexts = self._count, self._end, self._next[state]
        if not state or len(nexts) > MOST_CONTINUATIONS:
            return []
        found = [Continuation(id, count[after], end[after]) for id, after in nexts.items()]
        return sorted(found, key=lambda one: (-one.times, -one.end))

    def shorter(self, match: Match) -> Match:
        """The longest suffix of a match's string that occurs in more places."""
        state, matched = match
        while state and self._length[self._link[state]] >= matched:
            state = self._link[state]
        above = self._link[state] if state else 0
        return Match(above, self._length[above]) if above > 0 else NOTHING

    def _add(self, nexts: dict[int, int], link: int, length: int, count: int, end: int) -> int:
        self._next.append(nexts)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._end.append(end)
        return len(self._link) - 1

    def _note_end(self, state: int) -> None:
        end = len(self.text)
        for _ in range(MOST_COUNTED):
            if state <= 0:
                break
            self._count[state] += 1
            self._end[state] = end
            state = self._link[state]
