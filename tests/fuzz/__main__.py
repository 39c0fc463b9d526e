"""`python -m tests.fuzz`: run the targets under atheris, replay a finding, keep what has reached something new."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from tests.fuzz.kept import of_use, read_corpus, write_corpus
from tests.fuzz.targets import TARGETS

FOUND = Path("build/fuzz")  # inputs that reached something new, and findings, by target
STATUS = re.compile(r"#(\d+)\s+\w+\s+cov: (\d+).* corp: (\d+)/.* exec/s: (\d+)")
LEAST_MIB = 2048  # that a target may take
SHOWN_EVERY_S = 10.0

names = click.argument("targets", nargs=-1, type=click.Choice(list(TARGETS)))


@click.group()
def main() -> None:
    """Fuzzing of what reads other people's bytes and of the two session cores."""


@main.command()
@names
@click.option("--executions", default=10_000_000, show_default=True, help="Over all targets.")
@click.option("--seed", default=0, show_default=True, help="0 takes another one each time.")
def run(targets: Sequence[str], executions: int, seed: int) -> None:
    """Run TARGETS, or all, until something is found."""
    chosen = targets or list(TARGETS)
    whole = sum(TARGETS[name].share for name in chosen)
    for name in chosen:
        runs = round(executions * TARGETS[name].share / whole)
        if not fuzz(name, runs, seed):
            findings = ", ".join(str(path) for path in sorted((FOUND / name).glob("crash-*")))
            sys.exit(f"{name}: a finding. Look at it with: python -m tests.fuzz replay {name} {findings}")


@main.command()
@click.argument("target", type=click.Choice(list(TARGETS)))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
def replay(target: str, files: Sequence[Path]) -> None:
    """Give TARGET the inputs in FILES, without atheris."""
    take = TARGETS[target].load()
    for path in files:
        take(path.read_bytes())
        click.echo(f"{path}: nothing found")


@main.command()
@names
def keep(targets: Sequence[str]) -> None:
    """Add to the corpus what earlier runs have found of use, and leave out what is of none."""
    for name in targets or list(TARGETS):
        found = [path.read_bytes() for path in (FOUND / name / "corpus").glob("*")]
        kept = of_use(name, [*read_corpus(name), *found])
        write_corpus(name, kept)
        click.echo(f"{name}: {len(kept)} inputs kept of {len(found)} found")


def fuzz(name: str, runs: int, seed: int = 0) -> bool:
    """Run one target, showing how far it is. Returns whether nothing was found."""
    seeds = unpack(name)
    # libFuzzer judges by the peak of a process, which on Linux begins with that of the process that started it.
    most_mib = LEAST_MIB + (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    arguments = [
        f"-rss_limit_mb={most_mib}",
        f"-runs={runs}",
        f"-seed={seed}",
        f"-max_len={TARGETS[name].most_bytes}",
        "-detect_leaks=0",
    ]
    arguments += [f"-artifact_prefix={FOUND / name}/", str(FOUND / name / "corpus"), str(seeds)]
    began = shown = time.monotonic()
    tail: list[str] = []
    command = [sys.executable, "-m", "tests.fuzz.one", name, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stderr or ():
            if status := STATUS.match(line):
                if time.monotonic() - shown >= SHOWN_EVERY_S:
                    shown = time.monotonic()
                    done, coverage, corpus, rate = map(int, status.groups())
                    click.echo(
                        f"{name:9} {done:>11,} of {runs:,}  {rate:>7,}/s  coverage {coverage:,}  inputs {corpus:,}"
                    )
            else:
                tail = [*tail[-60:], line]
    seconds = time.monotonic() - began
    if process.returncode:
        click.echo("".join(tail), err=True)
        return False
    click.echo(f"{name:9} {runs:>11,} executions in {seconds:.0f} s, {runs / seconds:,.0f}/s: nothing found")
    return True


def unpack(name: str) -> Path:
    """The kept inputs and the seeds of a target as files, which is what libFuzzer reads."""
    seeds = FOUND / name / "seeds"
    for folder in (seeds, FOUND / name / "corpus"):
        folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate([*read_corpus(name), *TARGETS[name].seeds()]):
        (seeds / f"{i:04}").write_bytes(data)
    return seeds


if __name__ == "__main__":
    main()
