"""vLLM's scheduler, shown only what a plan names. Bound to the versions that `versions.py` lists.

vLLM composes a step from everything in `running` and `waiting`. Here both hold the requests of one plan, set anew
before each step; all others stay in `requests` with their blocks and are never looked at. So nothing has to be held
back, and nobody who is not in the plan can be read again, draw a token or keep the loop awake.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class NoDrafter:
    """The drafter of `speculative_config`, which vLLM needs in order to verify at all. Drafts come with the plan."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def propose(self, sampled_token_ids: Sequence[list[int]], *_arguments: Any, **_options: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


@dataclass(frozen=True, slots=True)
class Part:
    """One request's part of a step. rows: most of its pending ids to run; draft: a chain behind the last of them."""

    request: Request
    rows: int
    draft: list[int]


class PlannedScheduler(Scheduler):
    """last: what vLLM made of the latest plan; preempted: requests that lost their blocks since the plan was set."""

    last: SchedulerOutput
    num_spec_tokens: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.preempted: list[str] = []
        self._most: dict[str, int] = {}

    def set_plan(self, parts: Sequence[Part]) -> None:
        """What the next `schedule` may run, in this order; as many as `max_num_seqs`, the rest is left for later."""
        parts = parts[: self.max_num_running_reqs]
        self.preempted = []
        self._most = {part.request.request_id: part.rows + len(part.draft) for part in parts}
        self.running = [part.request for part in parts if part.request.status == RequestStatus.RUNNING]
        self.waiting = create_request_queue(self.policy)
        for part in parts:
            part.request.spec_token_ids = []
            if part.request.status != RequestStatus.RUNNING:
                self.waiting.add_request(part.request)
            elif part.rows == pending(part.request):
                part.request.spec_token_ids = part.draft

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away; its text stays. Nothing happens where it holds none."""
        if request.status == RequestStatus.RUNNING:
            self._preempt_request(request, time.monotonic())

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        # A request that comes back with one id pending would be padded with as many draft rows that nobody sent.
        num_spec_tokens, self.num_spec_tokens = self.num_spec_tokens, 0
        self.last = super().schedule(throttle_prefills)
        self.num_spec_tokens = num_spec_tokens
        return self.last

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        # vLLM asks this of every request that it is about to schedule, so that a chunk may be made shorter.
        return min(num_new_tokens, self._most[request.request_id])

    def _preempt_request(self, request: Request, *arguments: Any, **options: Any) -> None:
        super()._preempt_request(request, *arguments, **options)
        self.preempted.append(request.request_id)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        # A session ends when it is closed: stop ids and lengths are the ledger's business.
        request.append_output_token_ids(new_token_ids)
        return new_token_ids, False


def pending(request: Request) -> int:
    """Ids of a running request's text that are not yet evaluated."""
    return request.num_tokens - request.num_computed_tokens
