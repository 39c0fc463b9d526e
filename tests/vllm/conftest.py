"""Models and engines, each made once. vLLM lives in an environment of its own (`make test-vllm`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import cloud.engines.vllm  # noqa: F401  (sets what vLLM reads when it is imported)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.models import make_target

    return make_target(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def plain(tiny: Path) -> Any:
    """vLLM as it comes, with our draws."""
    from tests.vllm.models import CONTEXT, VOCAB
    from tests.vllm.reference import Plain

    return Plain(tiny, VOCAB, CONTEXT)


@pytest.fixture(scope="session")
def engine(tiny: Path) -> Any:
    from tests.vllm.models import ROOMY, load_tiny

    return load_tiny(tiny, ROOMY)


@pytest.fixture(scope="session")
def small_engine(tiny: Path) -> Any:
    """Its KV cache holds a few of the texts."""
    from tests.vllm.models import SMALL, load_tiny

    return load_tiny(tiny, SMALL)


@pytest.fixture(scope="session")
def smollm2_target() -> Path:
    """Made by the other environment: this one cannot export."""
    from tools.models import FOLDER

    target = FOLDER / "smollm2" / "target"
    if not (target / "manifest.json").exists():
        if os.environ.get("OUTRIDER_REQUIRE_MODELS"):
            pytest.fail(f"there is no {target}: `make test` makes it")
        pytest.skip(f"there is no {target}: `make test` makes it")
    return target
