"""A board that is hot or throttled drafts less: its drafter rests between passes, and the log and the fleet are told.

Rest is what cools: guessing fewer tokens ahead would leave a slow board as busy as before, only with other guesses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from edge.config import BoardConfig
from edge.health import NOW, SHARE_STEP, Facts, complaint, drafting_share, look

log = logging.getLogger(__name__)

LOOK_S = 10.0
NEWS_LOOKS = 5  # sooner than the link would send the state of before again
CALM_LOOKS = 3  # in a row that must be better before drafting goes up by a step, so that it does not flutter


class Watch:
    """Looks at the board now and then, in a thread of its own.

    facts: of the latest look; share: of its time that the board may draft now. It falls at once and rises a step at a
    time, after CALM_LOOKS that were better. on_news: called after a look at which share, throttling or power mode were
    others than before, and every NEWS_LOOKS for what changes all the time.
    """

    def __init__(
        self, board: BoardConfig, *, on_news: Callable[[], None] = lambda: None, root: Path = Path("/")
    ) -> None:
        self._board, self._on_news, self._root = board, on_news, root
        self._calm = self._quiet = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self.facts = look(board, root)
        self.share = drafting_share(self.facts)
        if self.share < 1:
            self._say()

    def start(self) -> Watch:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """One look, and what follows from it."""
        before, former = self.facts, self.share
        self.facts = look(self._board, self._root)
        wanted = drafting_share(self.facts)
        self._calm = self._calm + 1 if wanted > self.share else 0
        if wanted < self.share:
            self.share = wanted
        elif self._calm >= CALM_LOOKS:
            self.share, self._calm = self.share + SHARE_STEP, 0
        if self.share != former:
            self._say()
        self._quiet += 1
        if (self.share, _state(self.facts)) != (former, _state(before)) or self._quiet >= NEWS_LOOKS:
            self._quiet = 0
            self._on_news()

    def _say(self) -> None:
        if self.share == 1:
            log.info("the board has cooled: it drafts all the time again")
        else:
            log.warning("drafting %.0f %% of the time: %s", 100 * self.share, complaint(self.facts) or "cooling down")

    def _run(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self.look()


def _state(facts: Facts) -> tuple[int, str]:
    return int(facts.throttle & NOW), facts.power_mode
