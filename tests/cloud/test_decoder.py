"""The shorter pass of llama-like decoders: taken where it gives transformers' own logits, and nowhere else."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from cloud.engines.decoder import Decoder  # noqa: E402
from cloud.engines.model import Forward, load_model  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.ragged import Span  # noqa: E402
from cloud.engines.whole import Whole  # noqa: E402
from protocol.errors import ModelError  # noqa: E402
from tests.cloud.tiny_target import make_target, prompts, reference_logits  # noqa: E402
from tools.models import ROOT  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def logits_of(forward: Forward, ids: list[int]) -> Any:
    return forward([Span(forward.new_slab(len(ids), 0), 0, 0, len(ids), ())], ids, range(len(ids))).float()


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "wide heads": ("llama", {"head_dim": 32, "num_key_value_heads": 4}),
    "llama3 positions": ("llama", {"rope_parameters": LLAMA3}),
}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in MODELS), ("llama", "bfloat16"), ("qwen2", "bfloat16")]
)
def test_a_known_family_takes_the_shorter_pass(name: str, dtype: str, tmp_path: Path) -> None:
    architecture, more = MODELS[name]
    target = make_target(tmp_path, architecture, **more)
    forward = load_model(target, dtype, Numerics())
    assert isinstance(forward.model, Decoder)
    [text] = prompts(70 if dtype == "bfloat16" else 200)
    expected = reference_logits(target, text)
    off = (logits_of(forward, text) - expected).abs().max() / expected.abs().max()
    assert off < {"float32": 1e-5, "bfloat16": 0.1}[dtype]


def test_it_does_not_wait_for_transformers(targets: dict[str, Path]) -> None:
    """Whose import takes longer than all else of a start."""
    code = (
        "import sys; from pathlib import Path; from cloud.engines.torch_engine import load;"
        f"load(Path({str(targets['llama'])!r})); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def runs_whole(target: Path) -> None:
    forward = load_model(target, "float32", Numerics())
    assert isinstance(forward.model, Whole)
    [text] = prompts(70)
    torch.testing.assert_close(logits_of(forward, text), reference_logits(target, text), atol=2e-3, rtol=1e-4)


def test_another_family_runs_by_transformers_own_forward(tmp_path: Path) -> None:
    runs_whole(make_target(tmp_path, "qwen3"))


def test_a_model_of_which_anything_is_unknown_runs_by_transformers_own_forward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model may carry a known name and still compute something else."""
    target = make_target(tmp_path, "llama")
    path = target / "config.json"
    config = path.read_text()
    for known, unknown in (
        ('"hidden_act": "silu"', '"hidden_act": "gelu"'),
        ('"use_cache": true', '"twist": 3'),
        ('"rope_type": "default"', '"rope_type": "default", "partial_rotary_factor": 1.0'),
    ):
        assert known in config
        path.write_text(config.replace(known, unknown))
        runs_whole(target)
    path.write_text(config)
    weights = target / "model.safetensors"
    save_file({**load_file(weights), "model.layers.0.self_attn.twist": torch.ones(3)}, weights, {"format": "pt"})
    with caplog.at_level(logging.WARNING):
        runs_whole(target)
    assert "model.layers.0.self_attn.twist" in caplog.text


def test_a_weight_that_is_missing_is_named(tmp_path: Path) -> None:
    target = make_target(tmp_path, "llama")
    weights = load_file(target / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(target, "float32", Numerics())
