"""A guard: drafts must never lower the tokens that a verifier commits a second, whatever the forecasts say."""

from __future__ import annotations

FADE = 0.94  # of what a step showed, a step: some sixteen count
LOST, FINE = 0.99, 1.0  # of what plain steps would have committed
ENOUGH = 8  # steps with drafts, before they are judged
SHRINK, RECOVER = 0.7, 0.02
LEAST_SHARE = 0.05  # below, there is a pause, and then this much to judge by
PAUSE, MOST_PAUSE = 32, 1024  # steps; doubled each time that drafts lose again


class Goodput:
    """Compares what steps with drafts committed a second with what the same steps would have without.

    share: of the draft rows that the scheduler would take, those that it may. It shrinks at once while speculation
    loses, down to nothing for a while, and recovers slowly once it does not.
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._pause, self._left = PAUSE, 0
        self._seen = 0
        self._tokens = self._seconds = self._plain_tokens = self._plain_seconds = 0.0

    @property
    def gain(self) -> float:
        """Tokens a second over those of plain steps; 1 before the first step with drafts."""
        if not (self._plain_tokens and self._seconds):
            return 1.0
        return self._tokens / self._seconds * self._plain_seconds / self._plain_tokens

    def learn(self, tokens: int, seconds: float, plain_tokens: int, plain_seconds: float) -> None:
        """A step with drafts committed `tokens`; without them it would have been `plain_tokens` in `plain_seconds`."""
        self._tokens = FADE * self._tokens + tokens
        self._seconds = FADE * self._seconds + seconds
        self._plain_tokens = FADE * self._plain_tokens + plain_tokens
        self._plain_seconds = FADE * self._plain_seconds + plain_seconds
        self._seen += 1
        if self._seen >= ENOUGH and self.gain < LOST:
            self.share *= SHRINK
            if self.share < LEAST_SHARE:
                self.share, self._left = 0.0, self._pause
                self._pause = min(2 * self._pause, MOST_PAUSE)

    def step(self) -> None:
        """A step is over, with drafts or without."""
        if not self.share:
            self._left -= 1
            if self._left <= 0:
                self.share = LEAST_SHARE
                self._forget()
        elif self.gain >= FINE:
            self.share = min(1.0, self.share + RECOVER)
            if self.share == 1.0:
                self._pause = PAUSE

    def _forget(self) -> None:
        self._seen = 0
        self._tokens = self._seconds = self._plain_tokens = self._plain_seconds = 0.0
