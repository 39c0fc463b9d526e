"""The benchmark of the law: what it measures is what an engine serves and a board drafts, and its figures are right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch", reason="the target needs torch")

import torch

from cloud.engines import torch_engine
from cloud.engines.base import Plan, Work
from cloud.engines.model import load_model
from cloud.engines.numerics import Numerics
from edge.drafters import manifest, runtimes
from edge.text import Text
from protocol.errors import ModelError
from protocol.sampling import Sampling, choose, rank
from tests.tools import tiny_models
from tools.bench import law
from tools.export import graph, sources, write

SAMPLED = Sampling(temperature=1.0, seed=5)
CUT = Sampling(temperature=0.8, top_p=0.95, seed=5)
LENGTH = 12
torch.set_num_threads(1)  # tiny products gain nothing from threads that wait for each other


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A drafter with 4-bit weights and the target that it was made from.

    float32 activations, so that another batch shape moves logits in the last bits only.
    """
    where = tmp_path_factory.mktemp("pair")
    source = sources.read(str(tiny_models.directory(where / "hf", "qwen2")))
    write.write_drafter(source, where / "drafter", graph.Options(accuracy_level=1))
    write.write_target(source, where / "target")
    return where / "drafter", where / "target"


def write_all(target: Path, sampling: Sampling, *, positions: int, sessions: int) -> list[law.Sample]:
    facts = manifest.read(target, "target")
    forward = load_model(target, facts.dtype, Numerics())
    writer = law.Writer(forward, Text.load(target, facts), facts.vocab_size)
    return list(writer.write(sampling, positions, sessions, LENGTH, lambda more: None))


@pytest.mark.parametrize("sampling", [SAMPLED, CUT], ids=["t1", "t0.8-p0.95"])
def test_texts_are_those_that_an_engine_serves(pair, sampling):
    texts = write_all(pair[1], sampling, positions=100, sessions=4)
    stop_ids = manifest.read(pair[1], "target").stop_ids
    engine = torch_engine.load(pair[1], Numerics(), threads=1)
    for text in texts:
        engine.open(1, text.ids[: text.prompt], text.sampling, len(text.ids))
        served = list(text.ids[: text.prompt])
        while len(served) < len(text.ids):
            served += engine.step(Plan([Work(1, engine.pending(1))])).accepted[1]
        engine.close(1)
        assert served == text.ids
        assert not set(text.ids[text.prompt : -1]) & set(stop_ids)
    assert sum(len(text.logits) for text in texts) >= 100
    assert len({text.sampling.seed for text in texts}) == len(texts)
    ended = [text for text in texts if len(text.logits) == LENGTH or text.ids[-1] in stop_ids]
    assert len(texts) - len(ended) <= 4  # only those that were being written when there were enough


def test_logits_are_those_that_the_tokens_were_drawn_from(pair):
    for text in write_all(pair[1], SAMPLED, positions=40, sessions=3):
        drawn = [
            choose(row.float().numpy(), position, text.sampling)
            for position, row in enumerate(text.logits, text.prompt)
        ]
        assert drawn == text.ids[text.prompt :]


def test_drafter_reads_what_it_would_draft_from(pair, monkeypatch):
    """In chains that end in mid-text, at its end, and a single row behind the prompt."""
    drafter = runtimes.load(pair[0])
    text = write_all(pair[1], SAMPLED, positions=LENGTH, sessions=1)[0]
    assert len(text.logits) > 5
    for chain in (1, 4, len(text.logits) - 1, 64):
        monkeypatch.setattr(law, "CHAIN", chain)
        found = [row.copy() for row in law.read(drafter, text)]
        assert len(found) == len(text.logits)
        fresh = runtimes.load(pair[0])
        for position, row in enumerate(found, text.prompt):
            alone = fresh.logits(fresh.prefill(text.ids[:position]))
            np.testing.assert_allclose(row, alone, atol=1e-3 * np.abs(alone).max())


def test_drafts_are_what_the_board_would_send(pair):
    drafter, board = runtimes.load(pair[0]), runtimes.load(pair[0])
    right = []
    for text in write_all(pair[1], SAMPLED, positions=60, sessions=5):
        for position, figures in enumerate(law.compare(drafter, text), text.prompt):
            row = board.prefill(text.ids[:position])
            for sampling, hit in ((text.sampling, figures.coupled), (Sampling(), figures.top_1)):
                (draft,) = board.candidates(row, sampling, 1)
                assert hit == (draft.id == text.ids[position])
            right.append((figures.coupled, figures.top_1))
    assert 0 < np.mean(right, axis=0)[0] < 1 and 0 < np.mean(right, axis=0)[1] < 1


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"top_k": 7}, {"top_k": 40, "top_p": 0.5}],
    ids=["t1", "t0.8-p0.95", "k7", "k40-p0.5"],
)
@pytest.mark.parametrize("spread", [0.1, 3.0, 20.0])
def test_distribution_is_the_one_that_is_drawn_from(parameters, spread):
    sampling = Sampling(**{"temperature": 0.6, **parameters})
    rng = np.random.default_rng(3)
    logits = (rng.standard_normal(500) * spread).round(1).astype(np.float32)  # with equals
    logits[::50] = -np.inf
    ids, probabilities = rank(logits, 9, sampling, logits.size)
    found = law.distribution(logits, sampling)
    assert set(np.flatnonzero(found)) == set(ids)
    np.testing.assert_allclose(found[ids], probabilities, rtol=1e-9)


def shares(probabilities: Sequence[float]) -> np.ndarray:
    return np.array(probabilities) / sum(probabilities)


def test_agreement_by_hand():
    p, q = shares([1, 1, 2, 0]), shares([2, 1, 0, 1])
    # The formula, term by term: the shared ids 0 and 1, each against all ids.
    by_hand = 1 / (1 + 1 + 2 + 0.5) + 1 / (2 + 1 + 2 + 1)
    assert law.agreement(p, q) == pytest.approx(by_hand)
    assert law.agreement(p, p) == pytest.approx(1.0)
    assert law.agreement(shares([1, 0]), shares([0, 1])) == 0.0


@pytest.mark.parametrize("parameters", [{"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}], ids=["t1", "p0.9"])
def test_agreement_is_what_shared_noise_gives(parameters):
    rng = np.random.default_rng(11)
    theirs = rng.standard_normal(60).astype(np.float32) * 2
    ours = theirs + rng.standard_normal(60).astype(np.float32)
    sampling = Sampling(seed=1, **parameters)
    draws = 5_000
    same = np.mean([choose(theirs, i, sampling) == choose(ours, i, sampling) for i in range(draws)])
    p, q = law.distribution(theirs, sampling), law.distribution(ours, sampling)
    expected = law.agreement(p, q)
    one_minus_tv = np.minimum(p, q).sum()
    assert one_minus_tv / (2 - one_minus_tv) < expected < one_minus_tv < 0.9
    assert same == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / draws))


def test_interval_counts_texts_not_positions():
    rng = np.random.default_rng(2)
    mixed = [(rng.random(100) < 0.5).astype(float) for _ in range(20)]
    alike = [np.full(100, float(i % 2)) for i in range(20)]
    low, high = law.interval(mixed)
    assert low < 0.5 < high and high - low < 0.07  # 4 errors of 2,000 independent positions are 0.045
    low, high = law.interval(alike)
    assert low < 0.5 < high and 0.35 < high - low < 0.55  # 4 errors of 20 independent texts are 0.45


def test_long_texts_weigh_more():
    figures = np.zeros((90, len(law.Position._fields))), np.ones((10, len(law.Position._fields)))
    assert law.summarise(figures)["coupled"]["mean"] == 0.1


def test_record_of_a_pair(pair):
    seen: dict[str, int] = {}

    def report(task: str, more: int) -> None:
        seen[task] = seen.get(task, 0) + more

    record = law.measure(*pair, threads=1, positions=400, sessions=8, length=LENGTH, report=report)
    assert record == msgspec.json.decode(msgspec.json.encode(record))
    assert record["drafter"]["compute"] == manifest.read(pair[0], "drafter").compute
    assert record["target"]["numerics"] == "fast-float32"
    assert [(s["temperature"], s["top_p"]) for s in record["settings"]] == [(1.0, 1.0), (0.8, 0.95)]
    assert len(seen) == 4
    for setting in record["settings"]:
        assert 400 <= setting["positions"] < 408
        assert setting["positions"] in seen.values()
        means = {name: figure["mean"] for name, figure in setting.items() if isinstance(figure, dict)}
        assert means["lower_bound"] < means["expected"] < means["one_minus_tv"] < 1
        # Seeds are fixed. A drafter that read at the wrong place, or drew with other noise, would be far off.
        assert means["one_minus_tv"] > 0.6
        assert abs(means["coupled_minus_expected"]) < 0.07
        for one, other in (("coupled", "one_minus_tv"), ("coupled", "expected"), ("expected", "one_minus_tv")):
            assert means[one] - means[other] == pytest.approx(means[f"{one}_minus_{other}"], abs=2e-4)
        low, high = setting["coupled"]["interval_95"]
        assert low < means["coupled"] < high


def test_pairs_of_two_tokenizers_are_refused(pair, tmp_path):
    other = tmp_path / "drafter"
    other.mkdir()
    for file in pair[0].iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "tokenizer.json").write_text((pair[0] / "tokenizer.json").read_text() + " ")
    facts = msgspec.json.decode((other / "manifest.json").read_bytes())
    facts["tokenizer_digest"] = manifest.digest(other / "tokenizer.json")
    (other / "manifest.json").write_bytes(msgspec.json.encode(facts))
    with pytest.raises(ModelError, match="tokenizer"):
        law.measure(other, pair[1], threads=1)
