"""`python -m tests.faults`: everything that can go wrong between boards and verifiers, done to a fleet of processes."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from tests.faults import suite

seeded = click.option("--seed", default=1, show_default=True, help="Of all that is drawn at random.")


@click.group()
def main() -> None:
    """Faults on a fleet of processes: no text may be lost, doubled or wrong, and none may wait long."""


@main.command()
@click.option("--quick", is_flag=True, help="Each once, for its shortest time: a minute instead of a quarter hour.")
@seeded
def run(quick: bool, seed: int) -> None:
    """Each fault by itself, and what it costs."""
    _end(suite.run(seed, _tell, quick=quick))


@main.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True)
@click.option("--devices", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--every", "every_s", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True)
@seeded
def soak(minutes: float, devices: int, every_s: float, seed: int) -> None:
    """Random faults, one every few seconds, several at a time."""
    _end(suite.soak(seed, _tell, minutes=minutes, num_boards=devices, every_s=every_s))


def _tell(line: str) -> None:
    click.echo(line, err=True)


def _end(record: dict[str, Any]) -> None:
    """Print the record; a code that is not 0 where something was lost or a bar missed."""
    click.echo(json.dumps(record))
    for what in [*record["wrong"], *record["missed"]]:
        click.echo(f"MISSED {what}", err=True)
    sys.exit(1 if record["wrong"] or record["missed"] else 0)


if __name__ == "__main__":
    main()
