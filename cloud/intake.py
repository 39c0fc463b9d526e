"""What has come for a verifier's loop and waits for it: of one device no more than it may say, so that one that floods
keeps nobody but itself waiting.
"""

from __future__ import annotations

import threading
from collections import Counter, deque

from protocol.topics import PREFIX

MOST_DEVICES = 10_000  # that are remembered
BEFORE_DEVICE = len(PREFIX) + 1


class Intake:
    """A queue from the link's thread, which calls `put`, to the loop's, which calls the others.

    At most `most` messages wait; the oldest give way. per_s: messages of one device a second, and at once; what is over
    that is dropped, and counted for `overflow`.
    """

    def __init__(self, most: int, per_s: float) -> None:
        self.per_s = per_s
        self._waiting: deque[tuple[str, bytes, float]] = deque(maxlen=most)
        self._left: dict[str, tuple[float, float]] = {}  # by device: messages that it may still say, and since when
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()  # of the counts

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, topic: str, payload: bytes, now: float) -> None:
        device = topic[BEFORE_DEVICE : topic.find("/", BEFORE_DEVICE)]
        if len(self._left) >= MOST_DEVICES and device not in self._left:
            self._left.clear()
        left, since = self._left.get(device, (self.per_s, now))
        left = min(self.per_s, left + (now - since) * self.per_s)
        if left < 1:
            self._left[device] = left, now
            with self._lock:
                self._dropped[device] += 1
            return
        self._left[device] = left - 1, now
        self._waiting.append((topic, payload, now))

    def take(self) -> tuple[str, bytes, float]:
        """The oldest (topic, payload, when it came)."""
        return self._waiting.popleft()

    def overflow(self) -> dict[str, int]:
        """How many messages of each device were dropped since this was last asked."""
        with self._lock:
            dropped, self._dropped = self._dropped, Counter()
        return dropped
