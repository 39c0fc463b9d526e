"""A target and a drafter small enough to see through: logits are a hash of the last two tokens."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from cloud.engines.base import Outcome, Plan, TargetInfo
from edge.drafters.base import Candidate, DrafterInfo
from protocol.errors import ModelError, SamplingError
from protocol.sampling import Sampling, choose, rank

VOCAB = 64
TARGET = "toy-000000000000"
STOP = 0
BLOCK = 8


def toy_logits(text: Sequence[int]) -> np.ndarray:
    """[VOCAB] float32, a function of the text's last two tokens."""
    seed = zlib.crc32(bytes(t & 0xFF for t in text[-2:]))
    logits = np.random.Generator(np.random.PCG64(seed)).normal(0, 2.5, VOCAB).astype(np.float32)
    logits[STOP] -= 4.0
    return logits


def plain_decode(prompt: Sequence[int], sampling: Sampling, max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """The reference: one token a step, no ledger, no window."""
    text = list(prompt)
    for _ in range(max_tokens):
        text.append(choose(toy_logits(text), len(text), sampling))
        if text[-1] in stop_ids:
            break
    return text[len(prompt) :]


class ToyEngine:
    """An engine of one hash; step_s is what a step pretends to take."""

    takes_trees = True

    def __init__(self, *, step_s: float = 0.06, context: int = 512, num_blocks: int = 1 << 20) -> None:
        self.num_blocks = num_blocks
        self.info = TargetInfo(TARGET, "toy", "0" * 64, "1" * 64, VOCAB, context, "exact-toy")
        self.step_s = step_s
        self.sessions: dict[int, tuple[list[int], Sampling, int]] = {}
        self.read: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(map(self.blocks, self.sessions))

    @property
    def retained_blocks(self) -> int:
        return 0

    def blocks(self, key: int, length: int = 0) -> int:
        """A block is BLOCK tokens."""
        return -(-(length or self.read[key]) // BLOCK)

    def open(self, key: int, ids: Sequence[int], sampling: Sampling, length: int, tenant: str = "") -> None:
        self.sessions[key] = (list(ids), sampling, length)
        self.read[key] = 0

    def pending(self, key: int) -> int:
        return len(self.sessions[key][0]) - self.read[key]

    def step(self, plan: Plan) -> Outcome:
        outcome = Outcome(seconds=self.step_s)
        for work in plan.work:
            text, sampling, _ = self.sessions[work.key]
            assert 1 <= work.rows <= self.pending(work.key)
            outcome.ran[work.key] = work.rows + len(work.draft)
            self.read[work.key] += work.rows
            if self.pending(work.key):
                assert not work.draft
                continue
            accepted: list[int] = []
            at = -1
            while True:
                try:
                    token = choose(toy_logits(text), len(text), sampling)
                except SamplingError as error:
                    outcome.failed[work.key] = str(error)
                    break
                text.append(token)
                accepted.append(token)
                match = [
                    i for i, (d, p) in enumerate(zip(work.draft, work.parents, strict=True)) if p == at and d == token
                ]
                if not match:
                    break
                at = match[0]
                self.read[work.key] += 1
            assert self.free_blocks >= 0, "the step takes more blocks than there are"
            if work.key not in outcome.failed:
                outcome.accepted[work.key] = accepted
        return outcome

    def evict(self, key: int) -> None:
        self.read[key] = 0

    def close(self, key: int) -> None:
        del self.sessions[key], self.read[key]


class ToyRow:
    def __init__(self, text: list[int]) -> None:
        self.text = text
        self.position = len(text) - 1


class ToyDrafter:
    """Guesses like the target, but for positions where `spoil` says so. Checks that it is used as a drafter may be."""

    def __init__(self, spoil: Callable[[int], bool] = lambda position: False, *, context: int = 512) -> None:
        self.info = DrafterInfo("toy", VOCAB, context, "1" * 64, "2" * 64, "exact", "none")
        self.spoil, self.context = spoil, context
        self.text: list[int] = []
        self.rows: list[ToyRow] = []

    def prefill(self, ids: Sequence[int], progress: object = None) -> ToyRow:
        if len(ids) > self.context:
            raise ModelError("over the context")
        self.text = list(ids)
        self.rows = []
        return ToyRow(self.text[:])

    def extend(self, rows: Sequence[tuple[int, object]]) -> list[ToyRow]:
        made: list[ToyRow] = []
        for id, parent in rows:
            row = made[parent] if isinstance(parent, int) else parent
            assert isinstance(row, ToyRow)
            assert row.text == self.text or row in self.rows or row in made, "the parent row was forgotten"
            made.append(ToyRow([*row.text, id]))
        self.rows += made
        return made

    def keep(self, path: Sequence[ToyRow]) -> None:
        for row in path:
            assert row in self.rows and row.text[:-1] == self.text
            self.text = row.text
        if path:
            self.rows = [r for r in self.rows if len(r.text) > len(self.text) and r.text[: len(self.text)] == self.text]

    def candidates(self, row: ToyRow, sampling: Sampling, n: int) -> list[Candidate]:
        logits = toy_logits(row.text)
        if self.spoil(row.position + 1):
            logits = np.roll(logits, 7)
        ids, p = rank(logits, row.position + 1, sampling, n)
        return [Candidate(int(i), float(q)) for i, q in zip(ids, p, strict=True)]

    def room(self) -> int:
        return self.context - len(self.text) - len(self.rows)
