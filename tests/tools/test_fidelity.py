"""Fidelity: what a drafter guesses of the target's text, how surely two differ, and what rounding does to it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats
from transformers import AutoModelForCausalLM

from edge.drafters import runtimes
from protocol.errors import ModelError
from tests.tools import tiny_models
from tools.bench import fidelity
from tools.bench.fidelity_scores import Scored, acceptance, formula, paired, perplexity, score, tokens_a_round
from tools.bench.fidelity_subjects import Exported, Scheme, Simulated, round_rows
from tools.corpus import text as corpus
from tools.corpus.text import Written
from tools.export import sources, write
from tools.export.quantise import dequantise, quantise, rounded
from tools.export.quantised import Options

PROMPT, TEXT = (1, 77, 12, 200, 5), (31, 118, 64, 9, 40, 41, 42)
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.directory(tmp_path_factory.mktemp("model") / "tiny-qwen2", "qwen2")


@pytest.fixture(scope="module")
def source(model: Path) -> sources.Source:
    return sources.read(str(model))


@pytest.fixture(scope="module")
def export(source: sources.Source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("export") / "drafter"
    write.write_drafter(source, out, Options(accuracy_level=1))
    return out


def hits(*texts: str) -> list[Scored]:
    return [Scored(np.array([c == "x" for c in text]), np.zeros(len(text))) for text in texts]


def test_a_hit_is_the_target_s_token_and_its_loss_is_its_probability():
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 5.0]])
    found = score(logits, [1, 2, 2])
    assert found.hits.tolist() == [True, False, True]
    assert np.allclose(found.nll, -logits.log_softmax(1)[[0, 1, 2], [1, 2, 2]].numpy())
    assert acceptance([found, found]) == pytest.approx(2 / 3)
    assert perplexity([found]) == pytest.approx(math.exp(found.nll.mean()))


def test_a_shortlist_cannot_guess_what_it_lacks():
    logits = torch.tensor([[0.0, 2.0, 1.0, 0.0], [0.0, 9.0, 1.0, 0.0], [0.0, 3.0, 1.0, 2.0]])
    found = score(logits, [1, 2, 3], np.array([0, 2, 3], np.int32))
    assert found.hits.tolist() == [False, True, True]
    assert found.nll[0] == math.inf
    assert found.nll[1] == pytest.approx(-float(logits[1, [0, 2, 3]].log_softmax(0)[1]))
    assert perplexity([found]) == math.inf


def test_tokens_a_round_are_those_of_walking_every_round():
    texts = hits("xx.xxx.", "x", "xxxx")
    walked = []
    for text in texts:
        for start in range(len(text.hits) - 2 + 1):
            guesses = text.hits[start : start + 2]
            walked.append(1 + (2 if guesses.all() else int(guesses[0])))
    assert tokens_a_round(texts, 2) == pytest.approx(np.mean(walked))
    assert math.isnan(tokens_a_round(hits("xx"), 4))


def test_tokens_a_round_meet_the_formula_where_hits_are_independent():
    rng = np.random.default_rng(5)
    texts = [Scored(rng.random(500) < 0.8, np.zeros(500)) for _ in range(100)]
    for draft in (4, 8):
        assert tokens_a_round(texts, draft) == pytest.approx(formula(0.8, draft), rel=0.02)
    assert formula(1.0, 4) == 5


def test_the_bound_covers_the_truth_where_texts_differ_from_each_other():
    """Texts of which one drafter is better at some and worse at others: a bound that took positions as independent
    would be a quarter as wide, and miss most of the time."""
    rng = np.random.default_rng(8)
    inside = 0
    for _ in range(200):
        tilt = rng.normal(0, 0.3, 40)
        ours = [rng.random(100) < np.clip(0.5 + t, 0, 1) for t in tilt]
        found = paired(ours, [rng.random(100) < 0.5 for _ in tilt])
        inside += abs(found.mean) < found.bound
    assert stats.binom.cdf(inside, 200, 0.95) > 0.001
    assert stats.binom.sf(inside - 1, 200, 0.95) > 0.001


def test_a_difference_is_of_the_same_positions():
    ours, theirs = hits("xxx.", "x..x"), hits("xx..", "x.xx")
    found = paired([t.hits for t in ours], [t.hits for t in theirs])
    assert found.mean == 0
    assert paired([t.hits for t in ours], [t.hits for t in ours]).bound == 0
    assert paired([ours[0].hits], [theirs[0].hits]).bound == math.inf


def test_rounding_is_what_an_export_would_hold():
    torch.manual_seed(1)
    weight = torch.randn(70, 50)
    for bits, symmetric in ((4, False), (8, True)):
        expected = dequantise(quantise(weight, bits, 16, symmetric))
        assert torch.equal(rounded(weight, bits, 16, symmetric), expected)
    three = rounded(weight, 3, 16, False)
    assert all(len(group.unique()) <= 8 for row in three for group in row.split(16))
    errors = [float((rounded(weight, bits, 16, False) - weight).norm()) for bits in (3, 4, 8)]
    assert errors[0] > 1.7 * errors[1] > 1.7 * errors[2]


def test_activations_are_rounded_by_group_and_row():
    x = torch.tensor([[[127.0, 1.4, 0.0, 0.0, 1.27, 0.014]], [[0.0, 0.0, 0.0, 0.0, 7.0, 3.4]]])
    assert torch.allclose(round_rows(x, 8, 4)[0], torch.tensor([[127.0, 1.0, 0.0, 0.0, 1.27, 0.01]]))
    assert torch.allclose(round_rows(x, 4, 4)[1], torch.tensor([[0.0, 0.0, 0.0, 0.0, 7.0, 3.0]]))


def test_sixteen_bits_are_the_model_itself_also_after_another_scheme(source: sources.Source, model: Path):
    ids = torch.tensor([[*PROMPT, *TEXT]])
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0]
    expected = reference[len(PROMPT) - 1 : -1, : source.vocab_size]
    subject = Simulated(source, 32)
    assert torch.allclose(subject.logits(PROMPT, TEXT), expected, atol=1e-5)

    def error(weights: int, activations: int) -> float:
        subject.use(Scheme(weights, activations))
        return float((subject.logits(PROMPT, TEXT) - expected).norm())

    assert 0 < 5 * error(8, 16) < error(4, 16) < error(3, 16)
    assert 0 < 5 * error(16, 8) < error(16, 4)
    subject.use(Scheme(16, 16))
    assert torch.allclose(subject.logits(PROMPT, TEXT), expected, atol=1e-5)


def test_an_export_is_scored_as_its_simulation(source: sources.Source, export: Path, monkeypatch: pytest.MonkeyPatch):
    """Through prefill, chains and keep, cut at another place than the text's end."""
    monkeypatch.setattr("tools.bench.fidelity_subjects.CHAIN", 4)
    simulated = Simulated(source, 32)
    simulated.use(Scheme(4, 16))
    exported = Exported(runtimes.load(export, context=64))
    for text in (TEXT, TEXT[:1], TEXT[:5]):
        assert torch.allclose(exported.logits(PROMPT, text), simulated.logits(PROMPT, text), atol=2e-4)


@pytest.fixture
def texts(source: sources.Source, tmp_path: Path) -> Path:
    """Greedy texts of the model itself: unquantised it must guess them all."""
    subject = Simulated(source, 32)
    for number in range(6):
        prompt, written = (1, 20 + number, 30), []
        for _ in range(24):
            written.append(int(subject.logits((*prompt, *written), (0,)).argmax()))
        split = "calibration" if number % 3 else "held-out"
        corpus.append(tmp_path / "corpus.jsonl", Written(prompt, tuple(written), split))
    return tmp_path / "corpus.jsonl"


def test_the_benchmark_s_record(model: Path, source: sources.Source, export: Path, texts: Path, tmp_path: Path):
    write.write_drafter(
        source, tmp_path / "cut", Options(accuracy_level=1), head_ids=np.arange(0, 300, 2, dtype=np.int32)
    )
    (tmp_path / "plain.txt").write_text("the cat sat on the hat, and one two three 456")
    result = CliRunner().invoke(
        fidelity.main,
        ["--model", str(model), "--corpus", str(texts), "--text", str(tmp_path / "plain.txt"), "--scheme", "W4A16",
         "--scheme", "W4A4", "--export", f"board={export}", "--export",
         f"cut={tmp_path / 'cut'}", "--shortlist", "300", "--threads", "1",
         "--picture", str(tmp_path / "picture.svg"), "--keep", str(tmp_path / "kept")],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["texts"] == 2 and record["positions"] == 48  # held out, not calibration's
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows) == ["16-bit", "W4A16", "W4A4", "board", "cut", "16-bit, 300 ids"]
    assert rows["16-bit"]["acceptance"] == 1.0
    assert rows["16-bit"]["tokens_a_round"]["4"] == {"measured": 5.0, "formula": 5.0}
    assert rows["16-bit"]["acceptance_points"] == {"difference": 0.0, "bound_95": 0.0}
    assert rows["board"]["acceptance"] == rows["W4A16"]["acceptance"]  # float32 activations: the same products
    assert rows["board"]["perplexity"]["value"] == pytest.approx(rows["W4A16"]["perplexity"]["value"], rel=1e-3)
    (between,) = record["exports"]
    assert (between["name"], between["over"]) == ("cut", "board") and between["bound_95"] > 0
    difference = 100 * (rows["cut"]["acceptance"] - rows["board"]["acceptance"])
    assert between["difference"] == pytest.approx(difference, abs=0.02) and difference < 0
    assert rows["W4A4"]["perplexity"]["percent"] > rows["W4A16"]["perplexity"]["percent"] > 0
    points = rows["W4A4"]["acceptance_points"]["difference"]
    assert points == pytest.approx(100 * (rows["W4A4"]["acceptance"] - 1), abs=0.01)
    assert rows["W4A4"]["plain_perplexity"]["value"] > 1
    assert (tmp_path / "picture.svg").read_text().lstrip().startswith("<?xml")


def test_scores_that_are_kept_are_not_measured_again(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ["--model", str(model), "--corpus", str(texts), "--threads", "1", "--scheme", "W4A16"]

    def rows(*options: str) -> list[dict]:
        result = CliRunner().invoke(fidelity.main, [*command, *options])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["rows"]

    keep = "--keep", str(tmp_path / "kept")
    expected = rows()
    assert rows(*keep) == expected
    asked = []
    monkeypatch.setattr(fidelity.Simulated, "use", lambda self, scheme: asked.append(scheme.name))
    assert rows(*keep) == expected
    assert asked == []
    rows(*keep, "--positions", "10")  # of one text
    assert asked == ["16-bit", "W4A16"]


def test_an_export_of_another_vocabulary_is_refused(source: sources.Source, texts: Path, export: Path, tmp_path: Path):
    facts = json.loads((export / "manifest.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for file in export.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "manifest.json").write_text(json.dumps({**facts, "vocab_size": facts["vocab_size"] + 1}))
    with pytest.raises(ModelError, match="its vocabulary has"):
        fidelity._row("other", other, source)
