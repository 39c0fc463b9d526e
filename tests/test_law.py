"""The law: draws follow the processed distribution, and two models that share the noise agree as often as is promised.

Agreement: for distributions p and q, sharing Gumbel noise gives at least (1 - TV) / (1 + TV) (Daliri, Musco and Suresh,
arXiv 2408.07978), and no coupling at all gives more than 1 - TV.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from scipy.stats import chisquare

from protocol.sampling import Sampling, choose

DRAWS = 20_000


def draw(probabilities, sampling_of, positions):
    """What a drafter draws at each position [draws]; sampling_of: position -> Sampling."""
    logits = np.log(probabilities).astype(np.float32)
    return np.array([choose(logits, position, sampling_of(position)) for position in positions])


def draw_in_batch(probabilities, sampling, positions):
    """What a target draws at each position [draws]."""
    choose_rows = pytest.importorskip("cloud.sampling", reason="the target's side needs torch").choose_rows
    logits = np.log(probabilities).astype(np.float32)
    rows = np.broadcast_to(logits, (len(positions), logits.size)).copy()
    return np.array(choose_rows(sys.modules["torch"].from_numpy(rows), positions, [sampling] * len(positions)))


def zipf(size, exponent, rng):
    return rng.permutation(np.arange(1, size + 1) ** -exponent) / (np.arange(1, size + 1) ** -exponent).sum()


def processed(probabilities, temperature, top_k=0, top_p=1.0):
    """The distribution [vocab] that is left: temperature, then top-k, then top-p."""
    heated = probabilities ** (1 / temperature)
    heated /= heated.sum()
    order = np.argsort(-heated, kind="stable")
    if top_k:
        order = order[:top_k]
    mass = heated[order] / heated[order].sum()
    order = order[np.cumsum(mass) - mass < top_p]
    left = np.zeros_like(heated)
    left[order] = heated[order] / heated[order].sum()
    return left


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}],
    ids=["t0.8-p0.95", "t1", "k5"],
)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_follow_the_processed_distribution(parameters, along):
    target = zipf(40, 1.1, np.random.default_rng(1))
    if along == "positions":
        drawn = draw(target, lambda _: Sampling(seed=2024, **parameters), range(DRAWS))
    else:
        logits = np.log(target).astype(np.float32)
        drawn = np.array([choose(logits, 17, Sampling(seed=seed, **parameters)) for seed in range(DRAWS)])
    expected = processed(target, **parameters)
    counts = np.bincount(drawn, minlength=target.size)
    assert counts[expected == 0].sum() == 0
    left = expected > 0
    assert chisquare(counts[left], expected[left] * DRAWS).pvalue > 1e-3


def nearby(target, spread, rng):
    drafted = target * np.exp(rng.standard_normal(target.size) * spread)
    return drafted / drafted.sum()


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95}], ids=["t1", "t0.8"])
def test_models_that_share_the_noise_agree_as_often_as_promised(spread, parameters):
    rng = np.random.default_rng(int(spread * 10))
    target = zipf(30, 1.0, rng)
    drafted = nearby(target, spread, rng)
    sampling = Sampling(seed=7, **parameters)
    same = draw_in_batch(target, sampling, range(DRAWS)) == draw(drafted, lambda _: sampling, range(DRAWS))
    distance = np.abs(processed(target, **parameters) - processed(drafted, **parameters)).sum() / 2
    error = 4 * math.sqrt(same.mean() * (1 - same.mean()) / DRAWS)
    assert (1 - distance) / (1 + distance) - error <= same.mean() <= 1 - distance + error
    assert distance > 0.02
