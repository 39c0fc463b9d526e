"""Ranking in C gives what the twin gives, in every id, with each instruction set."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.drafters import rank as ranking
from edge.drafters.rank import by_twin, rank
from protocol.errors import SamplingError
from protocol.noise import GRID, gumbel, gumbel_of
from protocol.sampling import Sampling, choose
from tests.native.conftest import SETS
from tests.protocol.draws import HARD_WORDS, KINDS, make_logits, make_sampling

VOCABULARY = 151_936
SIZES = (1, 2, 7, 31, 32, 33, 64, 300, 1000)


def assert_same(logits: Any, position: int, sampling: Sampling, n: int, ids: Any = None) -> None:
    expected, odds = by_twin(logits, position, sampling, n, ids)
    found, probabilities = rank(logits, position, sampling, n, ids)
    assert found.tolist() == expected.tolist(), (sampling, position, n)
    assert found.dtype == expected.dtype
    assert np.allclose(probabilities, odds, rtol=1e-11, atol=1e-12)


def shortlist(rng: np.random.Generator, num: int) -> Any:
    return np.sort(rng.choice(4 * num, num, replace=False)).astype(np.int32)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_the_twin_gives(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind) + 100)
    for turn in range(200):
        logits = make_logits(rng, kind, int(rng.choice(SIZES)))
        n, position = int(rng.choice([1, 3, 20, 2000])), int(rng.integers(2**63))
        ids = shortlist(rng, logits.size) if turn % 2 else None
        assert_same(logits, position, make_sampling(rng), n, ids)


@pytest.mark.usefixtures("isa")
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, max_value=2.0**127) | st.integers(-3, 3).map(float), min_size=1),
    st.floats(1e-6, 16) | st.sampled_from([0.0, 5e-324, 1e-300, 1e-38, 1e-30, 16.0]),
    st.integers(0, 40) | st.just(2**31 - 1),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(1, 50),
)
def test_no_number_is_too_strange(
    values: list[float], temperature: float, top_k: int, top_p: float, seed: int, position: int, n: int
) -> None:
    logits = np.array(values, np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with np.errstate(all="ignore"):
        try:
            by_twin(logits, position, sampling, n)
        except SamplingError:
            with pytest.raises(SamplingError):
                rank(logits, position, sampling, n)
        else:
            assert_same(logits, position, sampling, n)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 4.0])
def test_a_whole_vocabulary(spread: float) -> None:
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal(VOCABULARY) * spread).astype(np.float32)
    logits[rng.integers(VOCABULARY, size=4)] += 4 * spread
    ids = np.sort(rng.choice(VOCABULARY, 50_001, replace=False)).astype(np.int32)
    for sampling in (
        Sampling(),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.8, top_p=0.95, seed=2),
        Sampling(temperature=1.3, top_k=40, top_p=0.9, seed=3),
        Sampling(temperature=1.0, top_k=60_000, seed=4),
    ):
        assert_same(logits, 77, sampling, 8)
        assert_same(logits[ids], 77, sampling, 8, ids)
        assert rank(logits, 77, sampling, 1)[0][0] == choose(logits, 77, sampling)


def test_every_set_gives_the_same_bits(library: tuple[Any, Any]) -> None:
    ffi, lib = library
    before = ffi.string(lib.board_isa())
    logits = np.random.default_rng(2).standard_normal(5000).astype(np.float32) * 3
    sampling = Sampling(temperature=0.7, top_p=0.999, seed=8)
    bits = set()
    for isa in SETS:
        if lib.board_use(isa.encode()) == 0:
            bits.add(rank(logits, 5, sampling, 500)[1].tobytes())
    assert lib.board_use(before) == 0
    assert len(bits) == 1


def test_the_noise_is_the_twins(library: tuple[Any, Any]) -> None:
    ffi, lib = library
    rng = np.random.default_rng(6)
    ids = rng.integers(2**31, size=10_000).astype(np.int32)
    numbers = np.empty(ids.size)
    for seed, position in ((0, 0), (2**64 - 1, 2**63 + 5), (0x123456789ABCDEF0, 2**32)):
        lib.noise_at(seed, position, ffi.from_buffer("int32_t[]", ids), ids.size, ffi.from_buffer("double[]", numbers))
        assert np.array_equal(numbers, gumbel(seed, position, ids.astype(np.int64)))


def test_the_words_nearest_to_a_rounding_border_are_rounded_right(library: tuple[Any, Any]) -> None:
    ffi, lib = library
    hard, expected = np.array(HARD_WORDS).T
    some = np.random.default_rng(7).integers(2**32, size=100_000)
    words = np.concatenate([hard, [0, 1, 2**31, 2**32 - 2, 2**32 - 1], some]).astype(np.uint32)
    numbers = np.empty(words.size)
    lib.noise_of(ffi.from_buffer("uint32_t[]", words), words.size, ffi.from_buffer("double[]", numbers))
    assert (numbers[: hard.size] * GRID).tolist() == expected.tolist()
    assert np.array_equal(numbers, gumbel_of(words.astype(np.uint64)))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [[np.nan, 1.0, 2.0], [1.0, np.inf], [-np.inf, -np.inf], [-np.inf, np.nan]])
def test_logits_that_no_token_can_be_chosen_from_are_refused(bad: list[float], temperature: float) -> None:
    logits = np.zeros(100, np.float32)
    logits[:] = bad[-1]
    logits[40 : 40 + len(bad)] = bad
    with pytest.raises(SamplingError, match="logits"):
        rank(logits, 0, Sampling(temperature=temperature, top_p=0.9), 2)


@pytest.mark.usefixtures("library")
def test_logits_may_lie_apart() -> None:
    wide = np.random.default_rng(1).standard_normal((3, 200)).astype(np.float32)
    assert_same(wide[:, 7], 3, Sampling(temperature=1.0), 3)
    assert_same(wide[1, 3:90], 3, Sampling(temperature=1.0), 100)


@pytest.mark.usefixtures("library")
def test_threads_do_not_meet() -> None:
    rng = np.random.default_rng(4)
    tasks = [(rng.standard_normal(20_000).astype(np.float32), p, Sampling(temperature=1.0, seed=p)) for p in range(8)]
    expected = [by_twin(*task, 4)[0].tolist() for task in tasks]
    found: list[Any] = [None] * len(tasks)

    def work(i: int) -> None:
        found[i] = [rank(*tasks[i], 4)[0].tolist() for _ in range(20)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[ids] * 20 for ids in expected]


def test_without_the_library_the_twin_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking.board, "find", lambda: None)
    logits, ids = np.array([1.0, 3.0, 2.0], np.float32), np.array([4, 6, 9], np.int32)
    assert rank(logits, 0, Sampling(), 2, ids)[0].tolist() == [6, 9]
