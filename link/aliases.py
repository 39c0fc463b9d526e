"""Topic aliases (pure): a number in place of a topic for as long as one connection lasts (MQTT 5, 3.3.2.3.4)."""

from __future__ import annotations

from collections import OrderedDict

from protocol.errors import WireError

NUM_REMEMBERED = 1024  # topics without an alias whose last use is known
RESTED = 2  # times as long as a topic waits between its uses must another have rested to give up its alias to it


class Aliases:
    """Gives the topics that one connection publishes to their aliases.

    maximum: aliases that the receiver grants. A topic gets a free one at its first use. Later the topic that has rested
    longest must give up its own, but only to a topic that comes clearly more often: more topics than aliases, used in
    turn, would otherwise take them from each other at every message, and each would be sent in full, with an alias.
    """

    def __init__(self, maximum: int = 0) -> None:
        self._maximum = maximum
        self._bound: OrderedDict[str, int] = OrderedDict()  # the topic that has rested longest first
        self._used_at: OrderedDict[str, int] = OrderedDict()  # likewise; counted in messages
        self._now = 0

    def shorten(self, topic: str) -> tuple[str, int | None]:
        """What to send for `topic`: ("", alias) where the receiver knows it, else the topic, with an alias to bind."""
        if not self._maximum:
            return topic, None
        alias = self._bound.get(topic)
        if alias is not None:
            self._use(topic)
            self._bound.move_to_end(topic)
            return "", alias
        before = self._used_at.get(topic)
        self._use(topic)
        if len(self._bound) < self._maximum:
            alias = len(self._bound) + 1
        else:
            oldest = next(iter(self._bound))
            rested = self._now - self._used_at.get(oldest, 0)
            if before is None or rested <= RESTED * (self._now - before):
                return topic, None
            alias = self._bound.pop(oldest)
        self._bound[topic] = alias
        return topic, alias

    def _use(self, topic: str) -> None:
        self._now += 1
        self._used_at[topic] = self._now
        self._used_at.move_to_end(topic)
        if len(self._used_at) > self._maximum + NUM_REMEMBERED:
            self._used_at.popitem(last=False)


class AliasedTopics:
    """The other end: the topics that one connection's sender has bound to aliases, at most `maximum`."""

    def __init__(self, maximum: int = 0) -> None:
        self._maximum = maximum
        self._topics: dict[int, str] = {}

    def resolve(self, topic: str, alias: int | None) -> str:
        """The full topic of a message. Raises WireError for an alias that was not granted or stands for nothing."""
        if alias is None and topic:
            return topic
        if alias is None or not 1 <= alias <= self._maximum:
            raise WireError(f"topic alias {alias} is not in 1..{self._maximum}", where="link")
        if topic:
            self._topics[alias] = topic
        elif alias not in self._topics:
            raise WireError(f"topic alias {alias} stands for no topic", where="link")
        return self._topics[alias]
