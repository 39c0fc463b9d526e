"""The LiteRT drafter on tiny models of both forms, which know of nothing but one line of slots. What all drafters do is
in test_cached_drafter.py."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
pytest.importorskip("torch", reason="a tiny model's tokenizer is made with torch's libraries")

from edge.drafters import runtimes
from edge.drafters.cached import PREFILL_ROWS, Row
from edge.drafters.litert import LitertDrafter
from protocol.errors import ConfigError, ModelError
from tests.tools import tiny_litert
from tools.export import litert

PROMPT = [1, 30, 99, 7, 205, 44, 18]


@pytest.fixture(scope="module", params=tiny_litert.SLOTS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_litert.drafter(tmp_path_factory.mktemp("drafter"), form)


@pytest.fixture
def drafter(directory: Path) -> LitertDrafter:
    return LitertDrafter.load(directory)


def assert_as_fresh(directory: Path, drafter: LitertDrafter, row: Row, ids: Sequence[int]) -> None:
    """`row` has the logits that a new drafter gives behind `ids`."""
    fresh = LitertDrafter.load(directory)
    expected = fresh.logits(fresh.prefill(ids))
    assert row.position == len(ids) - 1
    np.testing.assert_allclose(drafter.logits(row), expected, rtol=1e-4, atol=1e-4)


def test_a_text_gives_what_transformers_computes(drafter: LitertDrafter) -> None:
    expected = np.load(tiny_litert.HERE / "logits.npy")  # [ids, width], wider than the vocabulary
    width = drafter.info.vocab_size
    assert width < expected.shape[1]
    for end in range(1, len(tiny_litert.IDS) + 1):
        found = drafter.logits(drafter.prefill(tiny_litert.IDS[:end]))
        np.testing.assert_allclose(found, expected[end - 1, :width], rtol=1e-3, atol=1e-3)


def test_signatures_of_all_lengths_and_single_rows_agree(form: str, directory: Path) -> None:
    """Chunks are filled up, cut to what fits, or taken row by row; near the end of the cache no signature fits."""
    slots = tiny_litert.SLOTS[form]
    ids = [(7 * i) % 250 for i in range(slots)]
    one_by_one = LitertDrafter.load(directory)
    last = one_by_one.prefill(ids[:1])
    expected = {1: one_by_one.logits(last).copy()}
    for position, id in enumerate(ids[1:], 2):
        (last,) = one_by_one.extend([(id, last)])
        one_by_one.keep([last])
        expected[position] = one_by_one.logits(last).copy()
    for length in (2, 3, 5, 9, 10, 17, 40, PREFILL_ROWS, PREFILL_ROWS + 1, slots - 16, slots - 15, slots - 1, slots):
        fresh = LitertDrafter.load(directory)
        seen: list[tuple[int, int]] = []
        row = fresh.prefill(ids[:length], lambda done, total: seen.append((done, total)))  # noqa: B023
        assert seen[-1] == (length, length) and len(seen) == -(-length // PREFILL_ROWS)
        np.testing.assert_allclose(fresh.logits(row), expected[length], rtol=1e-4, atol=1e-4)
    assert fresh.room() == 0


def test_branches_taken_in_turn_stay_whole(directory: Path, drafter: LitertDrafter) -> None:
    """Every row goes on with another branch than the one before, so each is put back where the last one lay."""
    root = drafter.prefill(PROMPT)
    tips = {
        first: ([first], row)
        for first, row in zip((50, 60, 70), drafter.extend([(50, root), (60, root), (70, root)]), strict=True)
    }
    for step in range(1, 5):
        for first, (path, tip) in tips.items():
            (row,) = drafter.extend([(first + step, tip)])
            tips[first] = ([*path, first + step], row)
            assert_as_fresh(directory, drafter, row, PROMPT + tips[first][0])


def test_random_use_equals_fresh_texts(directory: Path, drafter: LitertDrafter) -> None:
    """Trees, kept paths and new texts in any order: every row has the logits of its own text."""
    random = np.random.default_rng(5)
    known: dict[tuple[int, ...], np.ndarray] = {}
    reference = LitertDrafter.load(directory)

    def check(row: Row, ids: Sequence[int]) -> None:
        if tuple(ids) not in known:
            known[tuple(ids)] = reference.logits(reference.prefill(ids)).copy()
        np.testing.assert_allclose(drafter.logits(row), known[tuple(ids)], rtol=1e-4, atol=1e-4)

    text = list(PROMPT)
    root = drafter.prefill(text)
    tree: list[tuple[Row, list[int]]] = []
    for _ in range(60):
        match random.integers(5):
            case 0 if tree:
                row, path = tree[random.integers(len(tree))]
                taken = [next(one for one, its in tree if its == path[: end + 1]) for end in range(len(path))]
                drafter.keep(taken)
                text, root = text + path, row
                tree = [(one, its[len(path) :]) for one, its in tree if its[: len(path)] == path and its != path]
            case 1 if random.integers(2) or drafter.room() < 6:
                cut = int(random.integers(1, len(text) + 1))
                text = [*text[:cut], int(random.integers(250))]
                root, tree = drafter.prefill(text), []
                check(root, text)
            case _ if drafter.room() >= 3:
                at = [(root, []), *tree]
                chosen = [at[random.integers(len(at))] for _ in range(random.integers(1, 4))]
                ids = [int(random.integers(250)) for _ in chosen]
                held = [its for _, its in tree]
                new = [
                    (id, row, [*its, id]) for id, (row, its) in zip(ids, chosen, strict=True) if [*its, id] not in held
                ]
                rows = drafter.extend([(id, row) for id, row, _ in new])
                for row, (_, _, its) in zip(rows, new, strict=True):
                    check(row, text + its)
                    tree.append((row, its))


def test_facts(form: str, directory: Path, drafter: LitertDrafter) -> None:
    facts = json.loads((directory / "manifest.json").read_text())
    assert (facts["runtime"], facts["context"]) == ("litert", tiny_litert.SLOTS[form])
    assert (drafter.info.compute, drafter.info.provider) == ("w32a32", "XNNPACK")
    assert LitertDrafter.load(directory, context=100_000).info.context == tiny_litert.SLOTS[form]
    assert isinstance(runtimes.load(directory), LitertDrafter)
    with pytest.raises(ConfigError, match=r"for the runtime 'litert', not 'onnx'.*kind = \"litert\""):
        runtimes.load(directory, "onnx")


def test_the_manifest_says_what_the_file_computes_in(tmp_path: Path) -> None:
    """Read from the file: int8 weights that are multiplied as they are make int8 of what they are multiplied with."""
    directory = tiny_litert.drafter(tmp_path, "quantised")
    facts = json.loads((directory / "manifest.json").read_text())
    words = {"weights": "int8, a scale for each row", "head": "int8, a scale for each row"}
    assert facts["compute"] == "w8a8" and facts["quantisation"].items() >= words.items()
    drafter = LitertDrafter.load(directory)
    expected = np.load(tiny_litert.HERE / "logits.npy")[-1, : drafter.info.vocab_size]
    found = drafter.logits(drafter.prefill(tiny_litert.IDS))
    assert 0 < np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


def test_the_package_is_asked_for_where_it_is_absent(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(ModelError, match=r"model.tflite: ai-edge-litert cannot be used here.*outrider\[litert\]"):
        LitertDrafter.load(directory)


def cut_file(path: Path) -> None:
    (path / "model.tflite").write_bytes((path / "model.tflite").read_bytes()[:1000])


def flip_weight(path: Path) -> None:
    data = bytearray((path / "model.tflite").read_bytes())
    data[-1000] ^= 1
    (path / "model.tflite").write_bytes(data)


@pytest.mark.parametrize(
    "damage, options, message",
    [
        (cut_file, {}, r"model.tflite: cannot be loaded.*export the model again"),
        (flip_weight, {"verify": True}, r"model.tflite: digest .* is not the manifest's"),
        (lambda path: (path / "model.tflite").unlink(), {}, r"model.tflite: no such file"),
        (lambda path: rename(path, b"decode", b"encode"), {}, r"has the signatures encode, prefill_16, prefill_4\."),
        (lambda path: rename(path, b"input_pos", b"other_pos"), {}, r"has or lacks the input input_pos, other_pos"),
    ],
)
def test_broken_files_are_named(directory: Path, tmp_path: Path, damage, options: dict, message: str) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    damage(copy)
    with pytest.raises(ModelError, match=message):
        LitertDrafter.load(copy, **options)


def rename(path: Path, name: bytes, other: bytes) -> None:
    file = path / "model.tflite"
    file.write_bytes(file.read_bytes().replace(name, other))


def test_a_file_that_is_no_language_model_is_not_wrapped(tmp_path: Path) -> None:
    (tmp_path / "other.tflite").write_bytes(b"no model at all")
    with pytest.raises(ModelError, match=r"other.tflite: cannot be loaded"):
        litert.examine(tmp_path / "other.tflite")
