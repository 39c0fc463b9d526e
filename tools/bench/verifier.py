"""`python -m tools.bench verifier`: what a fleet gets from one verifier, part by part, each beside its peer."""

from __future__ import annotations

import json
from importlib import import_module

import click

from tools.bench.record import machine

PARTS = {
    "speculation": "committed tokens a second with recorded drafts, over plain decoding by the same engine",
    "plain": "plain decoding beside vLLM and transformers",
    "live": "200 devices at a real broker: what a verdict takes beyond engine and queue",
    "tenants": "two tenants, one of which sends ten times the rows",
    "kv": "64 sessions in the memory of 8",
    "replicas": "three replicas, of which one is killed every few seconds",
    "vllm": "drafts through vLLM beside its own decoding",
}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="All where absent.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--quick", is_flag=True, help="A shorter run of each, to see that it works.")
@click.option("--json", "as_json", is_flag=True, help="One line, for a machine.")
def main(parts: tuple[str, ...], threads: int, quick: bool, as_json: bool) -> None:
    """What a fleet gets from one verifier."""
    record: dict[str, object] = {"benchmark": "verifier", "machine": machine()}
    for part in parts or PARTS:
        click.echo(f"{part}: {PARTS[part]} …", err=True)
        record[part] = import_module(f"tools.bench.verifier_{part}").measure(threads=threads, quick=quick)
    click.echo(json.dumps(record, indent=None if as_json else 2))
