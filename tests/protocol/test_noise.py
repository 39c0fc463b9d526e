"""The noise is Philox as published, laid out as docs/sampling.md says, and it does not depend on who asks for it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from protocol.noise import GRID, MAX_GUMBEL, MIN_GUMBEL, gumbel, gumbel_of, philox, words
from tests.protocol.draws import HARD_WORDS, KNOWN_ANSWERS


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, result):
    got = philox(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in got) == result


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python's own integers, from the paper."""
    for turn in range(10):
        if turn:
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
    return counter


@pytest.mark.parametrize(
    ("seed", "position", "token"), [(0, 0, 0), (2**64 - 1, 2**40 + 7, 151_935), (0x123456789ABCDEF0, 2**32, 6)]
)
def test_a_token_reads_its_lane_of_its_block(seed, position, token):
    block = slow_philox(
        [token // 4, position % 2**32, position // 2**32, 0],
        [seed % 2**32, seed // 2**32],
    )
    uniform = (block[token % 4] + 0.5) / 2**32
    expected = round(-math.log(-math.log(uniform)) * 2**20) / 2**20
    assert gumbel(seed, position, np.array([token]))[0] == expected
    assert words(seed, position, np.array([token // 4]))[0].tolist() == block


def test_the_noise_of_a_token_is_the_same_in_any_set_of_tokens():
    rng = np.random.default_rng(1)
    whole = gumbel(7, 99, np.arange(50_000))
    for size in (1, 3, 1000, 40_000):
        ids = rng.choice(50_000, size, replace=False)
        assert np.array_equal(gumbel(7, 99, ids), whole[ids])
    assert gumbel(7, 99, np.zeros(0, np.int64)).shape == (0,)


def test_seed_and_position_count_in_all_their_bits():
    ids = np.arange(64)
    variants = [(5, 9), (5 + 2**32, 9), (5 + 2**63, 9), (5, 9 + 2**32), (5, 10), (6, 9)]
    drawn = [gumbel(seed, position, ids) for seed, position in variants]
    for i, one in enumerate(drawn):
        for other in drawn[i + 1 :]:
            assert (one == other).sum() <= 1


def test_noise_is_finite_on_the_grid_and_within_its_bounds():
    edge = gumbel_of(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint64))
    assert np.isfinite(edge).all()
    assert edge[0] == MIN_GUMBEL == round(-math.log(33 * math.log(2)) * 2**20) / 2**20
    assert edge[-1] == MAX_GUMBEL and abs(MAX_GUMBEL - 33 * math.log(2)) < 2**-20
    sample = gumbel(3, 4, np.arange(100_000))
    assert np.array_equal(sample * 2**20, np.rint(sample * 2**20))
    assert sample.min() >= MIN_GUMBEL and sample.max() <= MAX_GUMBEL


def test_noise_has_the_moments_of_the_gumbel_distribution():
    sample = np.concatenate([gumbel(seed, seed * 3, np.arange(100_000)) for seed in range(10)])  # a million
    assert abs(sample.mean() - np.euler_gamma) < 4 * math.pi / math.sqrt(6e6)
    assert abs(sample.var() - math.pi**2 / 6) < 0.02


def test_the_words_nearest_to_a_rounding_border_are_rounded_right():
    word, expected = np.array(HARD_WORDS).T
    assert (gumbel_of(word.astype(np.uint64)) * GRID).tolist() == expected.tolist()
