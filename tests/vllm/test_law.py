"""What is drawn inside vLLM follows the specification and its distribution: a function of logits, position and seed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from cloud.engines.base import Plan, Work
from protocol.sampling import Sampling, choose, rank
from tools.vllm import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

import torch

from cloud.engines.vllm.sampler import draw

DRAWS = 1500
LEAST = 8.0  # expected draws of a cell

SAMPLINGS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.3, top_k=12),
    Sampling(temperature=0.6, top_k=40, top_p=0.7),
)


def test_a_batch_of_unlike_samplings_draws_what_the_specification_says(engine) -> None:
    """Each row by its own parameters and position, root and draft rows alike, in steps with and without drafts."""
    rng = np.random.default_rng(1)
    rows: dict[tuple[int, int], np.ndarray] = {}
    engine.sampler.observe = lambda name, position, row: rows.__setitem__((int(name), position), row.numpy().copy())
    texts: dict[int, list[int]] = {}
    samplings = {key: SAMPLINGS[key % len(SAMPLINGS)] for key in range(15)}
    for key, sampling in samplings.items():
        samplings[key] = Sampling(
            temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=1000 + key
        )
        texts[key] = rng.integers(0, 499, 5 + 3 * key).tolist()
        engine.open(key, texts[key], samplings[key], 200)
    checked = 0
    for turn in range(8):
        plan = []
        for key in texts:
            left = engine.pending(key)
            draft = rng.integers(0, 499, 0 if turn == 4 else (key + turn) % 4).tolist()
            plan.append(Work(key, left, draft, list(range(-1, len(draft) - 1))))
        rows.clear()
        outcome = engine.step(Plan(plan))
        for key, ids in outcome.accepted.items():
            start = len(texts[key])
            assert ids == [choose(rows[key, start + i], start + i, samplings[key]) for i in range(len(ids))]
            texts[key] += ids
            checked += len(ids)
    engine.sampler.observe = None
    for key in texts:
        engine.close(key)
    assert checked >= 100


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=["whole", "nucleus", "top-k", "both"])
def test_over_seeds_the_draws_have_the_targets_distribution(engine, sampling) -> None:
    stats = pytest.importorskip("scipy.stats")

    row: list[np.ndarray] = []
    engine.sampler.observe = lambda name, position, logits: row.append(logits.float().numpy().copy())
    engine.open(0, [3, 1, 4, 1, 5, 9], Sampling(), 20)
    engine.step(Plan([Work(0, 6)]))
    engine.close(0)
    engine.sampler.observe = None
    logits = row[0] * np.float32(2.5) / row[0].std()  # so that many tokens are likely
    seeded = [
        Sampling(temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, seed=seed)
        for seed in range(DRAWS)
    ]
    drawn = draw(torch.from_numpy(logits).expand(DRAWS, -1), [6] * DRAWS, seeded)
    ids, chances = rank(logits, 6, seeded[0], 500)
    order = np.argsort(-chances)
    expected = chances[order] * DRAWS
    counts = Counter(drawn)
    found = np.array([counts.pop(int(id), 0) for id in ids[order]], float)
    assert not counts  # nothing outside of what top-k and top-p leave
    cells = int((expected >= LEAST).sum())
    expected = np.append(expected[:cells], expected[cells:].sum())
    found = np.append(found[:cells], found[cells:].sum())
    if expected[-1] == 0:
        expected, found = expected[:-1], found[:-1]
    assert cells > 3
    assert stats.chisquare(found, expected).pvalue > 1e-4
