"""The shortlist of a drafter's head: always what a text cannot do without, else what is likely."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from protocol.errors import ConfigError
from tests.tools import tiny_models
from tools.export import shortlist, sources


def test_holds_the_frequent_and_the_early_and_what_must_be_there():
    counts = np.zeros(1000, np.int64)
    counts[[900, 901]] = 50, 40
    ids = shortlist.choose(counts, 1000, 400, always={0, 998})
    assert ids.dtype == np.int32
    assert len(ids) == 400
    assert np.array_equal(ids, np.unique(ids))
    assert {0, 998} <= set(ids.tolist())
    assert set(range(390)) <= set(ids.tolist())  # the corpus met none of them, BPE order tells
    assert 700 not in ids


def test_what_was_written_often_comes_before_its_neighbours_that_were_not():
    counts = np.zeros(1000, np.int64)
    counts[450] = 7
    ids = set(shortlist.choose(counts, 1000, 400, always=()).tolist())
    assert 450 in ids
    assert 449 not in ids and 451 not in ids


def test_a_longer_list_holds_the_shorter_one():
    counts = np.random.default_rng(3).integers(0, 9, 500)
    sizes = [60, 100, 300, 500]
    lists = [set(shortlist.choose(counts, 500, m, {3, 499}).tolist()) for m in sizes]
    assert all(a < b for a, b in pairwise(lists))
    assert lists[-1] == set(range(500))


@pytest.mark.parametrize("m", [1, 501])
def test_a_size_that_cannot_be_is_refused(m: int):
    with pytest.raises(ConfigError, match=r"2\.\.500"):
        shortlist.choose(np.zeros(500, np.int64), 500, m, {3, 499})


def test_every_text_can_be_written_with_the_ids_that_are_always_there(tmp_path):
    source = sources.read(str(tiny_models.directory(tmp_path / "tiny", "llama")))
    always = shortlist.always(source)
    vocabulary = tiny_models.tokenizer().get_vocab()
    assert {vocabulary[token] for token in tiny_models.SPECIAL} | set(source.stop_ids) <= always
    alphabet = {id for piece, id in vocabulary.items() if len(piece) == 1}
    assert len(alphabet) == 256
    assert alphabet <= always
