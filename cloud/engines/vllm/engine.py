"""`cloud.engines.base.Engine` over vLLM's engine core, in this process and without its front end.

A session is a vLLM request that never stops by itself. PagedAttention, the block pool and the prefix cache are vLLM's;
which requests run, with how many rows and what drafts is the plan's (`scheduler.py`); what they draw is ours too
(`sampler.py`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.request import Request, RequestStatus

from cloud.engines.base import Outcome, Plan, TargetInfo, Work
from cloud.engines.vllm.sampler import KEY, CoupledSampler
from cloud.engines.vllm.scheduler import Part, PlannedScheduler, pending
from cloud.engines.work import fault_of
from protocol.errors import ModelError
from protocol.sampling import Sampling

NEVER = 1 << 30  # tokens that no text comes to
UNDRAWABLE = "no token can be drawn: the logits hold NaN or infinity, or nothing above minus infinity"


class VllmEngine:
    """core: a `vllm.v1.engine.core.EngineCore` whose scheduler is ours; max_draft: draft rows of a session in a step.

    Used by one thread at a time. num_blocks, free_blocks: of vLLM's block pool.
    """

    takes_trees = False

    def __init__(self, core: Any, info: TargetInfo, *, max_draft: int) -> None:
        self.info, self.max_draft = info, max_draft
        self._core = core
        self._scheduler: PlannedScheduler = core.scheduler
        self._kv = core.scheduler.kv_cache_manager
        self._block_sizes = [group.kv_cache_spec.block_size for group in core.scheduler.kv_cache_config.kv_cache_groups]
        self.num_blocks: int = self._kv.block_pool.num_gpu_blocks - 1  # one is vLLM's own
        self._runner = core.model_executor.driver_worker.worker.model_runner
        self.sampler = CoupledSampler(self._runner, info.vocab_size)
        self._sessions: dict[int, Request] = {}
        self._ran: dict[int, int] = {}  # key -> number of the step that it last ran in
        self._steps = 0

    @property
    def free_blocks(self) -> int:
        return self._kv.block_pool.get_num_free_blocks()

    @property
    def retained_blocks(self) -> int:
        return sum(block.block_hash is not None and block.ref_cnt == 0 for block in self._kv.block_pool.blocks)

    def blocks(self, key: int, length: int = 0) -> int:
        own, shared = self._split(self._sessions[key])
        return max(len(own), self._blocks_for(length) - shared) if length else len(own)

    def _split(self, request: Request) -> tuple[list[int], int]:
        """(ids of the blocks that the request holds alone, number of those that others hold too).

        Blocks are shared only by texts that begin alike, so what is shared comes first.
        """
        if request.status != RequestStatus.RUNNING:
            found = self._kv.get_computed_blocks(request)[0].blocks
            return [], sum(bisect_left(group, True, key=lambda block: block.ref_cnt == 0) for group in found)
        own: list[int] = []
        shared = 0
        for group in self._kv.get_blocks(request.request_id).blocks:
            first = bisect_left(group, True, key=lambda block: block.ref_cnt == 1)
            own += [block.block_id for block in group[first:]]
            shared += first
        return own, shared

    def _blocks_for(self, length: int) -> int:
        return sum(-(-(length + self.max_draft) // size) for size in self._block_sizes)

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
        if self._blocks_for(length) > self.num_blocks:
            raise ModelError(
                f"{length} tokens need {self._blocks_for(length)} blocks of the KV cache's {self.num_blocks}",
                where=where,
                remedy="Raise kv_gib",
            )
        request = Request(
            str(key),
            list(ids),
            SamplingParams(
                temperature=0.0,
                max_tokens=NEVER,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args={KEY: sampling},
            ),
            None,
            cache_salt=tenant or None,  # in the hash of a text's first block, and so of all of them
            block_hasher=self._core.request_block_hasher,
        )
        self._core.add_request(request)
        self._sessions[key], self._ran[key] = request, self._steps

    def pending(self, key: int) -> int:
        request = self._sessions[key]
        if request.status == RequestStatus.RUNNING:
            return pending(request)
        return request.num_tokens - self._kv.get_computed_blocks(request)[1]

    def evict(self, key: int) -> None:
        self._scheduler.preempt(self._sessions[key])

    def close(self, key: int) -> None:
        request = self._sessions.pop(key)
        del self._ran[key]
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def step(self, plan: Plan) -> Outcome:
        started = time.perf_counter()
        outcome = Outcome()
        parts = self._admit(plan, outcome)
        if parts:
            self._steps += 1
            self._make_room(list(parts), outcome)
            self._scheduler.set_plan(list(parts.values()))
            outputs, _ = self._core.step()
            for output in outputs[0].outputs if outputs else ():
                outcome.accepted[int(output.request_id)] = output.new_token_ids
            self._settle(parts, outcome)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _settle(self, parts: dict[int, Part], outcome: Outcome) -> None:
        last = self._scheduler.last
        outcome.ran = {int(name): rows for name, rows in last.num_scheduled_tokens.items()}
        outcome.evicted += [int(name) for name in self._scheduler.preempted]
        for key, part in parts.items():
            if part.request.request_id not in last.num_scheduled_tokens:
                continue
            self._ran[key] = self._steps
            if key not in outcome.accepted and pending(part.request) <= 0:
                outcome.failed[key] = UNDRAWABLE
                self._clear(part.request)

    def _clear(self, request: Request) -> None:
        """Evict a request and wipe what it leaves: a NaN among the masked keys still spoils a row."""
        blocks, _ = self._split(request)
        self._kv.evict_blocks(set(blocks))
        self._runner._zero_block_ids(blocks)
        self._scheduler.preempt(request)

    def _make_room(self, planned: Sequence[int], outcome: Outcome) -> None:
        """Give up the blocks of sessions outside the plan, the longest idle first, where the plan's do not suffice."""
        lengths = {key: self._sessions[key].num_tokens for key in planned}
        wanted = sum(self.blocks(key, length) - self.blocks(key) for key, length in lengths.items())
        for key in sorted(self._ran.keys() - lengths.keys(), key=self._ran.__getitem__):
            if wanted <= self.free_blocks:
                break
            if self._sessions[key].status == RequestStatus.RUNNING:
                self.evict(key)
                outcome.evicted.append(key)

    def _admit(self, plan: Plan, outcome: Outcome) -> dict[int, Part]:
        """Parts by key; work that cannot be done is reported as failed and leaves the rest alone."""
        parts: dict[int, Part] = {}
        for work in plan.work:
            fault = f"session {work.key} is twice in one step" if work.key in parts else self._fault(work)
            if fault:
                outcome.failed[work.key] = fault
            else:
                parts[work.key] = Part(self._sessions[work.key], work.rows, first_path(work))
        return parts

    def _fault(self, work: Work) -> str:
        """Why `work` cannot be done, or ""."""
        request = self._sessions.get(work.key)
        if request is None:
            return f"session {work.key} is not open"
        if request.num_tokens >= self.info.context:
            return f"its text fills the context of {self.info.context}"
        left = self.pending(work.key)
        return fault_of(work, left, max_draft=self.max_draft, vocab_size=self.info.vocab_size)


def first_path(work: Work) -> list[int]:
    """The path of a draft that takes the first child everywhere: all of a chain."""
    path, at = [], -1
    for i, (id, parent) in enumerate(zip(work.draft, work.parents, strict=True)):
        if parent == at:
            path.append(id)
            at = i
    return path
