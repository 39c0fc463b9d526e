"""`python -m tools.bench overhead`: what our software costs beside the bare parts."""

from __future__ import annotations

import json

import click

from tools.bench import drafter, engine, verdict, wire
from tools.bench.record import machine
from tools.models import PAIRS, prepare


@click.command()
@click.option("--pair", type=click.Choice(sorted(PAIRS)), default="smollm2", show_default=True)
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=int, default=9, show_default=True, help="Of which the median counts.")
@click.option("--max-tokens", type=int, default=96, show_default=True, help="Of each text of the wire's part.")
@click.option("--part", "parts", multiple=True, type=click.Choice(["verdict", "drafter", "engine", "wire"]))
def main(pair: str, threads: int, rounds: int, max_tokens: int, parts: tuple[str, ...]) -> None:
    """What our software costs beside the bare parts: verdict, drafter's pass, engine's step, bytes."""
    drafter_dir, target_dir = prepare(pair)
    record: dict[str, object] = {"benchmark": "overhead", "machine": machine()}
    for part in parts or ("verdict", "drafter", "engine", "wire"):
        click.echo(f"{part} …", err=True)
        match part:
            case "verdict":
                record[part] = verdict.measure(target_dir, threads=threads, rounds=20 * rounds)
            case "drafter":
                record[part] = drafter.measure(
                    drafter.specs_of(drafter.named(drafter_dir), None), threads=threads, rounds=rounds
                )
            case "engine":
                record[part] = engine.measure(target_dir, threads=threads, rounds=rounds)
            case _:
                record[part] = wire.measure(drafter_dir, target_dir, max_tokens=max_tokens)
    click.echo(json.dumps(record))
