"""What a device's application is told, held against the undisturbed text token by token."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from tests.faults.stories import NUM_TOKENS, number_of, undisturbed


@dataclass
class Application:
    """Takes the lines of one device, whatever process they come from.

    times: when tokens came, by CLOCK_MONOTONIC; wrong: what must not be, in words; failures: sessions that ended with
    an error, by its text; at: how many tokens of each session were told.
    """

    device: str
    max_tokens: int = NUM_TOKENS
    times: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    finished: int = 0
    owner: str = ""
    wall_off_s: float = 0.0
    at: dict[int, int] = field(default_factory=dict)
    ready_at: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, line: dict[str, Any]) -> None:
        with self.lock:
            self.wall_off_s = line["wall"] - time.time()
            match line:
                case {"ready": _}:
                    self.ready_at = line["at"]
                case {"session": session, "resumed": ids}:
                    self._resumed(session, ids)
                case {"session": session, "base": base, "ids": ids}:
                    self._told(session, base, ids)
                    self.owner = line["owner"]
                    self.times.append(line["at"])
                case {"session": session, "finished": length}:
                    self._finished(session, length)
                case {"session": session, "refused": why} | {"session": session, "failed": why}:
                    self.failures.append(why)

    def _whole(self, session: int) -> tuple[int, ...]:
        return undisturbed(self.device, number_of(session), self.max_tokens)

    def _resumed(self, session: int, ids: list[int]) -> None:
        told = self.at.get(session, 0)
        if tuple(ids) != self._whole(session)[: len(ids)]:
            self.wrong.append(f"{session:x}: the journal's text is not the target's")
        if len(ids) < told:
            self.wrong.append(f"{session:x}: the journal has {len(ids)} tokens, the application had {told}")
        self.at[session] = len(ids)

    def _told(self, session: int, base: int, ids: list[int]) -> None:
        at = self.at.get(session, 0)
        if base != at:
            self.wrong.append(f"{session:x}: {'lost' if base > at else 'doubled'} at {at}: goes on at {base}")
        if tuple(ids) != self._whole(session)[base : base + len(ids)]:
            self.wrong.append(f"{session:x}: the text differs within {base}..{base + len(ids)}")
        self.at[session] = base + len(ids)

    def _finished(self, session: int, length: int) -> None:
        whole = len(self._whole(session))
        if not length == self.at.pop(session, 0) == whole:
            self.wrong.append(f"{session:x}: ended after {length} of {whole} tokens")
        self.finished += 1

    def next_after(self, moment: float) -> float | None:
        """When the first token after `moment` came."""
        with self.lock:
            i = bisect_right(self.times, moment)
            return self.times[i] if i < len(self.times) else None

    def silent_s(self, since: float, until: float) -> float:
        """The longest time without a token that begins or ends between the two."""
        with self.lock:
            inside = [t for t in self.times if since < t <= until]
            before = self.times[max(0, bisect_right(self.times, since) - 1)] if self.times else since
        return max(b - a for a, b in zip([max(before, since - 1.0), *inside], [*inside, until], strict=True))

    def forget_before(self, moment: float) -> None:
        """Keep memory flat."""
        with self.lock:
            del self.times[: bisect_right(self.times, moment)]
