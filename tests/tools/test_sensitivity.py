"""What rounding one kind of matrix does to a drafter, beside transformers' own forward pass."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from tests.tools import tiny_models
from tools.bench import sensitivity
from tools.bench.sensitivity import KINDS, TOGETHER, Model, rounded
from tools.corpus import text as corpus
from tools.corpus.text import Written
from tools.export import sources

TEXTS = [
    Written((1, 77, 12, 200, 5), (31, 118, 64, 9, 40, 41, 42), "calibration"),
    Written((9, 8), (7, 130, 5), "calibration"),
]
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.directory(tmp_path_factory.mktemp("model") / "tiny-qwen2", "qwen2")


@pytest.fixture(scope="module")
def source(path: Path) -> sources.Source:
    return sources.read(str(path))


def reference(source: sources.Source, matrices: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Logarithms of the probabilities at each written token of each text, by transformers."""
    model = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32).eval()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(matrices["lm_head.weight"])
    model.load_state_dict({**{name: v.float() for name, v in source.weights.items()}, **matrices}, strict=False)
    found = []
    for one in TEXTS:
        logits = model(torch.tensor([[*one.prompt, *one.text[:-1]]]), logits_to_keep=len(one.text)).logits[0]
        found.append(logits[:, : source.vocab_size].log_softmax(-1))
    return found


@torch.no_grad()
@pytest.mark.parametrize("kind", ["values", "down", "head", "embedding", "all but keys and values"])
def test_the_divergence_is_that_of_the_whole_model_with_these_matrices(source: sources.Source, kind: str) -> None:
    model = Model(source, TEXTS)
    changed = rounded(model.matrices, {**KINDS, **TOGETHER}[kind], 4, 32)
    meant, said = torch.cat(reference(source, model.matrices)), torch.cat(reference(source, changed))
    written = torch.tensor([id for one in TEXTS for id in one.text])
    moved = model.moved(changed)
    assert moved.kl == pytest.approx(float((meant.exp() * (meant - said)).sum(1).mean()), rel=1e-3)
    assert moved.nll == pytest.approx(-float(said[torch.arange(len(written)), written].mean()), rel=1e-5)
    assert model.moved(model.matrices).kl == pytest.approx(0, abs=1e-9)


def test_each_kind_is_rounded_by_itself(source: sources.Source) -> None:
    matrices = Model(source, TEXTS).matrices
    changed = {
        kind: {name for name, now in rounded(matrices, ends, 4, 32).items() if not torch.equal(now, matrices[name])}
        for kind, ends in {**KINDS, **TOGETHER}.items()
    }
    assert set.union(*(changed[kind] for kind in KINDS)) == changed["all"] == set(matrices)
    assert sum(len(changed[kind]) for kind in KINDS) == len(matrices)
    assert changed["all"] - changed["all but keys and values"] == changed["keys"] | changed["values"]


def test_the_record_has_every_kind(path: Path, tmp_path: Path) -> None:
    for one in TEXTS:
        corpus.append(tmp_path / "corpus.jsonl", one)
    words = ["--model", str(path), "--corpus", str(tmp_path / "corpus.jsonl"), "--threads", "1"]
    result = CliRunner().invoke(sensitivity.main, words, catch_exceptions=False)
    record = json.loads(result.stdout.splitlines()[-1])
    assert [row["kind"] for row in record["rows"]] == [*KINDS, *TOGETHER]
    assert record["positions"] == sum(len(one.text) for one in TEXTS)
    by_kind = {row["kind"]: row for row in record["rows"]}
    assert by_kind["all"]["weights"] == sum(by_kind[kind]["weights"] for kind in KINDS)
    assert by_kind["all"]["kl"] > by_kind["keys"]["kl"] > 0
    assert math.isfinite(by_kind["all"]["perplexity_percent"])
