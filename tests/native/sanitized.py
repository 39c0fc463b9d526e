"""`python -m tests.native.sanitized`: the board's library under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import click

from native import board, compiling
from tests.fuzz.targets import TARGETS
from tools.models import ROOT

CFLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined"
NAME = "board"


def environment() -> dict[str, str]:
    """Of a Python that loads such a library, which is built here. Raises NativeError, or ClickException where the
    compiler has no sanitizers.
    """
    os.environ["OUTRIDER_CFLAGS"] = CFLAGS
    try:
        board.compiled()
    finally:
        del os.environ["OUTRIDER_CFLAGS"]
    said = subprocess.run(
        [*(compiling.compiler() or []), "-print-file-name=libasan.so"], capture_output=True, text=True
    )
    runtime = Path(said.stdout.strip())
    if not runtime.is_absolute():
        raise click.ClickException("the compiler has no libasan.so")
    # The interpreter's own leaks are not ours, and a child of it needs no sanitizer.
    options = {"LD_PRELOAD": str(runtime), "ASAN_OPTIONS": "detect_leaks=0", "OUTRIDER_REQUIRE_NATIVE": "1"}
    return {**os.environ, "OUTRIDER_CFLAGS": CFLAGS, **options}


def tell(tries: int, seed: int) -> None:
    """Give the library's target its seeds and `tries` random inputs."""
    target, rng = TARGETS[NAME], random.Random(seed)
    take = target.load()
    for data in target.seeds():
        take(data)
    for _ in range(tries):
        data = rng.randbytes(rng.randrange(target.most_bytes))
        try:
            take(data)
        except Exception:
            click.echo(f"seed {seed}: {data.hex()}", err=True)
            raise


@click.command()
@click.option("--tries", default=20_000, show_default=True, help="Random inputs for the fuzz target `board`.")
@click.option("--seed", default=0, show_default=True, help="0 takes another one each time.")
@click.option("--tests", is_flag=True, help="Run the tests of tests/native too.")
@click.option("--here", is_flag=True, hidden=True)
def main(tries: int, seed: int, tests: bool, here: bool) -> None:
    """Find what reads or writes beyond its own, and what C does not define."""
    seed = seed or random.randrange(1, 1 << 32)
    if here:
        tell(tries, seed)
        return
    variables = environment()
    commands = [["tests.native.sanitized", "--here", "--tries", str(tries), "--seed", str(seed)]]
    if tests:
        commands.append(["pytest", "-q", "tests/native", "--ignore", "tests/native/test_building.py"])
    for command in commands:
        if subprocess.run([sys.executable, "-m", *command], env=variables, cwd=ROOT).returncode:
            sys.exit(f"sanitized: {' '.join(command)}: a finding")
    click.echo(f"{tries} random inputs: nothing found")


if __name__ == "__main__":
    main()
