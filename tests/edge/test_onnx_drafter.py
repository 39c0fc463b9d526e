"""The ONNX drafter says what runs, and names what is broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="a tiny model is made with torch")

from edge.drafters.onnx import OnnxDrafter
from protocol.errors import ModelError
from tests.tools import tiny_models
from tools.export import sources, write
from tools.export.quantised import Options


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("drafter")
    source = sources.read(str(tiny_models.directory(where / "hf", "llama")))
    write.write_drafter(source, where / "out", Options(accuracy_level=1))
    return where / "out"


def test_it_says_what_it_computes_with(directory: Path) -> None:
    info = OnnxDrafter.load(directory).info
    assert (info.compute, info.provider) == ("w4a32", "CPUExecutionProvider")


def break_nothing(_: Path) -> None: ...


def cut_graph(path: Path) -> None:
    (path / "model.onnx").write_bytes((path / "model.onnx").read_bytes()[:1000])


def cut_weights(path: Path) -> None:
    (path / "model.onnx.data").write_bytes(b"short")


def flip_weight(path: Path) -> None:
    data = bytearray((path / "model.onnx.data").read_bytes())
    data[1234] ^= 1
    (path / "model.onnx.data").write_bytes(data)


def other_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").write_text((path / "tokenizer.json").read_text() + " ")


def other_kind(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text().replace('"drafter"', '"target"'))


@pytest.mark.parametrize(
    "damage, options, message",
    [
        (cut_graph, {}, r"model.onnx: cannot be loaded.*export the model again"),
        (cut_weights, {}, r"model.onnx: cannot be loaded"),
        (flip_weight, {"verify": True}, r"model.onnx.data: digest .* is not the manifest's"),
        (other_tokenizer, {}, r"tokenizer.json: digest .* is not the manifest's"),
        (other_kind, {}, r"manifest.json: holds a target, not a drafter"),
        (lambda path: (path / "model.onnx.data").unlink(), {}, r"model.onnx.data: no such file"),
        (lambda path: (path / "tokenizer.json").unlink(), {}, r"tokenizer.json: No such file"),
        (lambda path: (path / "manifest.json").unlink(), {}, r"manifest.json: no manifest.*tools.export drafter"),
        (lambda path: (path / "manifest.json").write_text("{"), {}, r"manifest.json: not a manifest"),
        (break_nothing, {"providers": ["TPUExecutionProvider"]}, r"'TPUExecutionProvider' is not usable.*choose from"),
    ],
)
def test_broken_directories_are_named(directory: Path, tmp_path: Path, damage, options: dict, message: str) -> None:
    copy = shutil.copytree(directory, tmp_path / "copy")
    damage(copy)
    with pytest.raises(ModelError, match=message):
        OnnxDrafter.load(copy, **options)
