"""`choose` and `rank` give what a slow and obvious reading of docs/sampling.md gives, whatever they leave out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from protocol.errors import SamplingError, WireError
from protocol.noise import gumbel
from protocol.sampling import PREFIXES, Sampling, choose, rank
from tests.protocol.draws import KINDS, make_logits, make_sampling


def reference(logits, position, sampling):
    """Every survivor as (id, probability), best first: sorts everything, draws all the noise, sums in Python."""
    temperature = sampling.temperature or 1.0
    scaled = {i: float(x) / temperature for i, x in enumerate(logits) if x > -math.inf}
    order = sorted(scaled, key=lambda i: (-scaled[i], i))
    peak = scaled[order[0]]
    if sampling.greedy:
        mass = {i: math.exp(scaled[i] - peak) for i in order}
        return [(i, mass[i] / sum(mass.values())) for i in order]
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        weights = [round(math.exp(scaled[i] - peak) * 2**32) for i in order]
        share = sampling.top_p * float(sum(weights))
        order = [i for i, before in zip(order, itertools.accumulate([0, *weights])) if before < share]  # noqa: B905
    mass = {i: math.exp(scaled[i] - peak) for i in order}
    noise = gumbel(sampling.seed, position, np.arange(len(logits)))
    order.sort(key=lambda i: (-(scaled[i] + noise[i]), i))
    return [(i, mass[i] / math.fsum(mass.values())) for i in order]


@pytest.mark.parametrize("kind", KINDS)
def test_choose_and_rank_equal_the_slow_reference(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(300):
        logits = make_logits(rng, kind, int(rng.choice([1, 2, 7, 60, 300, 700])))
        sampling, position, n = make_sampling(rng), int(rng.integers(2**40)), int(rng.choice([1, 3, 20]))
        expected = reference(logits, position, sampling)
        ids, probabilities = rank(logits, position, sampling, n)
        assert ids.tolist() == [i for i, _ in expected[:n]], sampling
        assert np.allclose(probabilities, [p for _, p in expected[:n]], rtol=1e-9, atol=1e-12)
        assert choose(logits, position, sampling) == expected[0][0], sampling


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0])
def test_a_nucleus_wider_than_each_prefix_is_found(scale):
    """At 6,000 tokens the nucleus ends within the first prefix, the second or behind both, by the spread and top-p."""
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal(6000) * scale).astype(np.float32)
    widths = set()
    for top_p in (0.001, 0.3, 0.8, 0.99):
        for position in range(2):
            sampling = Sampling(temperature=1.0, top_p=top_p, seed=11)
            expected = reference(logits, position, sampling)
            widths.add(sum(len(expected) > size for size in PREFIXES))
            ids, _ = rank(logits, position, sampling, 8)
            assert ids.tolist() == [i for i, _ in expected[:8]]
    assert len(widths) >= 2


def test_the_token_that_crosses_top_p_is_kept_and_equals_go_by_id():
    logits = np.zeros(20, np.float32)

    def survivors(top_p):
        return sorted(rank(logits, 0, Sampling(temperature=1.0, top_p=top_p), 20)[0].tolist())

    assert survivors(0.5) == list(range(10))  # exactly half lies before the eleventh
    assert survivors(0.51) == list(range(11))
    assert survivors(1e-9) == [0]


def test_top_p_is_over_what_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.1, 0.1, 0.1], np.float32))
    both = rank(logits, 0, Sampling(temperature=1.0, top_k=2, top_p=0.56), 5)[0]
    alone = rank(logits, 0, Sampling(temperature=1.0, top_p=0.56), 5)[0]
    assert both.tolist() == [0]  # .4 of .7 is more than .56
    assert sorted(alone.tolist()) == [0, 1]


def test_noise_hangs_on_seed_and_position_and_not_on_the_logits_of_others():
    logits = np.zeros(1000, np.float32)
    sampling = Sampling(temperature=1.0, seed=4)
    drawn = [choose(logits, position, sampling) for position in range(50)]
    assert drawn == [choose(logits, position, sampling) for position in range(50)]
    assert len(set(drawn)) > 40
    without_loser = logits.copy()
    without_loser[(drawn[0] + 1) % 1000] = -np.inf
    assert choose(without_loser, 0, sampling) == drawn[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [[np.nan, 1.0, 2.0], [1.0, np.inf], [-np.inf, -np.inf], [-np.inf, np.nan]])
def test_logits_that_no_token_can_be_chosen_from_are_refused(bad, temperature):
    with pytest.raises(SamplingError, match="logits"):
        choose(np.array(bad, np.float32), 0, Sampling(temperature=temperature))
    with pytest.raises(SamplingError, match="logits"):
        rank(np.array(bad, np.float32), 0, Sampling(temperature=temperature, top_p=0.9), 2)


def test_a_temperature_too_small_for_float64_is_an_error_and_not_a_random_token():
    with pytest.raises(SamplingError, match="temperature"):
        choose(np.array([1.0, 30.0], np.float32), 0, Sampling(temperature=1e-310))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": 17.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
        {"seed": 2**64},
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(wrong):
    with pytest.raises(WireError, match=next(iter(wrong))):
        Sampling(**wrong)
