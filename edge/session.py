"""What a session is asked for, its timers, what it says, and what it remembers and counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from protocol.messages import AnyMessage
from protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """What an application asks for. session: random, 64 bits; prompt: ids, at least one; patience_s: 0 never waits."""

    session: int
    target: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. open_s: until an unanswered open is repeated with the next epoch; repair_s: until a silent owner is
    asked; silence_s: until it is left; acknowledge_s: until new text is acknowledged where no draft does it;
    unserved_s: until an open that found no verifier is repeated; retry_most_s: the longest back-off after refusals;
    refused_s: a verifier that says to come back later than that is not waited for, the application is told;
    draft_expiry_s: how long the link may hold a draft that it cannot send yet.
    """

    open_s: float = 4.0
    repair_s: float = 1.0
    silence_s: float = 6.0
    acknowledge_s: float = 0.5
    draft_expiry_s: int = 2
    unserved_s: float = 2.0
    retry_most_s: float = 15.0
    refused_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Send:
    """A message to publish."""

    topic: str
    message: AnyMessage
    qos: int = 0
    expiry_s: int | None = None


@dataclass(slots=True)
class Guess:
    """What the board remembers of a node. path: the product of the drafter's probabilities from the root's child on;
    row, candidates: set once the drafter has evaluated the node; depth: how far behind the text of then the guesses
    behind the node were made; main: it and all before it are first candidates; seq: the draft that carried the node,
    or None; unread: its candidates are known without the drafter's model, which could say more.
    """

    path: float = 1.0
    row: object = None
    candidates: list | None = None
    depth: int = 1
    main: bool = True
    seq: int | None = None
    unread: bool = False


@dataclass(slots=True)
class Tally:
    """What a session did: messages by kind, and tokens.

    guessed: committed tokens that the board had guessed; used: those of them whose guess had been sent; missed: those
    where all its guesses were wrong. What is in neither came before there was a guess.
    """

    commits: int = 0
    committed: int = 0
    guessed: int = 0
    used: int = 0
    missed: int = 0
    drafts: int = 0
    drafted: int = 0
    opens: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
