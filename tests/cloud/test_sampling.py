"""The torch twin gives what NumPy gives, to the bit: the noise of ten million draws, the choices of mixed batches."""

from __future__ import annotations

import numpy as np
import pytest

from protocol import noise
from protocol.errors import SamplingError
from protocol.sampling import Sampling, choose
from tests.protocol.draws import HARD_WORDS, KINDS, KNOWN_ANSWERS, make_logits, make_sampling

torch = pytest.importorskip("torch")

from cloud.sampling import PREFIXES, choose_at_once, choose_rows, gumbel, gumbel_of, philox  # noqa: E402


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter, key, result):
    got = philox(tuple(torch.tensor([w]) for w in counter), tuple(torch.tensor([w]) for w in key))
    assert tuple(int(w) for w in got) == result


@pytest.fixture
def one_thread():
    """Many small operations on shared cores: threads would wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_noise_of_ten_million_draws_is_equal():
    rng = np.random.default_rng(20)
    for _ in range(200):
        seed, position = (int(number) for number in rng.integers(2**64, size=2, dtype=np.uint64))
        position >>= int(rng.integers(64))
        ids = rng.integers(200_000, size=50_000)
        columns = (torch.from_numpy(np.array([number], np.uint64).view(np.int64)) for number in (seed, position))
        assert np.array_equal(gumbel(*columns, torch.from_numpy(ids)).numpy(), noise.gumbel(seed, position, ids))


def test_the_words_nearest_to_a_rounding_border_are_rounded_right():
    word, expected = torch.tensor(HARD_WORDS).T
    assert (gumbel_of(word) * noise.GRID).tolist() == expected.tolist()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("vocab", [1, 6, 127, 130, 1500])
def test_mixed_batches_choose_as_numpy_does(vocab):
    rng = np.random.default_rng(vocab)
    for _ in range(30):
        rows = int(rng.integers(1, 60))
        logits = np.stack([make_logits(rng, str(rng.choice(KINDS)), vocab) for _ in range(rows)])  # [rows, vocab]
        samplings = [make_sampling(rng) for _ in range(rows)]
        positions = [int(p) for p in rng.integers(2**48, size=rows)]
        expected = [choose(logits[i], positions[i], samplings[i]) for i in range(rows)]
        assert choose_at_once(torch.from_numpy(logits), positions, samplings) == expected
        assert choose_rows(torch.from_numpy(logits), positions, samplings) == expected


def test_a_nucleus_wider_than_each_prefix_is_found():
    rng = np.random.default_rng(3)
    spreads = np.repeat([0.0, 0.5, 1.0, 2.0, 4.0], 8)[:, None]
    logits = (rng.standard_normal((40, 5000)) * spreads).astype(np.float32)
    samplings = [Sampling(temperature=1.0, top_p=[0.02, 0.3, 0.7, 0.99][i % 4], seed=i) for i in range(40)]
    samplings[0] = Sampling(temperature=1.0, top_k=PREFIXES[0] + 1)
    samplings[1] = Sampling(temperature=1.0, top_k=PREFIXES[1] + 1, top_p=0.9)
    expected = [choose(logits[i], i, samplings[i]) for i in range(40)]
    assert choose_at_once(torch.from_numpy(logits), range(40), samplings) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_are_chosen_from_by_their_float32_values(dtype):
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(rng.standard_normal((64, 2000)) * 3).to(dtype)
    samplings = [make_sampling(rng) for _ in range(64)]
    expected = [choose(row.float().numpy(), i, samplings[i]) for i, row in enumerate(logits)]
    assert choose_at_once(logits, range(64), samplings) == expected
    assert choose_rows(logits, range(64), samplings) == expected


def test_a_real_vocabulary_is_chosen_from_as_numpy_does():
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal((6, 151_936)) * 2.5).astype(np.float32)
    logits[:, 77] = rng.uniform(8, 16, 6)
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=1), Sampling(temperature=1.0, seed=2)):
        expected = [choose(row, i, sampling) for i, row in enumerate(logits)]
        assert choose_at_once(torch.from_numpy(logits), range(6), [sampling] * 6) == expected


@pytest.mark.parametrize("choose_all", [choose_rows, choose_at_once])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_row_that_nothing_can_be_chosen_from_is_named(bad, temperature, choose_all):
    logits = torch.zeros(30, 10)
    logits[21] = bad
    with pytest.raises(SamplingError, match="row 21"):
        choose_all(logits, [0] * 30, [Sampling(temperature=temperature)] * 30)


@pytest.mark.parametrize("choose_all", [choose_rows, choose_at_once])
def test_no_rows_are_no_tokens(choose_all):
    assert choose_all(torch.zeros(0, 10), [], []) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_chooses_as_numpy_does():
    rng = np.random.default_rng(10)
    logits = np.stack([make_logits(rng, str(rng.choice(KINDS)), 3000) for _ in range(500)])
    samplings = [make_sampling(rng) for _ in range(500)]
    expected = [choose(logits[i], i, samplings[i]) for i in range(500)]
    assert choose_rows(torch.from_numpy(logits).cuda(), range(500), samplings) == expected
