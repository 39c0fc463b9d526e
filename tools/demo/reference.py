"""The large model alone: one session, one row a step, no board, no broker, no ledger. Told as one JSON line a text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine, load
from protocol.sampling import Sampling


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
