"""Wheels into a folder of modules, for a board of any architecture, offline and without running any of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from protocol.errors import ModelError

PACKAGE = "outrider[edge]"
OLDEST_GLIBC, NEWEST_GLIBC = 17, 45  # of `manylinux_2_N`


def platforms(machine: str) -> list[str]:
    """Tags of wheels that a board may take. Which glibc it has is for who gathered the wheels to know."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{machine}", f"linux_{machine}"]


def unpack(wheels: Path, out: Path, python: tuple[int, int], machine: str) -> Path:
    """The project and all it needs on a board, from a folder of wheels. Raises ModelError where one is missing."""
    version = ".".join(map(str, python))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-index", "--find-links", str(wheels), "--target", str(out), "--no-compile"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    command += [f"--platform={tag}" for tag in platforms(machine)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise ModelError(
            words[-1].removeprefix("ERROR: ") if words else f"pip ended with {done.returncode}",
            where=str(wheels),
            remedy=f"Gather wheels for Python {version} on {machine}, as docs/service.md says.",
        )
    shutil.rmtree(out / "bin", ignore_errors=True)  # they would start this machine's interpreter
    return out
