"""A target and a drafter that replay traces and take the time that real ones would.

Each call sleeps until the moment at which its computing would have ended: what Python does in it costs nothing on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cloud.engines.base import Outcome, Plan
from edge.drafters.base import Candidate
from protocol.sampling import Sampling
from tools import traces
from tools.boards import BoardTiming
from tools.twin.replay import ReplayDrafter, ReplayEngine, ReplayRow, Script

PROGRESS_S = 0.25  # how often a drafter that reads a prompt tells how far it is


def scripts_of(files: Sequence[Path], num_texts: int, prompt_tokens: int) -> list[Script]:
    """The first `num_texts` of all traces, all where it is 0. Raises ConfigError for a file that is no trace file."""
    found = [Script(trace, prompt_tokens) for file in files for trace in traces.load(file)]
    return found[:num_texts] if num_texts else found


def sleep_until(at: float) -> None:
    """at: in `time.perf_counter()` seconds."""
    left = at - time.perf_counter()
    if left > 0:
        time.sleep(left)


class TimedEngine(ReplayEngine):
    """Steps that take what their `StepTime` says; `Outcome.seconds` is what they took."""

    def step(self, plan: Plan) -> Outcome:
        started = time.perf_counter()
        outcome = super().step(plan)
        sleep_until(started + outcome.seconds)
        outcome.seconds = time.perf_counter() - started
        return outcome


class TimedDrafter:
    """Passes that take what the board's timing says. `rehearse` names the text that comes next."""

    def __init__(self, scripts: Sequence[Script], board: BoardTiming) -> None:
        self._board = board
        self._replays = [ReplayDrafter(script) for script in scripts]
        self._replay = self._replays[0]
        self.info = self._replay.info

    def rehearse(self, text: int) -> Script:
        self._replay = self._replays[text]
        return self._replay.script

    def prefill(self, ids: Sequence[int], progress: Callable[[int, int], None] | None = None) -> ReplayRow:
        started = time.perf_counter()
        row = self._replay.prefill(ids)
        while (read_s := time.perf_counter() - started) < (whole_s := self._board.prefill_s(len(ids))):
            time.sleep(min(PROGRESS_S, whole_s - read_s))
            if progress is not None:
                progress(min(len(ids), int((time.perf_counter() - started) / whole_s * len(ids))), len(ids))
        return row

    def extend(self, rows: Sequence[tuple[int, Any]]) -> list[Any]:
        started = time.perf_counter()
        made = self._replay.extend(rows)
        sleep_until(started + self._board.rows_s(len(rows)))
        return made

    def keep(self, path: Sequence[Any]) -> None:
        self._replay.keep(path)

    def candidates(self, row: Any, sampling: Sampling, n: int) -> list[Candidate]:
        return self._replay.candidates(row, sampling, n)

    def room(self) -> int:
        return self._replay.room()
