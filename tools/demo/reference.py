"""The large model alone: one session, one row a step, no board, no broker, no ledger. Told as one JSON line a text."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine, load
from edge.text import Text
from protocol.errors import OutriderError
from protocol.sampling import Sampling
from tools.stage import spawn


def decode_alone(
    engine: TorchEngine, prompt: list[int], sampling: Sampling, max_tokens: int, stop: list[int]
) -> list[int]:
    """The target's own text: a prefill, then a row at a time."""
    engine.open(1, prompt, sampling, len(prompt) + max_tokens)
    out: list[int] = []
    while len(out) < max_tokens and not (out and out[-1] in stop):
        drawn = engine.step(Plan([Work(1, engine.pending(1))])).accepted[1]
        out += drawn
    engine.close(1)
    return out


def texts_alone(
    target: Path, text: Text, prompts: Sequence[str], numerics: str, sampling: Sampling, max_tokens: int
) -> list[list[int]]:
    """What the target writes for each prompt, with seeds from 1 on, in a process that shares no session code with the
    fleet. Raises OutriderError when that fails.
    """
    lines = [
        {
            "prompt": text.chat([{"role": "user", "content": prompt}]),
            "sampling": msgspec.to_builtins(msgspec.structs.replace(sampling, seed=seed)),
            "max_tokens": max_tokens,
            "stop_ids": sorted(text.stop_ids),
        }
        for seed, prompt in enumerate(prompts, start=1)
    ]
    arguments = ["-m", "tools.demo.reference", "--target", str(target), "--numerics", numerics]
    alone = spawn(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    out, _ = alone.communicate("".join(json.dumps(line) + "\n" for line in lines))
    if alone.returncode:
        raise OutriderError("the target alone could not be computed", where="tools.demo.reference")
    return [json.loads(line) for line in out.splitlines()]


@click.command()
@click.option("--target", type=click.Path(path_type=Path), required=True)
@click.option("--numerics", required=True)
@click.option("--threads", type=int, default=2)
def main(target: Path, numerics: str, threads: int) -> None:
    """Read requests as JSON lines from stdin, write ids as JSON lines."""
    engine = load(target, Numerics(mode=numerics), threads=threads)  # type: ignore[arg-type]
    for line in sys.stdin:
        wanted = json.loads(line)
        sampling = Sampling(**wanted["sampling"])
        ids = decode_alone(engine, wanted["prompt"], sampling, wanted["max_tokens"], wanted["stop_ids"])
        click.echo(json.dumps(ids))


if __name__ == "__main__":
    main()
