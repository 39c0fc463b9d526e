"""The Q/DQ export: standard ONNX, that computes what its weights say, in chains and in trees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto
from transformers import AutoModelForCausalLM

from edge.drafters import golden, manifest, runtimes
from edge.drafters.cached import PREFILL_ROWS, CachedDrafter
from protocol.errors import ConfigError, ModelError
from tests.tools import tiny_models
from tools.export import qdq, sources, write
from tools.export.__main__ import main
from tools.export.calibration_text import Corpus
from tools.export.quantise import dequantise, quantise
from tools.export.quantised import quantise_model

IDS = [1, 77, 12, 200, 5, 31, 118, 64, 9]
CLOSE = 4e-3  # of the largest logit: float16 keeps eleven bits of each sum that it rounds
torch.set_num_threads(1)


@pytest.fixture(scope="module", params=[("llama", True), ("llama", False), ("qwen2", True)], ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[sources.Source, Path]:
    """A source and its export. Widths of 64 and 96 are no whole numbers of groups of 128, so both are padded."""
    architecture, tied = request.param
    where = tmp_path_factory.mktemp("qdq")
    source = sources.read(str(tiny_models.directory(where / "hf", architecture, tied=tied)))
    write.write_drafter(source, where / "out", qdq.options())
    return source, where / "out"


def reference(source: sources.Source, group: int = qdq.GROUP) -> torch.nn.Module:
    """transformers' model with every matrix that is multiplied with as the graph holds it."""
    source.config.tie_word_embeddings, tied = False, source.config.tie_word_embeddings
    model = AutoModelForCausalLM.from_config(source.config).eval()
    source.config.tie_word_embeddings = tied
    blocks = quantise_model(source.config, source.weights, qdq.options(group))
    weights = dict(source.weights) | {name: dequantise(matrix) for name, matrix in blocks.items()}
    model.load_state_dict(weights)
    return model


def expected(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """Logits behind each of `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def load(directory: Path) -> CachedDrafter:
    return runtimes.load(directory, "onnx")


def assert_close(found: np.ndarray, wanted: np.ndarray) -> None:
    wanted = wanted[: len(found)]
    np.testing.assert_allclose(found, wanted, atol=CLOSE * np.abs(wanted).max())


def test_a_chain_computes_what_the_weights_say(made: tuple[sources.Source, Path]) -> None:
    source, directory = made
    wanted, drafter = expected(reference(source), IDS), load(directory)
    row = drafter.prefill(IDS[:4])
    assert_close(drafter.logits(row), wanted[3])
    for place in range(4, len(IDS)):
        (row,) = drafter.extend([(IDS[place], row)])
        assert_close(drafter.logits(row), wanted[place])


def test_branches_of_a_tree_see_their_own_past_and_no_other(made: tuple[sources.Source, Path]) -> None:
    source, directory = made
    model, drafter = reference(source), load(directory)
    root = drafter.prefill(IDS)
    drop, kept = drafter.extend([(50, root), (60, root)])
    rows = drafter.extend([(51, drop), (61, kept), (63, kept), (62, 1)])
    for row, path in zip(rows, ([50, 51], [60, 61], [60, 63], [60, 61, 62]), strict=True):
        assert_close(drafter.logits(row), expected(model, IDS + path)[-1])
    drafter.keep([kept, rows[1]])  # leaves a gap, so that slots move
    (below,) = drafter.extend([(70, rows[3])])
    assert_close(drafter.logits(below), expected(model, [*IDS, 60, 61, 62, 70])[-1])


def test_long_texts_and_wide_trees_take_several_passes(made: tuple[sources.Source, Path]) -> None:
    source, directory = made
    model, drafter = reference(source), load(directory)
    text = [(7 * i) % 250 for i in range(2 * PREFILL_ROWS + 2)]
    root = drafter.prefill(text)
    assert_close(drafter.logits(root), expected(model, text)[-1])
    chain = drafter.extend([(5, root), *((i % 50, i) for i in range(PREFILL_ROWS + 10))])
    ids = [*text, *(row.id for row in chain)]
    wanted = expected(model, ids)
    for row in (chain[0], chain[PREFILL_ROWS - 1], chain[PREFILL_ROWS], chain[-1]):
        assert_close(drafter.logits(row), wanted[row.position])


def test_it_is_what_tensorrt_takes(made: tuple[sources.Source, Path]) -> None:
    """Standard operators alone; weights of four bits in blocks along k, positive scales, no zero points, an even n."""
    _, directory = made
    graph = str(directory / "model.onnx")
    onnx.checker.check_model(graph, full_check=True)
    model = onnx.load(graph)
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", qdq.OPSET)]
    assert {node.domain for node in model.graph.node} == {""}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    weights = [node for node in model.graph.node if node.op_type == "DequantizeLinear"]
    assert len(weights) == 1 + 4 * tiny_models.SHAPE["num_hidden_layers"]
    for node in weights:
        levels, scales = (constants[name] for name in node.input)
        attributes = {attribute.name: attribute.i for attribute in node.attribute}
        assert attributes == {"axis": 0, "block_size": 128}
        assert levels.data_type == TensorProto.INT4 and scales.data_type == TensorProto.FLOAT16
        assert levels.dims[0] == 128 * scales.dims[0] and levels.dims[1] == scales.dims[1] and levels.dims[1] % 2 == 0
        assert (onnx.numpy_helper.to_array(scales) > 0).all()


def test_the_manifest_says_what_computes_in_what_and_what_to_guess_again(made: tuple[sources.Source, Path]) -> None:
    _, directory = made
    facts = manifest.read(directory, "drafter", verify=True)
    assert (facts.runtime, facts.compute, facts.dtype) == ("tensorrt", "w4a16", "float16")
    assert facts.quantisation["weights"] == "int4 symmetric groups of 128, float16 scales"
    assert facts.golden is not None
    golden.check(load(directory), facts.golden, "here")
    with pytest.raises(ConfigError, match=r"for the runtime 'tensorrt', not 'native'"):
        runtimes.load(directory, "native")


@pytest.mark.parametrize("group", [64, 128])
def test_quantisation_error_and_positive_scales(group: int) -> None:
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(3))
    weight[3], weight[4, :group] = 0.0, -5.0
    blocks = quantise(weight, 4, group, symmetric=True, positive=True)
    back = dequantise(blocks)
    assert back.shape == weight.shape and (blocks.scales >= 0).all() and (qdq.int4(blocks)[1] > 0).all()
    np.testing.assert_array_equal(blocks.scales, blocks.scales.astype(np.float16))
    assert float((back - weight)[5:].norm() / weight[5:].norm()) < 0.12
    torch.testing.assert_close(back[3], weight[3])
    torch.testing.assert_close(back[4, :group], weight[4, :group], rtol=1e-3, atol=0)


def test_levels_are_laid_out_as_onnx_wants_them() -> None:
    weight = torch.arange(-8, 8).repeat(2, 16)[:, :200].float()
    levels, scales = qdq.int4(quantise(weight, 4, qdq.GROUP, symmetric=True, positive=True))
    assert levels.shape == (256, 2) and scales.shape == (2, 2)
    whole = levels[:200] * np.repeat(scales.astype(np.float32), 128, axis=0)[:200]
    np.testing.assert_allclose(whole, weight.T, rtol=1e-3)


def test_command_and_what_it_refuses(tmp_path: Path) -> None:
    run, llama = CliRunner(), str(tiny_models.directory(tmp_path / "hf", "llama"))
    arguments = ["drafter", llama, str(tmp_path / "out"), "--runtime", "tensorrt"]
    for more, where in ((["--group", "32"], "--group"), (["--head-bits", "8"], "--head-bits")):
        refused = run.invoke(main, arguments + more)
        assert isinstance(refused.exception, ConfigError) and refused.exception.where == where
    assert run.invoke(main, [*arguments, "--group", "64", "--context", "100"]).exit_code == 0
    facts = manifest.read(tmp_path / "out", "drafter")
    assert (facts.runtime, facts.context) == ("tensorrt", 100)
    assert "groups of 64" in facts.quantisation["weights"]


def test_a_calibrated_one_takes_only_positive_scales_and_what_was_learned(tmp_path: Path) -> None:
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "qwen2")))
    generator = torch.Generator().manual_seed(4)
    texts = tuple(torch.randint(3, 300, (40,), generator=generator) for _ in range(30))
    corpus = Corpus(texts, (30,) * len(texts), "0123456789abcdef")
    facts = write.write_drafter(source, tmp_path / "out", qdq.options(), corpus=corpus)
    assert "GPTQ, scales learned" in facts.quantisation["weights"] and facts.quantisation["embedding"] == "float16"
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    tensors = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(".scales")}
    assert len(scales) == 1 + 4 * tiny_models.SHAPE["num_hidden_layers"]
    assert all((tensor > 0).all() for tensor in scales.values())
    given = source.weights["model.norm.weight"].float().numpy()
    assert 0 < np.abs(tensors["norm.gamma"] - given).max() < 0.1


def test_a_shortlist_leaves_the_head_those_ids(tmp_path: Path) -> None:
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "llama")))
    write.write_drafter(source, tmp_path / "whole", qdq.options())
    ids = np.arange(1, 300, 3, dtype=np.int32)[:-1]  # an odd number of them
    facts = write.write_drafter(source, tmp_path / "short", qdq.options(), head_ids=ids)
    assert facts.shortlist == len(ids) == 99
    whole, short = load(tmp_path / "whole"), load(tmp_path / "short")
    expected, found = whole.logits(whole.prefill(IDS)), short.logits(short.prefill(IDS))
    assert_close(found[ids], expected[ids])
    assert np.isneginf(np.delete(found, ids)).all()


def test_unsupported_models_are_refused_by_name(tmp_path: Path) -> None:
    source = sources.read(str(tiny_models.directory(tmp_path / "hf", "llama")))
    source.config.hidden_act = "gelu"
    with pytest.raises(ModelError, match=r"activation 'gelu'"):
        write.write_drafter(source, tmp_path / "out", qdq.options())
    assert not (tmp_path / "out").exists()
