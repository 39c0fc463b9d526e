"""What another processor is held to: made on the machine that builds, read where the tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge.drafters import manifest, runtimes
from edge.drafters.cached import CachedDrafter
from edge.drafters.rank import by_twin, rank
from protocol.sampling import Sampling

VOCABULARY = 40_000
POSITION = 2**33 + 5  # of the first case
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=2026)
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0, seed=1),
    DRAWN,
    Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=3),
    Sampling(temperature=0.5, top_k=1000, seed=2**64 - 1),
)
LOGITS, DRAFTER, CASES = "logits.npy", "drafter.npy", "cases.json"


class Cases(msgspec.Struct, frozen=True):
    """ranked: ids of each row of logits and each sampling; greedy, drawn: a drafter's tokens behind its own prompt."""

    ranked: list[list[int]]
    greedy: list[int] = []
    drawn: list[int] = []


def rows(folder: Path) -> Any:
    """Logits [rows, VOCABULARY] float32."""
    return np.load(folder / LOGITS)


def every(logits: Any) -> list[tuple[Any, int, Sampling]]:
    """(logits [VOCABULARY], position, sampling) of each case."""
    return [(row, POSITION + i, sampling) for i, row in enumerate(logits) for sampling in SAMPLINGS]


def text(drafter: CachedDrafter, prompt: tuple[int, ...], num: int) -> tuple[list[int], list[int], Any]:
    """The drafter's greedy tokens, what it would have drawn in place of each, and the logits [num, vocab] of both."""
    row = drafter.prefill(prompt)
    greedy, drawn, logits = [], [], np.empty((num, drafter.info.vocab_size), np.float32)
    for place in range(num):
        logits[place] = drafter.logits(row)
        greedy.append(drafter.candidates(row, Sampling(), 1)[0].id)
        drawn.append(drafter.candidates(row, DRAWN, 1)[0].id)
        if place + 1 < num:
            (row,) = drafter.extend([(greedy[-1], row)])
    return greedy, drawn, logits


def write(folder: Path, drafter: Path | None, tokens: int) -> None:
    """drafter: a directory with the runtime `native`; its first tokens are recorded."""
    rng = np.random.default_rng(76)
    logits = (rng.standard_normal((4, VOCABULARY)) * [[0.5], [2], [2], [4]]).astype(np.float32)
    logits[1] = np.round(logits[1])  # ties
    logits[2, ::3] = -np.inf
    ranked = [by_twin(row, position, sampling, 8)[0].tolist() for row, position, sampling in every(logits)]
    assert ranked == [rank(row, position, sampling, 8)[0].tolist() for row, position, sampling in every(logits)]
    cases = Cases(ranked)
    if drafter is not None:
        golden = manifest.read(drafter, "drafter").golden
        assert golden is not None
        greedy, drawn, own = text(runtimes.load(drafter), golden.prompt, tokens)
        np.save(folder / DRAFTER, own)
        cases = Cases(ranked, greedy, drawn)
    np.save(folder / LOGITS, logits)
    (folder / CASES).write_bytes(msgspec.json.encode(cases))


def read(folder: Path) -> Cases:
    return msgspec.json.decode((folder / CASES).read_bytes(), type=Cases)
