"""The torch engine: any transformers causal LM that calls the attention interface, for many sessions at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

from cloud.engines.base import Outcome, Plan, TargetInfo, Work
from cloud.engines.cache import Held, KvCache
from cloud.engines.memory import kv_budget
from cloud.engines.model import Forward, load_model
from cloud.engines.numerics import Numerics, check_bits, check_pins, numerics_id
from cloud.engines.ragged import Span
from cloud.engines.target import read_manifest, target_id
from cloud.engines.walk import walk
from cloud.engines.work import fault_of
from cloud.sampling import choose_rows
from protocol.errors import ModelError, SamplingError
from protocol.sampling import SPEC_VERSION, Sampling

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """A text that may grow to `length` tokens, and what of it is held. faulty: a pass for it has failed."""

    ids: list[int]
    sampling: Sampling
    length: int
    held: Held
    faulty: bool = False

    @property
    def evaluated(self) -> int:
        return self.held.evaluated

    @property
    def pending(self) -> int:
        return len(self.ids) - self.evaluated


@dataclass(frozen=True, slots=True)
class Part:
    """One session's part of a pass. logits: where its rows' logits start, of the root row and each draft row."""

    work: Work
    session: Session
    span: Span
    is_root: bool
    logits: int

    @property
    def num_logits(self) -> int:
        return 1 + len(self.work.draft) if self.is_root else 0


class TorchEngine:
    """`cloud.engines.base.Engine` over one `Forward`. Used by one thread at a time.

    kv_bytes: budget of all sessions' keys and values; max_draft: draft rows of a session in a step.
    """

    takes_trees = True

    def __init__(self, forward: Forward, info: TargetInfo, *, kv_bytes: int, max_draft: int) -> None:
        self.info = info
        self.max_draft = max_draft
        self._forward = forward
        shape = forward.kv_shape
        self.num_blocks = kv_bytes // (shape.row_bytes * shape.block)
        self._cache = KvCache(shape, self.num_blocks, lambda: forward.new_slab(info.context, max_draft))
        self._sessions: dict[int, Session] = {}

    @property
    def free_blocks(self) -> int:
        return self._cache.free_blocks

    @property
    def retained_blocks(self) -> int:
        return self._cache.retained_blocks

    def blocks(self, key: int, length: int = 0) -> int:
        held = self._sessions[key].held
        return self._cache.blocks_up_to(held, self._slots(length)) if length else self._cache.blocks(held)

    def _slots(self, length: int) -> int:
        """That a text of `length` tokens and a whole draft behind it may write."""
        return length + self._forward.draft_slots(self.max_draft)

    def open(self, key: int, ids: Sequence[int], sampling: Sampling, length: int, tenant: str = "") -> None:
        where = f"session {key}"
        if key in self._sessions:
            raise ModelError("is open already", where=where)
        if not ids or length < len(ids):
            raise ModelError(f"a text of {len(ids)} ids does not fit into {length}", where=where)
        if min(ids) < 0 or max(ids) >= self.info.vocab_size:
            raise ModelError(f"an id is not in 0..{self.info.vocab_size - 1}", where=where)
        if length > self.info.context:
            raise ModelError(
                f"{length} tokens do not fit into the context of {self.info.context}",
                where=where,
                remedy="Shorten the prompt or ask for fewer tokens",
            )
        blocks = -(-self._slots(length) // self._cache.block)
        if blocks > self.num_blocks:
            raise ModelError(
                f"{length} tokens need {blocks} blocks of the KV cache's {self.num_blocks}",
                where=where,
                remedy="Raise kv_gib",
            )
        self._sessions[key] = Session(list(ids), sampling, length, self._cache.open(tenant, ids))

    def pending(self, key: int) -> int:
        return self._sessions[key].pending

    def close(self, key: int) -> None:
        session = self._sessions.pop(key)
        self._cache.close(session.held, session.ids[: session.evaluated])

    def evict(self, key: int) -> None:
        self._cache.evict(self._sessions[key].held)

    def step(self, plan: Plan) -> Outcome:
        started = time.perf_counter()
        outcome = Outcome()
        parts = self._admit(plan, outcome)
        if parts:
            ids = [id for part in parts for id in self._ids(part)]
            kept = [row for part in parts for row in self._logit_rows(part)]
            logits = self._forward([part.span for part in parts], ids, kept)  # [kept rows, vocab]
            drawn = self._draw(parts, logits[:, : self.info.vocab_size], outcome)
            for part in parts:
                if part.work.key not in outcome.failed:
                    self._commit(part, drawn.get(part.work.key), outcome)
                    outcome.ran[part.work.key] = part.span.rows
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _admit(self, plan: Plan, outcome: Outcome) -> list[Part]:
        """The parts of the pass; work that cannot be done is reported as failed and leaves the rest alone."""
        parts: dict[int, Part] = {}
        planned = {work.key for work in plan.work}
        start = logits = 0
        for work in plan.work:
            fault = f"session {work.key} is twice in one step" if work.key in parts else self._fault(work)
            if fault:
                outcome.failed[work.key] = fault
                continue
            session = self._sessions[work.key]
            if session.pending > 1:
                work = replace(work, rows=work.rows - self._cache.advance(session.held, len(session.ids)))
                if work.rows <= 0 or self._waits(session, parts.values()):
                    continue
            span = Span(session.held.slab, start, session.evaluated, work.rows, tuple(work.parents))
            if not self._reserve(session, work.key, self._forward.end_slot(span), planned, outcome):
                continue
            part = Part(work, session, span, work.rows == session.pending, logits)
            parts[work.key] = part
            start, logits = start + span.rows, logits + part.num_logits
        return list(parts.values())

    def _waits(self, session: Session, parts: Iterable[Part]) -> bool:
        """Whether another session of the tenant evaluates the same beginning in this step: this one will see it in the
        next. Prompts of a fleet that come all at once are read once.
        """
        held = session.held
        return any(
            self._cache.whole(held, part.session.held, min(part.span.past + part.span.chunk, len(session.ids) - 1))
            > held.evaluated
            for part in parts
            if part.session.held.tenant == held.tenant and not part.session.faulty
        )

    def _reserve(self, session: Session, key: int, slots: int, planned: set[int], outcome: Outcome) -> bool:
        """Take the blocks for slots up to `slots`. Where the caller has counted on more than there are, sessions lose
        theirs that are not in this step, and at last the session its own.
        """
        while not self._cache.reserve(session.held, slots):
            others = [one for other, one in self._sessions.items() if other not in planned and one.evaluated]
            if not others:
                self._give_up(key, outcome)
                return False
            idle = min(others, key=lambda one: one.held.used)
            self._give_up(next(other for other, one in self._sessions.items() if one is idle), outcome)
        return True

    def _give_up(self, key: int, outcome: Outcome) -> None:
        self.evict(key)
        outcome.evicted.append(key)

    def _fault(self, work: Work) -> str:
        """Why `work` cannot be done, or ""."""
        session = self._sessions.get(work.key)
        if session is None:
            return f"session {work.key} is not open"
        if len(session.ids) + len(work.draft) > session.length + self.max_draft:
            return f"{len(session.ids)} ids and {len(work.draft)} draft rows are too many for {session.length} tokens"
        return fault_of(work, session.pending, max_draft=self.max_draft, vocab_size=self.info.vocab_size)

    def _ids(self, part: Part) -> list[int]:
        session = part.session
        return [*session.ids[session.evaluated : session.evaluated + part.work.rows], *part.work.draft]

    def _logit_rows(self, part: Part) -> range:
        """Rows whose logits are wanted: the root row and the draft's."""
        end = part.span.start + part.span.rows
        return range(end - part.num_logits, end)

    def _draw(self, parts: list[Part], logits: torch.Tensor, outcome: Outcome) -> dict[int, list[int]]:
        """The id that the target draws behind each root and draft row, by session."""
        roots = [part for part in parts if part.is_root]
        try:
            return self._draw_together(roots, logits)
        except SamplingError:
            drawn: dict[int, list[int]] = {}
            for part in roots:
                try:
                    drawn |= self._draw_together([part], logits[part.logits : part.logits + part.num_logits])
                except SamplingError as error:
                    outcome.failed[part.work.key] = str(error)
                    part.session.held.slab.clear(part.session.evaluated)
                    part.session.faulty = True
            return drawn

    def _draw_together(self, parts: list[Part], logits: torch.Tensor) -> dict[int, list[int]]:
        """logits: [the parts' rows, vocab]. A row yields the token of the position after its own."""
        positions = [position + 1 for part in parts for position in part.span.positions()[-part.num_logits :]]
        samplings = [part.session.sampling for part in parts for _ in range(part.num_logits)]
        drawn = choose_rows(logits, positions, samplings)
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + part.num_logits)
        return {part.work.key: drawn[a:b] for part, (a, b) in zip(parts, pairwise(ends), strict=True)}

    def _commit(self, part: Part, drawn: list[int] | None, outcome: Outcome) -> None:
        session, work = part.session, part.work
        held = session.held
        held.evaluated += work.rows
        if drawn is None:
            return
        ids, path = walk(drawn, work.draft, work.parents)
        held.slab.move([self._forward.draft_slot(part.span, i) for i in path], held.evaluated)
        held.evaluated += len(path)
        session.ids += ids
        outcome.accepted[work.key] = ids


def load(
    model_dir: str | Path,
    numerics: Numerics | None = None,
    *,
    kv_bytes: int = 0,
    max_draft: int = 32,
    threads: int | None = None,
    verify_weights: bool = False,
) -> TorchEngine:
    """Load a target directory.

    kv_bytes: budget of all sessions' keys and values, 0 for what the machine has room for; max_draft: draft rows of a
    session in a step; threads: of torch, for the whole process; verify_weights: also compare the weights with the
    manifest's digest.
    Raises ModelError for a directory that cannot be used, NumericsError where the numerics cannot be honoured.
    """
    numerics = numerics or Numerics()
    directory = Path(model_dir)
    manifest = read_manifest(directory, verify_weights=verify_weights)
    dtype = numerics.dtype or manifest.dtype
    check_pins(numerics, dtype)
    if threads is not None:
        torch.set_num_threads(threads)
    forward = load_model(directory, dtype, numerics)
    if manifest.vocab_size > forward.num_logits:
        raise ModelError(
            f"the tokenizer has {manifest.vocab_size} ids but the model gives {forward.num_logits} logits",
            where=str(directory),
        )
    bits = forward.check(manifest.vocab_size)
    check_bits(numerics, bits)
    numerics_name = numerics_id(numerics, dtype, bits)
    info = TargetInfo(
        id=target_id(manifest.name, manifest.weights_digest, manifest.tokenizer_digest, SPEC_VERSION, numerics_name),
        model=manifest.name,
        weights_digest=manifest.weights_digest,
        tokenizer_digest=manifest.tokenizer_digest,
        vocab_size=manifest.vocab_size,
        context=manifest.context,
        numerics=numerics_name,
    )
    engine = TorchEngine(forward, info, kv_bytes=kv_budget(kv_bytes), max_draft=max_draft)
    tokens = engine.num_blocks * forward.kv_shape.block
    log.info("the KV cache holds %d tokens in %.2f GiB", tokens, tokens * forward.kv_shape.row_bytes / 2**30)
    return engine
