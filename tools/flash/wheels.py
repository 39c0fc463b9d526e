"""Wheels for a board of any architecture: gathered where there is a network, unpacked offline, never run here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click

from link.config import read_toml
from native import compiling
from protocol.errors import ModelError
from tools.exits import reported
from tools.models import ROOT

PACKAGE = "outrider[edge]"
OLDEST_GLIBC, NEWEST_GLIBC = 17, 45  # of `manylinux_2_N`
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")  # beside the packages
LIBRARY = "native/board/_board.so"  # in the project's wheel
TRIPLES = {"armv7l": "arm-linux-gnueabihf"}  # of Debian's cross compilers, where not MACHINE-linux-gnu


def platforms(machine: str, glibc: tuple[int, int] | None = None) -> list[str]:
    """Tags of wheels that a board may take, newest first. glibc: the board's; any where it is not known."""
    newest = NEWEST_GLIBC if glibc is None else glibc[1]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
    return [*tags, f"manylinux2014_{machine}", f"linux_{machine}"]


def gather(out: Path, python: tuple[int, int], machine: str, glibc: tuple[int, int] | None = None) -> Path:
    """This checkout's wheel and all that it needs on a board, from pip's index. Raises ModelError where one is not to
    be had. The board's library is in it where a compiler for the board is here; else it is said.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-wheel-") as folder:
        built = build(Path(folder), machine, glibc)
        out.mkdir(parents=True, exist_ok=True)
        ours = out / built.name
        shutil.copyfile(built, ours)
    # The file itself, not its name: an index may have another project of this name.
    wanted = ["download", "--dest", str(out), *_target(python, machine, glibc), f"{ours}[edge]"]
    _pip(wanted, f"wheels for Python {_version(python)} on {machine}")
    return out


def unpack(
    wheels: Path, out: Path, python: tuple[int, int], machine: str, glibc: tuple[int, int] | None = None
) -> Path:
    """The project and all it needs on a board, from a folder of wheels. Raises ModelError where one is missing."""
    offline = ["install", "--no-index", "--find-links", str(wheels), "--target", str(out), "--no-compile"]
    remedy = f"Gather wheels for Python {_version(python)} on {machine}: `python -m tools.flash.wheels`."
    _pip([*offline, *_target(python, machine, glibc), PACKAGE], str(wheels), remedy)
    shutil.rmtree(out / "bin", ignore_errors=True)  # they would start this machine's interpreter
    return out


def build(folder: Path, machine: str, glibc: tuple[int, int] | None = None) -> Path:
    """The project's own wheel, made in `folder`. Raises ModelError."""
    source = copy_source(folder / "source")
    compiler = compiler_for(machine)
    if compiler is None:
        return _build(source, folder / "pure", f"no compiler for {machine} is here ({_triple(machine)}-gcc)")
    built = _build(source, folder / "native", CC=compiler)
    needs = _needs_glibc(built)
    if glibc is not None and needs is not None and needs > glibc:
        why = f"here it would be linked with glibc {_version(needs)}, and the board has {_version(glibc)}"
        return _build(source, folder / "pure", why)
    return built


def compiler_for(machine: str) -> str | None:
    """`$CC`, `cc` or Debian's cross compiler: the first that compiles for boards of this architecture."""
    for command in (os.environ.get("CC"), "cc", f"{_triple(machine)}-gcc"):
        found = command and compiling.compiler(command)
        if found and compiling.platform(found) == f"linux_{machine}":
            return command
    return None


def copy_source(to: Path) -> Path:
    """What the wheel is made of, apart, so that the checkout gets no build folder and the wheel nothing old."""
    packages = read_toml(ROOT / "pyproject.toml")["tool"]["setuptools"]["packages"]["find"]["include"]
    for name in packages:
        package = name.rstrip("*")
        shutil.copytree(ROOT / package, to / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copyfile(ROOT / name, to / name)
    return to


def _build(source: Path, out: Path, why_pure: str = "", **environment: str) -> Path:
    if why_pure:
        environment["OUTRIDER_NATIVE"] = "0"
        click.echo(f"note    the wheel has no board library: {why_pure}; one with cc compiles it", err=True)
    _pip(["wheel", "--no-deps", "--wheel-dir", str(out), str(source)], "building", environment=environment)
    (built,) = out.glob("*.whl")
    return built


def _needs_glibc(wheel: Path) -> tuple[int, int] | None:
    """The newest C library that the board's library in a wheel asks for; None where there is none in it."""
    with zipfile.ZipFile(wheel) as archive:
        if LIBRARY not in archive.namelist():
            return None
        found = re.findall(rb"GLIBC_(\d+)\.(\d+)", archive.read(LIBRARY))
    return max((int(major), int(minor)) for major, minor in found)


def _triple(machine: str) -> str:
    return TRIPLES.get(machine, f"{machine}-linux-gnu")


def _target(python: tuple[int, int], machine: str, glibc: tuple[int, int] | None) -> list[str]:
    tags = [f"--platform={tag}" for tag in platforms(machine, glibc)]
    return ["--only-binary=:all:", "--implementation", "cp", "--python-version", _version(python), *tags]


def _version(python: tuple[int, int]) -> str:
    return ".".join(map(str, python))


def _pip(
    command: list[str], where: str, remedy: str = "Check the network.", environment: dict[str, str] | None = None
) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run([*pip, *command], capture_output=True, text=True, env=variables)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        what = words[-1].removeprefix("ERROR: ") if words else f"pip ended with {done.returncode}"
        raise ModelError(what, where=where, remedy=remedy)


def version(said: str) -> tuple[int, int]:
    """`3.11` as (3, 11). Raises click.BadParameter."""
    major, _, minor = said.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise click.BadParameter(f"{said!r} is no version. Say it as 3.11.")
    return int(major), int(minor)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--python", type=version, required=True, help="The boards', as 3.11.")
@click.option("--machine", required=True, help="The boards', as aarch64.")
@click.option("--glibc", type=version, required=True, help="The boards', as 2.36: `ldd --version`.")
def main(out: Path, python: tuple[int, int], machine: str, glibc: tuple[int, int]) -> None:
    """Gather in OUT what a kind of board needs, for `tools.flash --wheels`."""
    with reported("wheels"):
        gather(out, python, machine, glibc)
    click.echo(f"{out}: {len(list(out.glob('*.whl')))} wheels")


if __name__ == "__main__":
    main()
