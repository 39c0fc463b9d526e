"""A verifier's process that computes nothing: it agrees with what the board drafts, as late and as often as it is told.

Gateway, verifier and scheduler are those that serve a fleet; only the engine has no model.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from cloud.cli import SWITCH_S
from cloud.config import LimitsConfig, SchedulerConfig
from cloud.engines.base import Outcome, Plan, TargetInfo, Work
from cloud.gateway import Gateway
from cloud.verifier import Verifier
from edge.drafters import manifest
from protocol.sampling import Sampling
from tools.player import place

FIRST, NUM_IDS = 100, 50  # what is written where nothing was drafted: no special ids, and never the same twice in a row


class AgreeingEngine:
    """Takes a session's first guesses for right, at most `most` of them in a step, but never at a position that
    `wrong_every` divides (0: all may be right). A step that draws tokens takes `step_s`.
    """

    takes_trees = True
    num_blocks = 1
    free_blocks = 1
    retained_blocks = 0

    def __init__(self, facts: manifest.Manifest, *, step_s: float, most: int, wrong_every: int) -> None:
        self.info = TargetInfo(
            "late-000000000000", "late", "0" * 64, facts.tokenizer_digest, facts.vocab_size, facts.context, "late"
        )
        self._step_s, self._most, self._wrong_every = step_s, most, wrong_every
        self._length: dict[int, int] = {}
        self._read: dict[int, int] = {}

    def blocks(self, key: int, length: int = 0) -> int:
        return 0

    def open(self, key: int, ids: Sequence[int], sampling: Sampling, length: int, tenant: str = "") -> None:
        self._length[key], self._read[key] = len(ids), 0

    def pending(self, key: int) -> int:
        return self._length[key] - self._read[key]

    def step(self, plan: Plan) -> Outcome:
        started = time.perf_counter()
        outcome = Outcome()
        for work in plan.work:
            key = work.key
            self._read[key] += work.rows
            outcome.ran[key] = work.rows + len(work.draft)
            if self._read[key] == self._length[key]:
                outcome.accepted[key] = self._written(work)
                self._length[key] += len(outcome.accepted[key])
                self._read[key] = self._length[key] - 1
        if outcome.accepted:
            time.sleep(self._step_s)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def evict(self, key: int) -> None:
        self._read[key] = 0

    def close(self, key: int) -> None:
        del self._length[key], self._read[key]

    def _written(self, work: Work) -> list[int]:
        position, at = self._length[work.key], -1
        written: list[int] = []
        while len(written) < self._most:
            right = next((i for i, parent in enumerate(work.parents) if parent == at), None)
            if right is None or (self._wrong_every and position % self._wrong_every == 0):
                break
            written.append(work.draft[right])
            position, at = position + 1, right
        return written or [FIRST + position % NUM_IDS]


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--drafter", type=click.Path(path_type=Path), required=True, help="Whose tokenizer the target has.")
@click.option("--step-s", type=float, required=True)
@click.option("--most", type=int, default=64, help="Tokens of a session's step.")
@click.option("--wrong-every", type=int, default=0)
def main(port: int, drafter: Path, step_s: float, most: int, wrong_every: int) -> None:
    """Serve until SIGTERM, which also ends it in mid-step."""
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    engine = AgreeingEngine(manifest.read(drafter, "drafter"), step_s=step_s, most=most, wrong_every=wrong_every)
    verifier = Verifier(
        f"v{secrets.token_hex(5)}",
        engine,
        scheduler=SchedulerConfig().scheduler(),
        bounds=LimitsConfig().bounds(),
        version="late",
    )
    logging.getLogger(__name__).info("serving %s", engine.info.id)
    Gateway(verifier, place(port, None)).run()


if __name__ == "__main__":
    main()
