"""`python -m tests.arm`: the board's code and its drafter on an emulated Cortex-A76. See docs/native.md."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import click
import onnx

from edge.drafters import manifest
from protocol.errors import OutriderError
from tests.arm import golden
from tools import models
from tools.exits import reported
from tools.flash.wheels import build
from tools.models import ROOT

BUILD = ROOT / "build" / "arm"
GLIBC = (2, 36)  # of the userland
TOKENS = 64
# What `outrider[edge]` needs and what its tests do, each by name.
WHEELS = """
    numpy onnxruntime flatbuffers protobuf packaging msgspec tokenizers cffi pycparser paho-mqtt jinja2 markupsafe
    starlette anyio idna sniffio typing_extensions uvicorn click h11 wsproto rich markdown-it-py mdurl pygments
    cryptography pytest iniconfig pluggy pytest-timeout hypothesis sortedcontainers attrs
"""
TESTS = ("__init__.py", "boards.py", "conftest.py", "toys.py", "arm", "edge", "native", "protocol")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short")
RANKING = "tests/arm tests/native/test_rank.py"
SOME = "tokens or every or whole or noise or words or wheel or apart or refused"
FEW = f"{RANKING} -k 'same or whole or wheel'"


@dataclass(frozen=True, slots=True)
class Job:
    """Tests, and the variables that they are run with."""

    name: str
    tests: str
    variables: dict[str, str] = field(default_factory=dict)


JOBS = (  # each begins with some twenty seconds of imports
    Job("SmolLM2, native", "tests/arm -k drafter_has_the_same_bits"),
    Job("native", f"{RANKING} -k '{SOME} or normal or tied'"),
    Job(
        "protocol, edge, SmolLM2 by ONNX Runtime",
        "tests/arm tests/protocol tests/edge/test_journal.py tests/edge/test_policy.py tests/edge/test_calibration.py "
        "tests/edge/test_costs.py tests/edge/test_config.py tests/edge/test_cores.py tests/edge/test_targets.py "
        "-k 'not same_bits and not killed and not full_disk'",  # which start another Python, and emulation cannot
    ),
    Job("native, NEON alone", FEW, {"OUTRIDER_ISA": "neon", "OUTRIDER_ARM_TOKENS": "3"}),
    Job("native, plain C", FEW, {"OUTRIDER_ISA": "scalar", "OUTRIDER_ARM_TOKENS": "3"}),
)


@click.command()
@click.option(
    "--userland",
    type=click.Path(path_type=Path),
    envvar="ARM64_USERLAND",
    help="A script that makes an aarch64 userland: SCRIPT DIR WHEEL... leaves DIR/armpy, its Python.",
)
@click.option("--no-models", is_flag=True, help="Leave out what needs a real model.")
def main(userland: Path | None, no_models: bool) -> None:
    """Run the tests of protocol, native and part of edge on an emulated Cortex-A76, with the cross-compiled wheel."""
    if userland is None or not userland.is_file():
        click.echo(f"arm: skipped, there is no script that makes an aarch64 userland ({userland or 'ARM64_USERLAND'})")
        return
    with reported("arm"):
        python = _userland(userland)
        stage = _stage(BUILD / "stage")
        drafters = None if no_models else _drafters(BUILD / "drafters")
        golden.write(stage, drafters and drafters / "native", TOKENS)
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        running = [workers.submit(_run, job, python, stage, drafters) for job in JOBS]
        passed = [job.result() for job in as_completed(running)]
    sys.exit(0 if all(passed) else 1)


def _userland(script: Path) -> Path:
    """Its Python. One is kept for each list of wheels. Raises OutriderError."""
    folder = BUILD / f"userland-{hashlib.sha256(WHEELS.encode()).hexdigest()[:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    command = ["bash", str(script), str(folder), *WHEELS.split()]  # what is there already it leaves
    if code := subprocess.run(command).returncode:
        raise OutriderError(f"ended with {code}", where=str(script))
    return folder / "armpy"


def _stage(folder: Path) -> Path:
    """What is tested: the wheel as a board gets it, and the tests beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(build(Path(work), "aarch64", GLIBC)) as wheel:
        wheel.extractall(folder)
    for name in (*(f"tests/{name}" for name in TESTS), "tools", "board_configs", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        (folder / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, folder / name)
    return folder


def _drafters(folder: Path) -> Path:
    """SmolLM2 for each runtime: `native`, and `level4` and `level1` of ONNX Runtime."""
    made, _ = models.prepare("smollm2")
    for name, runtime in (("native", "native"), ("level4", "onnx")):
        if manifest.read(made, "drafter").runtime == runtime:
            _link(made, folder / name)
        else:
            source = models.fetch(models.PAIRS["smollm2"].drafter)
            models.export("drafter", source, folder / name, "--runtime", runtime)
    _link(folder / "level4", folder / "level1")
    graph = folder / "level1" / "model.onnx"
    model = onnx.load(str(graph), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    graph.unlink()  # it is the other one's too
    onnx.save(model, str(graph))
    return folder


def _link(directory: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(directory, to, copy_function=os.link)


def _run(job: Job, python: Path, stage: Path, drafters: Path | None) -> bool:
    variables = {
        **os.environ,
        **job.variables,
        "PYTHONPATH": str(stage),
        "OPENBLAS_NUM_THREADS": "1",  # its threads may hang under emulation
        "OUTRIDER_REQUIRE_NATIVE": "1",
        "OUTRIDER_ARM_GOLDEN": str(stage),
        "OUTRIDER_ARM_DRAFTERS": str(drafters or stage),
    }
    began = time.monotonic()
    line = f"exec {python} {' '.join(PYTEST)} {job.tests}"
    done = subprocess.run(["bash", "-c", line], cwd=stage, env=variables, capture_output=True, text=True)
    click.echo(f"-- {job.name}: {time.monotonic() - began:.0f} s\n{done.stdout}{done.stderr}".rstrip())
    return done.returncode == 0


if __name__ == "__main__":
    main()
