"""The shorter pass of llama-like decoders: taken where it gives transformers' own logits, and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cloud.engines.decoder import Decoder  # noqa: E402
from cloud.engines.model import Forward, Whole, load_model  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.ragged import Span  # noqa: E402
from tests.cloud.tiny_target import make_target, prompts, reference_logits  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def logits_of(forward: Forward, ids: list[int]) -> Any:
    return forward([Span(forward.new_slab(len(ids), 0), 0, 0, len(ids), ())], ids, range(len(ids))).float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_known_family_takes_the_shorter_pass(targets: dict[str, Path], architecture: str, dtype: str) -> None:
    forward = load_model(targets[architecture], dtype, Numerics())
    assert isinstance(forward.model, Decoder)
    [text] = prompts(70)
    expected = reference_logits(targets[architecture], text)
    off = (logits_of(forward, text) - expected).abs().max() / expected.abs().max()
    assert off < {"float32": 1e-5, "bfloat16": 0.1}[dtype]


def test_another_family_runs_by_transformers_own_forward(tmp_path: Path) -> None:
    target = make_target(tmp_path, "qwen3")
    forward = load_model(target, "float32", Numerics())
    assert isinstance(forward.model, Whole)
    [text] = prompts(70)
    torch.testing.assert_close(logits_of(forward, text), reference_logits(target, text), atol=2e-3, rtol=1e-4)


def test_a_pass_that_gives_other_logits_is_not_taken(
    targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model may carry a known name and still compute something else."""
    made = Decoder.__init__

    def spoil(self: Decoder, *arguments: Any) -> None:
        made(self, *arguments)
        self.layers[0].scaling *= 1.5

    monkeypatch.setattr(Decoder, "__init__", spoil)
    with caplog.at_level(logging.WARNING):
        forward = load_model(targets["llama"], "float32", Numerics())
    assert isinstance(forward.model, Whole)
    assert "transformers' own forward" in caplog.text
    [text] = prompts(30)
    torch.testing.assert_close(logits_of(forward, text), reference_logits(targets["llama"], text), atol=2e-3, rtol=1e-4)
