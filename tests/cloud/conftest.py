"""Tiny targets for the torch engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from tests.cloud.tiny_target import make_target

    return {name: make_target(tmp_path_factory.mktemp(name), name) for name in ("llama", "qwen2")}


@pytest.fixture(scope="session")
def real_target(smollm2: tuple[Path, Path]) -> Path:
    return smollm2[1]
