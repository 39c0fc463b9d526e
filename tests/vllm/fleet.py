"""Sessions of one engine, out of step with one another, with drafts of all kinds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from cloud.engines.base import Plan, Work
from protocol.sampling import Sampling
from tests.vllm.reference import Run

IDS = 499  # of which prompts and guesses are made
NEW = 24


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(IDS) for _ in range(length)] for length in lengths]


def chain(draft: Sequence[int]) -> tuple[list[int], list[int]]:
    return list(draft), list(range(-1, len(draft) - 1))


def draft_of(kind: str, text: list[int], truth: list[int], rng: random.Random) -> tuple[list[int], list[int]]:
    """A draft behind `text`, whose true continuation is in `truth` (whole texts)."""
    future = truth[len(text) : len(text) + 5]
    future += [rng.randrange(IDS) for _ in range(5 - len(future))]
    wrong = [(id + 1) % IDS for id in future]
    stale = truth[max(0, len(text) - 3) : len(text) + 1]
    match kind:
        case "right":
            return chain(future[: rng.randrange(1, 6)])
        case "half":
            return chain([*future[:2], *wrong[2:]])
        case "wrong":
            return chain(wrong[: rng.randrange(1, 6)])
        case "stale":
            return chain(stale)
        case "tree":  # the first child of each is its best
            return [future[0], wrong[0], future[1], wrong[1], future[2]], [-1, -1, 0, 0, 2]
        case _:
            return [], []


KINDS = ("right", "half", "wrong", "stale", "tree", "none")


class Fleet:
    """Steps of random sessions. truths: what each is to write; evictions: how often one is evicted after a step; only:
    makes all plans, where it is given.
    """

    def __init__(
        self,
        engine: Any,
        truths: Sequence[Run],
        sampling: Sampling,
        *,
        seed: int = 0,
        evictions: float = 0.0,
        only: Callable[[], list[Work]] | None = None,
    ) -> None:
        self.engine, self.sampling, self.evictions = engine, sampling, evictions
        self.truths = [[*run.prompt, *run.ids] for run in truths]
        self.rng = random.Random(seed)
        self.runs = [Run(list(run.prompt)) for run in truths]
        self.accepted = self.evicted = 0
        self._plan = only or self.work

    def text(self, key: int) -> list[int]:
        return [*self.runs[key].prompt, *self.runs[key].ids]

    def observe(self, name: str, position: int, row: Any) -> None:
        run = self.runs[int(name)]
        run.logits[position] = row.clone()  # a later run of the position stands behind a longer part of the true text

    def work(self) -> list[Work]:
        """Some of the sessions, as many as there are blocks for."""
        engine, rng = self.engine, self.rng
        unfinished = [key for key, run in enumerate(self.runs) if len(run.ids) < NEW]
        rng.shuffle(unfinished)
        work: list[Work] = []
        blocks = engine.num_blocks
        for key in unfinished[: rng.randrange(1, len(unfinished) + 1)]:
            blocks -= engine.blocks(key, len(self.text(key)))
            if blocks < 0:
                break
            left = engine.pending(key)
            if left > 1 and rng.random() < 0.8:
                work.append(Work(key, rng.randrange(1, left + 1)))
            else:
                work.append(Work(key, left, *draft_of(rng.choice(KINDS), self.text(key), self.truths[key], rng)))
        return work

    def run(self) -> list[Run]:
        engine, rng = self.engine, self.rng
        for key, run in enumerate(self.runs):
            engine.open(key, run.prompt, self.sampling, len(run.prompt) + NEW, f"tenant{key % 2}")
        engine.sampler.observe = self.observe
        while any(len(run.ids) < NEW for run in self.runs):
            work = self._plan()
            outcome = engine.step(Plan(work))
            assert not outcome.failed
            for key, ids in outcome.accepted.items():
                self.runs[key].ids += ids
                self.accepted += len(ids) - 1
                assert engine.pending(key) == 1
            self.evicted += len(outcome.evicted)
            assert outcome.rows <= sum(one.rows + len(one.draft) for one in work)
            assert 0 <= engine.free_blocks <= engine.num_blocks
            if rng.random() < self.evictions:
                engine.evict(rng.randrange(len(self.runs)))
        engine.sampler.observe = None
        for key, run in enumerate(self.runs):
            engine.close(key)
            run.ids = run.ids[:NEW]
        return self.runs
