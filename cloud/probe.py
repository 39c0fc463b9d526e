"""What steps cost, measured on the engine before anybody is served."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

from cloud.cost import StepCost
from cloud.engines.base import Engine, Plan, Work
from protocol.errors import ModelError
from protocol.sampling import Sampling

SIZES = (1, 8, 32, 64)  # rows that draw tokens
ROUNDS = 3
SESSIONS = 8
PROMPT, LENGTH = 32, 256  # tokens
PROBE = "(probe)"  # a tenant that no device can have the name of


def probe(engine: Engine, limit_s: float, draft_rows: int, clock: Callable[[], float] = time.monotonic) -> StepCost:
    """A cost that knows steps of some sizes, from a few throw-away sessions.

    limit_s: no step begins later than this after the first one, which is slow for being the first; draft_rows: most of
    one session in a step. Knows less, or nothing, where time or the engine's room does not suffice.
    """
    cost, keys = StepCost(), list[int]()
    length = min(LENGTH, engine.info.context)
    prompt_len = min(PROMPT, length // 2)

    def room() -> bool:
        """Whether one more fits: all read the prompt and hold a whole draft from the first step on."""
        return not keys or (len(keys) + 1) * engine.blocks(keys[0], length) <= engine.num_blocks

    def open_session() -> int:
        key = -1 - len(keys)
        # No two begin alike: what is held of one text is not evaluated again for another.
        prompt = islice(cycle(range(engine.info.vocab_size)), len(keys), len(keys) + prompt_len)
        engine.open(key, list(prompt), Sampling(), length, PROBE)
        keys.append(key)
        return key

    def run(work: Sequence[Work], rows: int, prefill: int = 0) -> None:
        if clock() < deadline and rows + prefill == sum(one.rows + len(one.draft) for one in work):
            outcome = engine.step(Plan(work))
            if not outcome.failed:
                cost.learn(rows, outcome.seconds, prompt_len * len(work), prefill)

    try:
        while len(keys) < SESSIONS and room():
            open_session()
        if not (keys and limit_s):
            return cost
        engine.step(Plan([Work(key, prompt_len) for key in keys]))
        deadline = clock() + limit_s
        for turn in range(ROUNDS):
            for rows in SIZES:
                run(_work(keys, rows, draft_rows), rows)
            if turn and room():
                reading = Work(open_session(), prompt_len - 1)
                run([*_work(keys, 1, 0), reading], 1, reading.rows)
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
        draft = min(draft_rows, (rows - i - 1) // len(used))
        work.append(Work(key, 1, [1] * draft, list(range(-1, draft - 1))))
    return work
