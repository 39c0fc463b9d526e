"""Drafters on a tiny model: rows of a tree, kept paths and reused prefixes give what a fresh text gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="a tiny model is made with torch")

from edge.drafters import runtimes
from edge.drafters.base import Candidate
from edge.drafters.cached import PREFILL_ROWS, CachedDrafter, Row
from protocol.errors import ModelError
from protocol.noise import gumbel
from protocol.sampling import Sampling
from tests.tools import tiny_litert, tiny_models
from tools.export import sources, write
from tools.export.quantised import Options

GREEDY = Sampling()
PROMPT = [1, 30, 99, 7, 205, 44, 18]


@pytest.fixture(scope="module", params=("llama onnx", "llama native", "qwen2 native", "llama litert"))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float32 activations for ONNX Runtime, so that another batch shape moves logits in the last bits only."""
    architecture, runtime = request.param.split()
    where = tmp_path_factory.mktemp("drafter")
    if runtime == "litert":
        pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
        return tiny_litert.drafter(where, "masked")
    source = sources.read(str(tiny_models.directory(where / "hf", architecture)))
    write.write_drafter(source, where / "out", Options(runtime=runtime, accuracy_level=1))
    return where / "out"


@pytest.fixture
def drafter(directory: Path) -> CachedDrafter:
    return runtimes.load(directory)


def distribution(drafter: CachedDrafter, row: Row) -> np.ndarray:
    """Probabilities by id."""
    found = np.zeros(drafter.info.vocab_size)
    for candidate in drafter.candidates(row, GREEDY, drafter.info.vocab_size):
        found[candidate.id] = candidate.probability
    return found


def assert_as_fresh(directory: Path, drafter: CachedDrafter, row: Row, ids: Sequence[int]) -> None:
    """`row` predicts what a new drafter predicts behind `ids`."""
    fresh = runtimes.load(directory)
    expected = distribution(fresh, fresh.prefill(ids))
    found = distribution(drafter, row)
    assert row.position == len(ids) - 1
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


def test_text_and_context_matter(directory: Path, drafter: CachedDrafter) -> None:
    first = distribution(drafter, drafter.prefill(PROMPT))
    other = distribution(drafter, drafter.prefill([2, *PROMPT[1:]]))
    assert abs(first.sum() - 1) < 1e-6
    assert np.abs(first - other).max() > 1e-3


def test_long_prompts_are_evaluated_in_chunks(directory: Path, drafter: CachedDrafter) -> None:
    ids = [(7 * i) % 250 for i in range(2 * PREFILL_ROWS + 5)]
    seen: list[tuple[int, int]] = []
    row = drafter.prefill(ids, lambda done, total: seen.append((done, total)))
    assert seen == [(PREFILL_ROWS, len(ids)), (2 * PREFILL_ROWS, len(ids)), (len(ids), len(ids))]
    for start in range(0, len(ids), 50):
        one_by_one = runtimes.load(directory)
        last = one_by_one.prefill(ids[: start + 1])
        for id in ids[start + 1 :]:
            (last,) = one_by_one.extend([(id, last)])
        np.testing.assert_allclose(distribution(one_by_one, last), distribution(drafter, row), rtol=1e-3, atol=1e-6)


def test_tree_rows_equal_plain_paths(directory: Path, drafter: CachedDrafter) -> None:
    root = drafter.prefill(PROMPT)
    # Two branches, siblings, and parents given as rows and as indices of the same call.
    a, b = drafter.extend([(50, root), (60, root)])
    rows = drafter.extend([(51, a), (61, b), (52, 0), (53, 0), (62, 1), (54, 2)])
    paths = [[50, 51], [60, 61], [50, 51, 52], [50, 51, 53], [60, 61, 62], [50, 51, 52, 54]]
    for row, path in zip(rows, paths, strict=True):
        assert_as_fresh(directory, drafter, row, PROMPT + path)


def test_keep_moves_the_path_and_what_hangs_on_it(directory: Path, drafter: CachedDrafter) -> None:
    root = drafter.prefill(PROMPT)
    drop, kept = drafter.extend([(50, root), (60, root)])
    _, middle, sibling = drafter.extend([(51, drop), (61, kept), (63, kept)])
    (leaf,) = drafter.extend([(62, middle)])
    drafter.keep([kept])
    assert drafter.room() == drafter.info.context - len(PROMPT) - 4
    below, beside = drafter.extend([(70, leaf), (71, sibling)])
    assert_as_fresh(directory, drafter, below, [*PROMPT, 60, 61, 62, 70])
    assert_as_fresh(directory, drafter, beside, [*PROMPT, 60, 63, 71])
    drafter.keep([middle, leaf, below])
    assert drafter.room() == drafter.info.context - len(PROMPT) - 4
    (after,) = drafter.extend([(80, below)])
    assert_as_fresh(directory, drafter, after, [*PROMPT, 60, 61, 62, 70, 80])


def test_kept_row_can_still_be_asked_for_candidates(directory: Path, drafter: CachedDrafter) -> None:
    root = drafter.prefill(PROMPT)
    _, row = drafter.extend([(50, root), (60, root)])
    drafter.keep([row])
    drafter.keep([])
    assert_as_fresh(directory, drafter, row, [*PROMPT, 60])


def test_prefill_reuses_text_and_tree(directory: Path, drafter: CachedDrafter) -> None:
    prompt = [(5 * i) % 250 for i in range(PREFILL_ROWS + 10)]
    root = drafter.prefill(prompt)
    _, b = drafter.extend([(50, root), (60, root)])
    drafter.extend([(61, b)])
    seen: list[int] = []
    row = drafter.prefill([*prompt, 60, 61, 62], lambda done, _: seen.append(done))
    assert len(seen) == 1  # one pass where the whole text would take two
    assert_as_fresh(directory, drafter, row, [*prompt, 60, 61, 62])
    changed = [*prompt[:20], 200, *prompt[21:]]
    assert_as_fresh(directory, drafter, drafter.prefill(changed), changed)
    assert_as_fresh(directory, drafter, drafter.prefill(changed[:20]), changed[:20])


def test_candidates_rank_by_the_noise_of_their_position(drafter: CachedDrafter) -> None:
    row = drafter.prefill(PROMPT)
    likely = distribution(drafter, row)
    best = drafter.candidates(row, GREEDY, 3)
    assert [c.id for c in best] == list(np.argsort(-likely, kind="stable")[:3])
    sampling = Sampling(temperature=1.0, seed=11)
    ids = np.arange(drafter.info.vocab_size)
    scores = np.log(likely) + gumbel(11, len(PROMPT), ids)
    found = drafter.candidates(row, sampling, 5)
    assert [c.id for c in found] == list(np.argsort(-scores, kind="stable")[:5])
    assert found[0] == Candidate(found[0].id, pytest.approx(likely[found[0].id], rel=1e-6))


def test_candidates_are_ids_the_tokenizer_has(drafter: CachedDrafter) -> None:
    row = drafter.prefill(PROMPT)
    ids = {c.id for c in drafter.candidates(row, GREEDY, 10_000)}
    assert ids == set(range(tiny_models.tokenizer().get_vocab_size()))


def test_context_is_a_limit_and_an_error_leaves_the_text(directory: Path) -> None:
    drafter = runtimes.load(directory, context=8)
    with pytest.raises(ModelError, match=r"9 tokens do not fit the context of 8.*larger context"):
        drafter.prefill(list(range(9)))
    root = drafter.prefill(PROMPT)
    assert drafter.room() == 1
    with pytest.raises(ModelError, match=r"9 tokens"):
        drafter.extend([(50, root), (60, root)])
    (row,) = drafter.extend([(50, root)])
    assert_as_fresh(directory, drafter, row, [*PROMPT, 50])
    assert drafter.room() == 0


def test_context_never_exceeds_the_model(directory: Path) -> None:
    assert runtimes.load(directory, context=100_000).info.context == 256


def test_bad_ids_and_forgotten_rows_are_refused(directory: Path, drafter: CachedDrafter) -> None:
    root = drafter.prefill(PROMPT)
    for id in (-1, drafter.info.vocab_size):
        with pytest.raises(ModelError, match=rf"id {id} is not in the vocabulary"):
            drafter.extend([(id, root)])
        with pytest.raises(ModelError, match=rf"id {id} is not in the vocabulary"):
            drafter.prefill([*PROMPT, id])
    with pytest.raises(ModelError, match="empty text"):
        drafter.prefill([])
    a, b = drafter.extend([(50, root), (60, root)])
    with pytest.raises(ValueError, match="does not follow"):
        drafter.keep([b, a])
    with pytest.raises(ValueError, match="latest pass"):
        drafter.candidates(root, GREEDY, 1)
    drafter.keep([b])
    with pytest.raises(ValueError, match="no longer in the tree"):
        drafter.extend([(51, a)])
    with pytest.raises(ValueError, match="no longer in the tree"):
        drafter.extend([(51, root)])
    (row,) = drafter.extend([(61, b)])
    assert_as_fresh(directory, drafter, row, [*PROMPT, 60, 61])


def test_facts(directory: Path, drafter: CachedDrafter) -> None:
    facts = json.loads((directory / "manifest.json").read_text())
    info = drafter.info
    assert (info.name, info.compute) == (facts["name"], facts["compute"])
    assert (info.tokenizer_digest, info.weights_digest) == (facts["tokenizer_digest"], facts["weights_digest"])
