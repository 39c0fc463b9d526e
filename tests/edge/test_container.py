"""Weights in huge pages: the same numbers, in memory of the process's own, where that is wanted and possible."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge.config import DeviceConfig, DrafterConfig, EdgeConfig
from edge.drafters import container
from edge.loading import load_model
from tools.bench.process import memory_mib

pytest.importorskip("safetensors", reason="writes the file")
from safetensors.numpy import save_file

MIB = 1 << 20
needs_huge_pages = pytest.mark.skipif(not container.gives_huge_pages(), reason="this kernel gives no huge pages")


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """48 MiB of weights and 16 of rows, of which none looks like another."""
    draw = np.random.default_rng(7)
    tensors = {
        "weights": draw.integers(0, 256, 40 * MIB, np.uint8),
        "more": draw.standard_normal((2048, 1024), np.float32),
        "rows": draw.integers(0, 256, (16, MIB), np.uint8),
    }
    save_file(tensors, tmp_path / "file", {"layers": "2"})
    return tmp_path / "file", tensors


def grown(work: Callable[[], object]) -> tuple[object, float, float]:
    """(what it returns, MiB more of huge pages, MiB more that are nobody else's)."""
    before = memory_mib(os.getpid())
    made = work()
    after = memory_mib(os.getpid())
    return made, after["huge"] - before["huge"], after["private"] - before["private"]


@needs_huge_pages
def test_what_is_asked_for_is_in_huge_pages_and_the_rest_takes_no_memory(file) -> None:
    path, tensors = file
    made, huge, private = grown(lambda: container.read(path, huge=lambda name: name != "rows"))
    assert huge >= 44 and private < 56
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(made.tensors[name], tensor)
        assert made.tensors[name].dtype == tensor.dtype and not made.tensors[name].flags.writeable
    assert made.metadata == {"layers": "2"}


def test_a_file_is_mapped_where_nobody_asks_or_the_kernel_has_none(file, tmp_path, monkeypatch) -> None:
    path, tensors = file
    never = tmp_path / "enabled"
    never.write_text("always madvise [never]\n")
    readings: list[tuple[Path, Callable[[], object]]] = [
        (container.HUGE_PAGES, lambda: container.read(path)),
        (never, lambda: container.read(path, huge=lambda name: True)),
        (tmp_path / "no such file", lambda: container.read(path, huge=lambda name: True)),
    ]
    for kernel, reading in readings:
        monkeypatch.setattr(container, "HUGE_PAGES", kernel)
        made, huge, private = grown(reading)
        assert huge < 2 and private < 2
        np.testing.assert_array_equal(made.tensors["more"], tensors["more"])


@needs_huge_pages
def test_a_board_has_its_weights_in_huge_pages_unless_told_otherwise(smollm2) -> None:
    def loaded(beside_service: bool = False, **options: bool) -> Callable[[], object]:
        drafter = DrafterConfig(model=smollm2[0], threads=1, context=256, **options)
        config = EdgeConfig(device=DeviceConfig(name="test.board"), drafter=drafter)
        return lambda: load_model(config, beside_service=beside_service)

    _made, huge, _ = grown(loaded())
    assert huge > 60, "all but the embedding"
    assert grown(loaded(huge_pages=False))[1] < 2
    assert grown(loaded(beside_service=True))[1] < 2, "the service holds a copy already"
