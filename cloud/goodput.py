"""A guard: drafts must never lower the tokens that a verifier commits a second, whatever the forecasts say."""

from __future__ import annotations

FADE = 0.94  # of what a step showed, a step: some sixteen count
LOST, FINE = 0.99, 1.0  # of what plain steps would have committed
SHRINK, RECOVER = 0.7, 0.02
ENOUGH = 8  # steps with drafts, before they are judged
LEAST_SHARE = 0.05  # so that there is always something to judge it by


class Goodput:
    """Compares what steps with drafts committed a second with what the same steps would have without.

    share: of the draft rows that the scheduler would take, those that it may. It shrinks at once while speculation
    loses and recovers slowly once it does not.
    """

    def __init__(self) -> None:
        self.share = 1.0
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
            self.share = max(LEAST_SHARE, self.share * SHRINK)

    def step(self) -> None:
        """A step is over, with drafts or without."""
        if self.gain >= FINE:
            self.share = min(1.0, self.share + RECOVER)
