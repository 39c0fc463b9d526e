"""Calibration: what is rounded for the text it will see errs less on it, and nothing is computed twice."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from edge.drafters import runtimes
from edge.drafters.manifest import read as read_manifest
from protocol.errors import ConfigError, ModelError
from protocol.sampling import Sampling
from tests.tools import tiny_models
from tools.export import calibration_text, gptq, qdq, sources, store, tune
from tools.export.__main__ import main
from tools.export.calibrate import calibrate
from tools.export.forward import Decoder, plain
from tools.export.quantise import concatenate, dequantise, levels, quantise, take
from tools.export.quantised import EMBEDDING, HEAD, Options, quantise_model

torch.set_num_threads(1)
KINDS = [("llama", True), ("qwen2", False)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, tied = request.param
    return tiny_models.directory(tmp_path_factory.mktemp("model") / f"tiny-{architecture}", architecture, tied=tied)


def write_corpus(path: Path, *, texts: int = 40, largest: int = 300, split: str = "calibration") -> Path:
    generator = torch.Generator().manual_seed(11)
    with path.open("w") as file:
        for _ in range(texts):
            ids = torch.randint(3, largest + 1, (40,), generator=generator).tolist()
            file.write(json.dumps({"prompt": ids[:10], "text": [*ids[10:], largest], "split": split}) + "\n")
    return path


def inputs_of(k: int, tokens: int, seed: int) -> torch.Tensor:
    """Inputs [tokens, k] that lie mostly in a few directions, with some much larger than others, as a model's do."""
    few = torch.randn(k // 4, k, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, k // 4, generator=generator) @ few + torch.randn(tokens, k, generator=generator)
    return inputs * torch.linspace(0.3, 3, k)


@pytest.mark.parametrize("bits, group, symmetric", [(4, 32, False), (4, 128, False), (4, 16, True), (8, 32, False)])
def test_compensated_rounding_errs_less_on_inputs_it_has_not_seen(bits: int, group: int, symmetric: bool) -> None:
    weight = torch.randn(48, 200, generator=torch.Generator().manual_seed(5))
    seen, unseen = inputs_of(200, 2000, 2), inputs_of(200, 500, 3)
    compensated = gptq.round_matrix(weight, seen.T @ seen, bits, group, symmetric)
    errors = [
        float((unseen @ (dequantise(blocks) - weight).T).norm())
        for blocks in (compensated, quantise(weight, bits, group, symmetric))
    ]
    assert errors[0] < 0.75 * errors[1]


def test_inputs_that_never_came_do_no_harm() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    inputs = inputs_of(64, 500, 2)
    inputs[:, 10:20] = 0
    back = dequantise(gptq.round_matrix(weight, inputs.T @ inputs, 4, 32, False))
    assert float((back - weight).abs().max()) < 1.5


def test_parts_of_rows_are_what_was_stacked() -> None:
    parts = [quantise(torch.randn(n, 64), 4, 32, False) for n in (8, 24)]
    stacked = concatenate(parts)
    assert torch.equal(dequantise(take(stacked, slice(0, 8))), dequantise(parts[0]))
    assert torch.equal(dequantise(take(stacked, np.array([31, 8]))), dequantise(parts[1])[[23, 0]])


def test_forward_is_the_models(model: Path) -> None:
    source = sources.read(str(model))
    texts = [torch.tensor([5, 9, 200, 31, 8]), torch.tensor([77, 3])]
    embedded = source.weights[EMBEDDING][torch.cat(texts)]
    with torch.no_grad():
        hidden = Decoder(source.config, source.weights).hidden(embedded, [5, 2], plain(source.weights))
        reference = AutoModelForCausalLM.from_pretrained(model)
        expected = [reference(text[None], output_hidden_states=True).hidden_states[-1][0] for text in texts]
    torch.testing.assert_close(hidden, torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [Options(embedding_bits=4, head_bits=4), Options(group=64), qdq.options(group=64)],
    ids=["4", "8", "tensorrt"],
)
def test_calibrated_model_is_nearer_than_a_plainly_rounded_one(model: Path, options: Options, tmp_path: Path) -> None:
    source = sources.read(str(model))
    text = calibration_text.read(write_corpus(tmp_path / "c.jsonl"), source.config.vocab_size, 10_000)
    held = torch.randint(3, 300, (400,), generator=torch.Generator().manual_seed(12))

    def logits(weights) -> torch.Tensor:
        decoder = Decoder(source.config, source.weights)
        hidden = decoder.hidden(weights[EMBEDDING][held].float(), [40] * 10, plain(weights))
        return hidden @ weights.get(HEAD, weights[EMBEDDING]).float().T

    with torch.no_grad():
        expected = logits(source.weights)
        errors = [
            float(
                (logits(source.weights | {name: dequantise(part) for name, part in blocks.items()}) - expected).norm()
            )
            for blocks in (
                calibrate(source.config, source.weights, options, text, tmp_path / "work"),
                quantise_model(source.config, source.weights, options),
            )
        ]
    assert errors[0] < 0.95 * errors[1]


def test_a_calibration_that_was_killed_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    source = sources.read(str(model))
    text = calibration_text.read(write_corpus(tmp_path / "c.jsonl"), source.config.vocab_size, 10_000)
    arguments = (source.config, source.weights, Options(embedding_bits=4), text)
    calibrate(*arguments, tmp_path / "whole")

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(*arguments, tmp_path / "cut", stop)
    assert len(list((tmp_path / "cut").iterdir())) == 2  # the embedding and a layer
    resumed = calibrate(*arguments, tmp_path / "cut")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes(), path.name
    assert store.load(tmp_path / "cut" / "head.safetensors").keys() == {HEAD}
    assert resumed.keys() == quantise_model(source.config, source.weights, Options()).keys()


def test_a_corpus_is_thinned_out_and_named_when_it_is_not_the_models(tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl")
    whole, part = calibration_text.read(path, 352, 10_000), calibration_text.read(path, 352, 500)
    most = calibration_text.read(path, 352, 1000)
    assert (whole.tokens, part.tokens, most.tokens) == (40 * 41, 12 * 41, 24 * 41)
    assert torch.equal(part.texts[-1], whole.texts[36])
    assert whole.digest != part.digest
    with pytest.raises(ModelError, match=r"c.jsonl: id 300 is not in the drafter's vocabulary of 300"):
        calibration_text.read(path, 300, 10_000)
    with pytest.raises(ConfigError, match="it holds no calibration"):
        calibration_text.read(write_corpus(tmp_path / "h.jsonl", split="held-out"), 352, 10_000)
    path.write_text("[1, 2]\n")
    with pytest.raises(ConfigError, match=r"c.jsonl, line 1: not a text"):
        calibration_text.read(path, 352, 10_000)


@pytest.mark.parametrize("runtime", ["onnx", "native"])
def test_a_calibrated_export_drafts_and_says_how_it_was_made(model: Path, runtime: str, tmp_path: Path) -> None:
    path = write_corpus(tmp_path / "c.jsonl")
    options = ["--runtime", runtime, "--calibrate", str(path), "--head-bits", "4", "--work", str(tmp_path / "work")]
    result = CliRunner().invoke(main, ["drafter", str(model), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.exception
    said = read_manifest(tmp_path / "out", "drafter", verify=True).quantisation
    assert said["weights"].startswith(
        "int4 asymmetric groups of 32, float16 scales, GPTQ, scales learned, on 1640 tokens of "
    )
    assert said["keys and values"].startswith(
        "int8 symmetric groups of 32" if runtime == "native" else "int4 asymmetric groups of 32"
    )
    assert said["embedding"] == "int4 asymmetric groups of 32, float16 scales"
    drafter = runtimes.load(tmp_path / "out", context=64)
    row = drafter.prefill([5, 9, 200, 31])
    assert len(drafter.candidates(row, Sampling(), 3)) == 3
    torch.set_num_threads(1)


def test_learning_brings_the_model_nearer_to_what_the_target_wrote(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "RATE", 0.01)
    monkeypatch.setattr(tune, "STEP", 150)
    source = sources.read(str(model))
    # The target counts upwards, which the random model does not expect.
    texts = [torch.arange(start, start + 50) for start in range(3, 243, 4)]
    text = calibration_text.Corpus(tuple(texts), (40,) * len(texts), "")
    options = Options(embedding_bits=4, head_bits=4)
    blocks = quantise_model(source.config, source.weights, options)

    def loss(blocks, vectors) -> float:
        decoder = Decoder(source.config, {**source.weights, **vectors})
        dense = {name: dequantise(part) for name, part in blocks.items()}
        ids = torch.arange(100, 150)
        hidden = decoder.hidden(dense[EMBEDDING][ids], [50], plain(dense))
        return float(torch.nn.functional.cross_entropy((hidden @ dense[HEAD].T)[9:-1], ids[10:]))

    learned, vectors = tune.tune(source.config, source.weights, blocks, text, tmp_path)
    assert loss(learned, vectors) < loss(blocks, {}) - 0.05
    for name, part in learned.items():
        assert np.array_equal(part.packed, blocks[name].packed), name
        assert np.array_equal(part.scales, part.scales.astype(np.float16)), name
    again, _ = tune.tune(source.config, source.weights, blocks, text, tmp_path)  # from what was kept
    assert all(np.array_equal(part.scales, again[name].scales) for name, part in learned.items())


def test_gradients_of_scales_are_those_of_the_dense_product() -> None:
    blocks = quantise(torch.randn(6, 40), 4, 16, False)
    x, scales = torch.randn(5, 40, requires_grad=True), torch.from_numpy(blocks.scales).requires_grad_()
    out = tune.Product.apply(x, scales, levels(blocks))
    torch.testing.assert_close(out, x @ dequantise(blocks).T)
    weights = torch.randn(5, 6)
    found = torch.autograd.grad((out * weights).sum(), (x, scales))
    dense = (levels(blocks) * scales[:, :, None]).flatten(1)[:, :40]
    expected = torch.autograd.grad((x @ dense.T * weights).sum(), (x, scales))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gradients_of_the_loss_are_those_of_its_formula(model: Path) -> None:
    """Of hidden states and of the head's scales, over what the target wrote of two texts."""
    source = sources.read(str(model))
    blocks = quantise_model(source.config, source.weights, Options(embedding_bits=4, head_bits=4))
    learner = tune.Learner(source.config, source.weights, blocks)
    texts, written = [torch.arange(20, 32), torch.arange(60, 67)], [5, 3]
    hidden = torch.randn(19, source.config.hidden_size, requires_grad=True)
    taught, exact = torch.randn(19, source.config.hidden_size), torch.randn_like(learner.head())

    by_hidden, by_head = tune._gradients(
        hidden.detach(), taught, texts, written, learner.head(), exact, learns_head=True
    )
    assert by_head is not None
    learner.learn_head(by_head)

    factor = torch.ones_like(learner.values[HEAD], requires_grad=True)
    dense = (learner.steps[HEAD] * (learner.values[HEAD] * factor)[:, :, None]).flatten(1)
    rows, ids = torch.tensor([6, 7, 8, 9, 10, 15, 16, 17]), torch.tensor([27, 28, 29, 30, 31, 64, 65, 66])
    said = (hidden[rows] @ dense.T).log_softmax(-1)
    aim = (1 - tune.WRITTEN) * (taught[rows] @ exact.T).softmax(-1)
    aim[torch.arange(8), ids] += tune.WRITTEN
    expected = torch.autograd.grad(-(aim * said).sum() / 8, (hidden, factor))
    torch.testing.assert_close(by_hidden, expected[0])
    torch.testing.assert_close(learner.factors[HEAD].grad, expected[1])
