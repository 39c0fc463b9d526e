"""A target and a drafter that compute nothing: a recorded trace says what the one writes and the other proposes.

Each text is a `Script`; a session names its script by the seed of its sampling.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cloud.engines.base import Outcome, Plan, TargetInfo
from edge.drafters.base import Candidate, DrafterInfo
from protocol.errors import ConfigError
from protocol.sampling import Sampling
from tools.traces import Trace

VOCAB = 1 << 20
CONTEXT = 1 << 20
WRONG = VOCAB - 1  # an id that no target writes
FILLER = 1  # what prompts are made of
TOKENIZER = "1" * 64
TARGET = TargetInfo("twin-000000000000", "twin", "0" * 64, TOKENIZER, VOCAB, CONTEXT, "exact-twin")


@dataclass(frozen=True)
class Script:
    """One text of a trace behind `prompt_ids`, or where there are none behind `prompt_len` ids that all are FILLER."""

    trace: Trace
    prompt_len: int = 20
    prompt_ids: tuple[int, ...] = ()

    @classmethod
    def recorded(cls, trace: Trace) -> Script:
        """Behind the trace's own prompt. Raises ConfigError where its ids were not recorded."""
        if not trace.prompt_ids:
            raise ConfigError(
                "the ids of the prompt are not in this trace", where=trace.prompt[:40], remedy="record it again"
            )
        return cls(trace, len(trace.prompt_ids), trace.prompt_ids)

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.prompt_ids or (FILLER,) * self.prompt_len

    def id_at(self, position: int) -> int | None:
        """What the target writes there; None in the prompt and behind the text's end."""
        at = position - self.prompt_len
        return self.trace.target[at] if 0 <= at < len(self.trace.target) else None

    @cached_property
    def proposals(self) -> list[list[Candidate]]:
        """[n][k] the drafter's candidates at each position of the text, best first."""
        return [
            [Candidate(id, p) for id, p in zip(ids, probabilities, strict=True)]
            for ids, probabilities in zip(self.trace.draft_ids, self.trace.draft_p, strict=True)
        ]


class ReplayRow:
    """astray: 0 on the target's own text, else a number that names the path that has left it."""

    __slots__ = ("astray", "position")

    def __init__(self, position: int, astray: int) -> None:
        self.position, self.astray = position, astray


class ReplayDrafter:
    """Proposes what the trace's drafter proposed, as far as the text is the target's.

    Off the target's text the candidates are those of a position that only the path and `seed` decide.
    """

    def __init__(self, script: Script, seed: int = 0) -> None:
        self.script, self._seed = script, seed
        self.info = DrafterInfo("twin", VOCAB, CONTEXT, TOKENIZER, "2" * 64, "replay", "none")

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> ReplayRow:
        return ReplayRow(len(ids) - 1, 0)

    def extend(self, rows: Sequence[tuple[int, ReplayRow | int]]) -> list[ReplayRow]:
        made: list[ReplayRow] = []
        for id, parent in rows:
            before = made[parent] if isinstance(parent, int) else parent
            position, astray = before.position + 1, before.astray
            if astray or id != self.script.id_at(position):
                astray = zlib.crc32(id.to_bytes(4, "little"), astray or self._seed + position) or 1
            made.append(ReplayRow(position, astray))
        return made

    def keep(self, path: Sequence[ReplayRow]) -> None:
        pass

    def candidates(self, row: ReplayRow, sampling: Sampling, n: int) -> list[Candidate]:
        proposals = self.script.proposals
        at = row.position + 1 - self.script.prompt_len
        if row.astray or at >= len(proposals):
            at = row.astray % len(proposals)
        return proposals[at][:n]

    def room(self) -> int:
        return CONTEXT


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: `step_s` up to `knee` rows that draw tokens and `row_s` for each beyond; a prefill row costs
    `prefill_row_s`.
    """

    step_s: float = 0.06
    knee: float = float("inf")
    row_s: float = 0.0
    prefill_row_s: float = 0.0

    def of(self, rows: int, prefill_rows: int) -> float:
        decode = self.step_s + max(0.0, rows - self.knee) * self.row_s if rows else 0.0
        return decode + prefill_rows * self.prefill_row_s


class ReplayEngine:
    """Writes each session's script; certifying drafts is comparing with it. Its memory has no end."""

    takes_trees = True
    num_blocks = 1

    def __init__(self, scripts: Sequence[Script], time: StepTime) -> None:
        self.info, self.scripts, self.time = TARGET, scripts, time
        self._script: dict[int, Script] = {}
        self._length: dict[int, int] = {}
        self._read: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        return self.num_blocks

    @property
    def retained_blocks(self) -> int:
        return 0

    def blocks(self, key: int, length: int = 0) -> int:
        return 0

    def open(self, key: int, ids: Sequence[int], sampling: Sampling, length: int, tenant: str = "") -> None:
        self._script[key], self._length[key], self._read[key] = self.scripts[sampling.seed], len(ids), 0

    def pending(self, key: int) -> int:
        return self._length[key] - self._read[key]

    def step(self, plan: Plan) -> Outcome:
        outcome = Outcome()
        rows = prefill_rows = 0
        for work in plan.work:
            key = work.key
            self._read[key] += work.rows
            outcome.ran[key] = work.rows + len(work.draft)
            if self._read[key] < self._length[key]:
                prefill_rows += work.rows
                continue
            rows += 1 + len(work.draft)
            prefill_rows += work.rows - 1
            outcome.accepted[key] = accepted = self._walk(key, work.draft, work.parents)
            self._length[key] += len(accepted)
            self._read[key] = self._length[key] - 1
        outcome.seconds = self.time.of(rows, prefill_rows)
        return outcome

    def evict(self, key: int) -> None:
        self._read[key] = 0

    def close(self, key: int) -> None:
        del self._script[key], self._length[key], self._read[key]

    def _walk(self, key: int, draft: Sequence[int], parents: Sequence[int]) -> list[int]:
        script, position = self._script[key], self._length[key]
        children: dict[tuple[int, int], int] = {
            (p, id): i for i, (p, id) in enumerate(zip(parents, draft, strict=True))
        }
        accepted: list[int] = []
        at: int | None = -1
        while at is not None:
            id = script.id_at(position)
            accepted.append(FILLER if id is None else id)
            position += 1
            at = children.get((at, accepted[-1]))
        return accepted
