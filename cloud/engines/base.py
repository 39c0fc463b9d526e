"""What the verifier needs of an engine: sessions with a KV cache, and steps that certify drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from protocol.sampling import Sampling


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What decides the text. id: short name of all the rest, as used in topics; digests: hex SHA-256.

    vocab_size: ids that the tokenizer has; context: tokens; numerics: the numerics id, e.g.
    "exact-float32-r16-k256-avx512-torch2.13.0", or "fast-float32".
    """

    id: str
    model: str
    weights_digest: str
    tokenizer_digest: str
    vocab_size: int
    context: int
    numerics: str


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a step.

    rows: how many of the text's not yet evaluated ids to run (a prefill chunk, or 1 for the root row: the last id).
    draft: guesses behind the root row; parents[i] is the index of draft[i]'s parent in draft, or -1 for the root row.
    A draft is allowed only where `rows` reaches the end of the text.
    """

    key: int
    rows: int
    draft: Sequence[int] = ()
    parents: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A step as the scheduler wants it; an engine that composes its own steps may do part of it and say so."""

    work: Sequence[Work]


@dataclass(slots=True)
class Outcome:
    """What a step did.

    accepted: for each session whose root row ran, the ids now appended to its text: the accepted draft ids and the
    one that the target drew after them, so never empty.
    evicted: sessions whose KV the engine had to give up by itself; see `Engine.evict`.
    failed: sessions that could not be evaluated, with the reason; their state is unchanged.
    ran: rows evaluated, by session; one whose work is left for another step is in none of these.
    seconds: engine time of the step.
    """

    accepted: dict[int, list[int]] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        return sum(self.ran.values())


class Engine(Protocol):
    """One target model and the KV caches of the sessions that are open in it. Used by one thread at a time.

    num_blocks: the KV budget, in blocks of some tokens of one session.
    """

    info: TargetInfo
    takes_trees: bool
    num_blocks: int

    @property
    def free_blocks(self) -> int:
        """Blocks that no open session holds: empty, or of texts that may be forgotten."""

    @property
    def retained_blocks(self) -> int:
        """Of the free ones, those of texts that may be forgotten; 0 where the engine cannot tell."""

    def blocks(self, key: int, length: int = 0) -> int:
        """The blocks that the session holds alone, which evicting it gives; with `length`, those that it would hold
        alone once a text of `length` tokens is evaluated with a whole draft behind it. What others share with it
        changes both alike, so their difference is what it still takes.
        """

    def open(self, key: int, ids: Sequence[int], sampling: Sampling, length: int, tenant: str = "") -> None:
        """Add a session whose text is `ids` and may grow to `length` tokens (drafts not counted).

        Of what the engine still holds of another text of this tenant that begins alike, nothing is evaluated again
        (see `pending`), and its blocks are the session's from now on; it takes others as it steps. `key` is unique
        among open sessions.
        Raises ModelError when the session does not fit even alone.
        """

    def pending(self, key: int) -> int:
        """Ids of the session's text that are not yet evaluated; 1 when only the root row is left."""

    def step(self, plan: Plan) -> Outcome:
        """Run one forward pass for all of `plan`, draw a token behind each root row and accepted draft row, and walk
        the drafts by equality: a draft id is accepted when it is the id drawn at its position behind accepted rows.

        The caller sees to it that the blocks of all its sessions suffice; where they do not, some are evicted. Work
        whose rows another session of the step evaluates too may be left for the next one.
        """

    def evict(self, key: int) -> None:
        """Take a session's blocks away; its text stays and counts as not yet evaluated."""

    def close(self, key: int) -> None:
        """Forget the session. Its KV may be held until the blocks are needed, for a text that goes on from it."""
