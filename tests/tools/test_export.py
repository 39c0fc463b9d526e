"""Export: what is written computes what the source computes, from a directory as from a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from edge.drafters import manifest
from edge.drafters.onnx import OnnxDrafter
from edge.text import Text
from protocol.errors import ConfigError, ModelError
from protocol.sampling import Sampling
from tests.tools import tiny_models
from tools import models
from tools.export import sources, write
from tools.export.__main__ import main
from tools.export.quantise import dequantise, quantise
from tools.export.quantised import Options

IDS = [1, 77, 12, 200, 5, 31, 118, 64, 9]
torch.set_num_threads(1)  # tiny products gain nothing from threads that wait for each other
KINDS = [("llama", True), ("llama", False), ("qwen2", True)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{'tied' if kind[1] else 'untied'}")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, tied = request.param
    return tiny_models.directory(tmp_path_factory.mktemp("model") / f"tiny-{architecture}", architecture, tied=tied)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.directory(tmp_path_factory.mktemp("llama") / "tiny-llama", "llama")


def logits_of_graph(directory: Path, ids: list[int]) -> np.ndarray:
    session = ort.InferenceSession(str(directory / "model.onnx"), providers=["CPUExecutionProvider"])
    n = len(ids)
    feeds = {
        "input_ids": np.array([ids]),
        "position_ids": np.arange(n)[None],
        "attention_bias": np.zeros((1, 1, n, n), np.float32),
        "seqlens_k": np.array([n - 1], np.int32),
        "total_length": np.array(n, np.int32),
        "logit_rows": np.arange(n),
    }
    for value in session.get_inputs():
        if value.name.startswith("past."):
            feeds[value.name] = np.zeros((1, value.shape[1], n, value.shape[3]), np.float32)
    return session.run(["logits"], feeds)[0]


def quantised_reference(source: sources.Source, options: Options) -> torch.nn.Module:
    """transformers' model with every matrix as the graph holds it."""
    model = AutoModelForCausalLM.from_config(source.config).eval()
    weights = {}
    for name, tensor in source.weights.items():
        if "embed_tokens" in name or "lm_head" in name:
            bits = options.embedding_bits if "embed" in name and options.embedding_bits else options.head_bits
            tensor = dequantise(quantise(tensor, bits, options.group, options.symmetric or bits == 8))
        elif tensor.dim() == 2:
            tensor = dequantise(quantise(tensor, 4, options.group, options.symmetric))
        weights[name] = tensor
    if "lm_head.weight" not in source.weights:  # tied, but each may be quantised in its own way
        head = source.weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = dequantise(
            quantise(head, options.head_bits, options.group, options.symmetric or options.head_bits == 8)
        )
        model.lm_head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize(
    "options",
    [
        Options(accuracy_level=1),
        Options(accuracy_level=1, symmetric=True, head_bits=4, group=16),
        Options(accuracy_level=1, head_bits=4),
        Options(accuracy_level=1, embedding_bits=4, group=128),
    ],
    ids=["default", "symmetric-head4-group16", "head4", "embedding4-group128"],
)
def test_graph_computes_what_its_weights_say(model: Path, options: Options, tmp_path: Path) -> None:
    source = sources.read(str(model))
    write.write_drafter(source, tmp_path / "out", options)
    with torch.no_grad():
        expected = quantised_reference(source, options)(torch.tensor([IDS])).logits[0].numpy()
    found = logits_of_graph(tmp_path / "out", IDS)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_int8_activations_stay_close(model: Path, tmp_path: Path) -> None:
    source = sources.read(str(model))
    write.write_drafter(source, tmp_path / "out", Options())
    with torch.no_grad():
        expected = quantised_reference(source, Options())(torch.tensor([IDS])).logits[0].numpy()
    found = logits_of_graph(tmp_path / "out", IDS)
    # Rounding to 8 bits adds up to about 3 % over these layers' products; a wrong scale or offset is off by all of it.
    assert np.linalg.norm(found - expected) < 0.06 * np.linalg.norm(expected)


def test_four_bits_keep_most_of_the_model(model: Path, tmp_path: Path) -> None:
    source = sources.read(str(model))
    write.write_drafter(source, tmp_path / "out", Options())
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(torch.tensor([IDS])).logits[0].float().numpy()
    found = logits_of_graph(tmp_path / "out", IDS)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.9


@pytest.mark.parametrize("bits, symmetric, worst", [(4, True, 0.1), (4, False, 0.09), (8, True, 0.007)])
def test_quantisation_error(bits: int, symmetric: bool, worst: float) -> None:
    weight = torch.randn(40, 100, generator=torch.Generator().manual_seed(3))
    back = dequantise(quantise(weight, bits, 32, symmetric))
    assert back.shape == weight.shape
    assert float((back - weight).norm() / weight.norm()) < worst


def test_constant_and_empty_groups_survive_quantisation() -> None:
    weight = torch.zeros(2, 64)
    weight[1, :32] = 0.5
    for symmetric in (True, False):
        found = dequantise(quantise(weight, 4, 32, symmetric))
        torch.testing.assert_close(found, weight, rtol=2**-11, atol=0)


def test_target_is_the_same_model(model: Path, tmp_path: Path) -> None:
    written = write.write_target(sources.read(str(model)), tmp_path / "out")
    ids = torch.tensor([IDS])
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    assert torch.equal(found, expected)
    assert written.stop_ids == (0, 2)
    assert written.vocab_size == tiny_models.tokenizer().get_vocab_size() < expected.shape[-1]
    assert manifest.read(tmp_path / "out", "target", verify=True) == written


def test_bfloat16_target(llama: Path, tmp_path: Path) -> None:
    written = write.write_target(sources.read(str(llama)), tmp_path / "out", "bfloat16")
    assert written.dtype == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_drafter_and_target_share_the_tokenizer_to_the_byte(llama: Path, tmp_path: Path) -> None:
    source = sources.read(str(llama))
    target = write.write_target(source, tmp_path / "target")
    drafter = write.write_drafter(source, tmp_path / "drafter", Options())
    assert target.tokenizer_digest == drafter.tokenizer_digest
    assert (tmp_path / "target/tokenizer.json").read_bytes() == (tmp_path / "drafter/tokenizer.json").read_bytes()


@pytest.mark.parametrize("architecture, tied", KINDS)
def test_gguf_gives_back_the_directory(architecture: str, tied: bool, tmp_path: Path) -> None:
    source = tiny_models.directory(tmp_path / "hf", architecture, tied=tied)
    path = tiny_models.gguf_file(tmp_path / "tiny-Q4_K_M.gguf", source, architecture=architecture)
    found, expected = sources.read(str(path)), sources.read(str(source))
    assert found.name == "tiny"
    assert found.weights.keys() == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert torch.equal(found.weights[name], tensor), name
    for key in (*tiny_models.SHAPE, "vocab_size", "rope_parameters", "tie_word_embeddings"):
        if key != "initializer_range":
            assert getattr(found.config, key) == getattr(expected.config, key), key
    assert (found.vocab_size, found.stop_ids) == (expected.vocab_size, expected.stop_ids)
    a, b = (Tokenizer.from_str(side.tokenizer.decode()) for side in (found, expected))
    for text in ("the cat 1234 sat", "<|im_start|>user\nhat 🙂<|im_end|>\n", " für  Straße\n\n"):
        assert a.encode(text, add_special_tokens=False).ids == b.encode(text, add_special_tokens=False).ids
        assert a.decode(a.encode(text).ids, skip_special_tokens=False) == text


def test_unsupported_models_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    gguf = tiny_models.gguf_file(tmp_path / "a.gguf", llama, architecture="mamba")
    with pytest.raises(ModelError, match=r"'mamba' is not supported.*llama, qwen2"):
        sources.read(str(gguf))
    gguf = tiny_models.gguf_file(tmp_path / "b.gguf", llama, pre="deepseek-coder")
    with pytest.raises(ModelError, match=r"pre-tokenizer 'deepseek-coder'.*Hugging Face directory"):
        sources.read(str(gguf))
    other = tmp_path / "gpt2"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match=r"'gpt2' is not supported"):
        sources.read(str(other))


def test_broken_sources_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent.gguf: no such file"):
        sources.read(str(tmp_path / "absent.gguf"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config.json"):
        sources.read(str(tmp_path / "empty"))
    whole = tiny_models.gguf_file(tmp_path / "whole.gguf", llama).read_bytes()
    for size in (3, 100, len(whole) - 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut.gguf"):
            sources.read(str(tmp_path / "cut.gguf"))


def test_command_writes_replaces_only_an_export_and_reports(llama: Path, tmp_path: Path) -> None:
    run, out = CliRunner(), tmp_path / "out"
    assert run.invoke(main, ["drafter", str(llama), str(out), "--context", "128"]).exit_code == 0
    first = manifest.read(out, "drafter", verify=True)
    assert (first.context, first.compute) == (128, "w4a16")

    again = run.invoke(main, ["drafter", str(llama), str(out)])
    assert isinstance(again.exception, ConfigError) and "--force" in str(again.exception)
    options = [
        "--force",
        "--runtime",
        "onnx",
        "--accuracy-level",
        "1",
        "--head-bits",
        "4",
        "--symmetric",
        "--group",
        "64",
    ]
    assert run.invoke(main, ["drafter", str(llama), str(out), "--force", *options]).exit_code == 0
    second = manifest.read(out, "drafter", verify=True)
    assert second.compute == "w4a32"
    assert second.quantisation["weights"] == "int4 symmetric groups of 64, float16 scales"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("keep me")
    refused = run.invoke(main, ["target", str(llama), str(mine), "--force"])
    assert isinstance(refused.exception, ConfigError)
    assert (mine / "letter.txt").read_text() == "keep me"


def test_failed_export_leaves_nothing_and_keeps_the_earlier_one(llama: Path, tmp_path: Path) -> None:
    source = sources.read(str(llama))
    write.write_drafter(source, tmp_path / "out", Options())
    source.config.hidden_act = "gelu"
    with pytest.raises(ModelError, match=r"activation 'gelu'"):
        write.write_drafter(source, tmp_path / "out", Options(), force=True)
    assert manifest.read(tmp_path / "out", "drafter", verify=True).context == 256
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


PROMPTS = ("What is the capital of France?", "Explain how rainbows form.", "Write a Python function for factorials.")


def test_real_model_both_ways(tmp_path: Path, smollm2: tuple[Path, Path]) -> None:
    path = models.fetch(models.SMOLLM2)
    source = sources.read(str(path))
    facts = write.write_target(source, tmp_path / "target")
    write.write_drafter(source, tmp_path / "drafter", Options())
    text = Text.load(tmp_path / "target", facts)
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    # transformers reads GGUF with other code for names, permutation and dequantisation.
    reference = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=target)["tensors"]
    for name, tensor in source.weights.items():
        assert torch.equal(tensor, reference[name]), name
    theirs = AutoTokenizer.from_pretrained(tmp_path / "target")
    drafter = OnnxDrafter.load(tmp_path / "drafter", threads=2)
    hits = total = 0
    for prompt in PROMPTS:
        messages = [{"role": "user", "content": prompt}]
        ids = text.chat(messages)
        assert ids == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        options = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": list(facts.stop_ids), "pad_token_id": 0}
        whole = target.generate(torch.tensor([ids]), **options)[0].tolist()
        assert "France" not in prompt or "Paris" in text.decode(whole[len(ids) :])
        row = drafter.prefill(ids)
        for id in whole[len(ids) :]:
            hits += drafter.candidates(row, Sampling(), 1)[0].id == id
            total += 1
            (row,) = drafter.extend([(id, row)])
            drafter.keep([row])
    assert hits / total >= 0.75
