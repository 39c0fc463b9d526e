"""What steps cost, measured on the engine before anybody is served."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import cycle, islice

from cloud.cost import StepCost
from cloud.engines.base import Engine, Plan, Work
from protocol.errors import ModelError
from protocol.sampling import Sampling

SIZES = (1, 8, 32, 64)  # rows
ROUNDS = 3
SESSIONS = 4
PROMPT, LENGTH = 8, 256  # tokens


def probe(engine: Engine, limit_s: float, draft_rows: int, clock: Callable[[], float] = time.monotonic) -> StepCost:
    """A cost that knows steps of some sizes, from a few throw-away sessions; no step begins after `limit_s`.

    draft_rows: most of one session in a step. Knows less, or nothing, where the engine has no room for the sessions.
    """
    cost, keys = StepCost(), list[int]()
    deadline = clock() + limit_s
    length = min(LENGTH, engine.info.context)
    prompt = list(islice(cycle(range(engine.info.vocab_size)), PROMPT))
    try:
        for key in range(-SESSIONS, 0):
            if clock() >= deadline or not engine.room(length):
                break
            engine.open(key, prompt, Sampling(), length)
            keys.append(key)
            engine.step(Plan([Work(key, engine.pending(key))]))  # also what is only slow the first time
        for rows in SIZES * ROUNDS:
            work = _work(keys, rows, draft_rows)
            if clock() >= deadline or sum(1 + len(one.draft) for one in work) < rows:
                continue
            outcome = engine.step(Plan(work))
            if not outcome.failed:
                cost.learn(rows, outcome.seconds, PROMPT * len(work))
    except ModelError:
        pass  # no room after all: what was measured until then has to do
    finally:
        for key in keys:
            engine.close(key)
    return cost


def _work(keys: list[int], rows: int, draft_rows: int) -> list[Work]:
    """So many rows: a root row of each session and chains behind them, as even as can be; of few rows one session."""
    used = keys[: max(1, min(len(keys), rows // 8))]
    work: list[Work] = []
    for i, key in enumerate(used):
        share = (rows - i - 1) // len(used)  # what is left of the rows for this session's drafts
        draft = min(draft_rows, share)
        work.append(Work(key, 1, [1] * draft, list(range(-1, draft - 1))))
    return work
