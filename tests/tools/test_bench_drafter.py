"""The drafter's benchmark: rivals that do the same work, bytes that a pass reads, and what the record says of both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

pytest.importorskip("torch", reason="a tiny model is made with torch")
pytest.importorskip("onnxruntime", reason="one of the rivals")

import torch
from transformers import AutoModelForCausalLM

from native import compiling
from tests.tools import tiny_models
from tools.bench import drafter, llama, reads
from tools.bench.bandwidth import Stream
from tools.bench.rivals import CONTEXT, ROWS, TEXT, Spec
from tools.export import sources, write
from tools.export.quantised import Options

CACHE_BYTES = 2 * 2 * 2 * 16 * 4  # of a token of the tiny model: key and value, layers, heads, their width, float32


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("drafters")
    source = sources.read(str(tiny_models.directory(where / "hf", "llama", tied=False)))
    for runtime in ("native", "onnx"):
        write.write_drafter(source, where / runtime, Options(runtime=runtime))
    return {runtime: where / runtime for runtime in ("native", "onnx")}


def test_a_pass_reads_its_weights_once_and_the_cache_of_each_token(exports: dict[str, Path]) -> None:
    for runtime, file in (("native", "drafter.safetensors"), ("onnx", "model.onnx.data")):
        weights = reads.of_export(exports[runtime], 0)
        assert 0.5 < weights / (exports[runtime] / file).stat().st_size < 1  # the embedding is taken by rows
        assert reads.of_export(exports[runtime], 10) - weights == 10 * CACHE_BYTES


@pytest.mark.skipif(compiling.compiler() is None, reason="the bandwidth needs a C compiler")
def test_the_record_has_every_rival_and_ratios_of_what_it_says(exports: dict[str, Path]) -> None:
    run = drafter.measure(drafter.specs_of(exports, None), threads=1, rounds=1)
    assert list(run["rivals"]) == ["native", "onnx", "onnx bare"]
    for figures in run["rivals"].values():
        assert {f"pass {rows}" for rows in ROWS} | {"token"} <= set(figures["ms"])
        assert figures["tokens_per_s"] == pytest.approx(1e3 / figures["ms"]["token"], rel=0.01)
    took, bare = run["rivals"]["onnx"]["ms"], run["rivals"]["onnx bare"]["ms"]
    assert run["ratios"]["onnx: pass over bare, 4 rows"] == pytest.approx(took["pass 4"] / bare["pass 4"], rel=0.05)
    assert run == json.loads(json.dumps(run))


def test_each_rival_is_weighed_in_a_process_of_its_own(exports: dict[str, Path]) -> None:
    found = drafter.weigh(Spec("native", "ours", exports["native"]), 1)
    assert found["python"] < found["peak_rss"] < found["python"] + 100


def test_without_llama_cpp_the_record_says_how_to_get_it(
    exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", None)  # an import of it fails
    llama.library.cache_clear()
    options = ["--export", f"native={exports['native']}", "--threads", "1", "--rounds", "1", "--no-memory"]
    told = CliRunner().invoke(drafter.main, options)
    llama.library.cache_clear()
    assert told.exit_code == 0, told.output
    record = json.loads(told.stdout.splitlines()[-1])
    assert "pip install" in record["without"]["llama.cpp"]


def test_an_export_without_a_name_is_refused() -> None:
    told = CliRunner().invoke(drafter.main, ["--export", "some/folder"])
    assert told.exit_code == 2 and "NAME=DIR" in told.output


@pytest.mark.skipif(compiling.compiler() is None, reason="the bandwidth needs a C compiler")
def test_bandwidth_is_between_a_disk_and_a_cache() -> None:
    stream = Stream(2, 64 << 20)
    assert 0.2e9 < stream.bytes_per_s() < 2e12
    stream.close()


def test_llama_cpp_computes_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    source = tiny_models.directory(tmp_path / "hf", "llama")
    path = tiny_models.gguf_file(tmp_path / "tiny.gguf", source)
    model = llama.load(path, repack=False)
    rival = llama.Llama(path, model, 1, llama.Setting(flash=False, repack=False))
    rival.ready()
    found = rival._decode([7, 8], CONTEXT, 2)
    with torch.inference_mode():
        whole = AutoModelForCausalLM.from_pretrained(source)(torch.tensor([[*TEXT, 7, 8]])).logits[0, -2:]
    np.testing.assert_allclose(found, whole.numpy(), atol=0.02 * float(whole.abs().max()))  # its cache has 16 bits
    rival.close()
