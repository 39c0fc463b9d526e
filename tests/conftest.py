"""Real models for tests: fetched and exported once a checkout, or the test skips with the reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from protocol.errors import OutriderError

# Before torch is loaded, here and in children: tests run many processes on few cores, so threads that wait must sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "0")


def prepared(name: str) -> tuple[Path, Path]:
    """(drafter, target) directories. Where OUTRIDER_REQUIRE_MODELS is set a model that cannot be had is a failure."""
    pytest.importorskip("torch")
    from tools.models import prepare

    try:
        return prepare(name)
    except OutriderError as error:
        if os.environ.get("OUTRIDER_REQUIRE_MODELS"):
            raise
        pytest.skip(f"no {name} models: {error}")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Path, Path]:
    """(drafter, target) directories of SmolLM2-135M."""
    return prepared("smollm2")


@pytest.fixture(scope="session")
def broker_kinds() -> list[str]:
    from tools.broker import available

    kinds = available()
    if not kinds:
        pytest.skip("neither mosquitto nor iotcore is installed")
    return kinds


def pytest_report_header() -> str:
    mosquitto = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    return f"mosquitto: {mosquitto or 'absent'}"
