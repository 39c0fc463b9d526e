"""The shortlist of a drafter's head: always what a text cannot do without, else what is likely."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edge.drafters import runtimes
from native import board
from protocol.errors import ConfigError, ModelError
from protocol.sampling import Sampling, choose
from tests.tools import tiny_models
from tools.corpus import text as corpus
from tools.corpus.text import Written
from tools.export import shortlist, sources, write
from tools.export.__main__ import main
from tools.export.quantised import Options


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> sources.Source:
    return sources.read(str(tiny_models.directory(tmp_path_factory.mktemp("model") / "tiny", "llama")))


def test_holds_the_frequent_and_the_early_and_what_must_be_there():
    counts = np.zeros(1000, np.int64)
    counts[[900, 901]] = 50, 1
    ids = shortlist.choose(counts, 1000, 400, always={0, 998})
    assert ids.dtype == np.int32
    assert len(ids) == 400
    assert np.array_equal(ids, np.unique(ids))
    assert {0, 998} <= set(ids.tolist())
    assert set(range(390)) <= set(ids.tolist())  # the corpus met none of them, BPE order tells
    assert 900 in ids and 901 in ids and 700 not in ids


def test_where_even_the_written_are_too_many_the_rare_ones_go():
    counts = np.arange(1000)
    assert shortlist.choose(counts, 1000, 10, always={3}).tolist() == [3, *range(991, 1000)]


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


def test_every_text_can_be_written_with_the_ids_that_are_always_there(source: sources.Source):
    always = shortlist.always(source)
    vocabulary = tiny_models.tokenizer().get_vocab()
    assert {vocabulary[token] for token in tiny_models.SPECIAL} | set(source.stop_ids) <= always
    alphabet = {id for piece, id in vocabulary.items() if len(piece) == 1}
    assert len(alphabet) == 256
    assert alphabet <= always


@pytest.mark.parametrize(
    "options",
    [Options(), Options(head_bits=4, embedding_bits=4), Options(runtime="native")],
    ids=["8 bits", "4 bits", "native"],
)
def test_a_cut_head_guesses_as_the_whole_one_does_among_its_ids(
    source: sources.Source, tmp_path: Path, options: Options
):
    if options.runtime == "native" and board.find() is None:
        pytest.skip("the board's library cannot be had here")
    ids = shortlist.choose(np.zeros(source.vocab_size, np.int64), source.vocab_size, 290, {source.vocab_size - 1})
    assert not np.array_equal(ids, np.arange(290))
    options = replace(options, embedding_bits=options.embedding_bits or options.head_bits)
    write.write_drafter(source, tmp_path / "whole", options)
    facts = write.write_drafter(source, tmp_path / "cut", options, head_ids=ids)
    assert facts.shortlist == 290
    whole, cut = (runtimes.load(tmp_path / name, context=64, verify=True) for name in ("whole", "cut"))
    for text in ((1, 40, 300, 5), (9, 8, 7)):
        expected, found = (drafter.logits(drafter.prefill(text)).copy() for drafter in (whole, cut))
        assert found.shape == (source.vocab_size,)
        assert np.allclose(found[ids], expected[ids], atol=1e-4)
        assert np.isneginf(np.delete(found, ids)).all()
        # The noise is that of the true ids: what the target draws, where the shortlist has it, the drafter draws too.
        for sampling in (Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=0.8, top_p=0.9, seed=4)):
            row = cut.prefill(text)
            masked = np.full_like(expected, -np.inf)
            masked[ids] = expected[ids]
            assert cut.candidates(row, sampling, 1)[0].id == choose(masked, row.position + 1, sampling)


def test_the_ids_belong_to_the_weights(source: sources.Source, tmp_path: Path):
    ids = np.arange(280, dtype=np.int32)
    write.write_drafter(source, tmp_path / "cut", Options(), head_ids=ids)
    file = tmp_path / "cut" / "head.ids"
    assert file.stat().st_size == 4 * 280
    for damaged, said in (
        (np.arange(279), "280 ascending ids"),
        (np.arange(280)[::-1], "280 ascending ids"),
        (np.arange(280) + source.vocab_size - 279, "280 ascending ids"),
    ):
        file.write_bytes(damaged.astype("<i4").tobytes())
        with pytest.raises(ModelError, match=said):
            runtimes.load(tmp_path / "cut", context=64)
    file.write_bytes((ids + 1).astype("<i4").tobytes())
    with pytest.raises(ModelError, match="digest"):
        runtimes.load(tmp_path / "cut", context=64, verify=True)
    file.unlink()
    with pytest.raises(ModelError, match="no such file"):
        runtimes.load(tmp_path / "cut", context=64)


def test_the_command_chooses_by_what_calibration_wrote(source: sources.Source, tmp_path: Path):
    rare = source.vocab_size - 2
    corpus.append(tmp_path / "corpus.jsonl", Written((1,), (rare,) * 9, "calibration"))
    corpus.append(tmp_path / "corpus.jsonl", Written((1,), (rare - 1,) * 99, "held-out"))
    command = ["drafter", source.origin["path"], str(tmp_path / "out"), "--shortlist", "300"]
    assert CliRunner().invoke(main, command).exit_code == 2
    result = CliRunner().invoke(main, [*command, "--corpus", str(tmp_path / "corpus.jsonl")])
    assert result.exit_code == 0, result.output
    ids = np.fromfile(tmp_path / "out" / "head.ids", "<i4")
    assert len(ids) == 300
    assert rare in ids
    assert rare - 1 not in ids
