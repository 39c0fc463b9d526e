"""`python -m tools.demo`: two machines' worth of processes on this one, and what drafting gains over the same link."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
from rich.console import Console

from edge.drafters import manifest
from edge.text import Text
from protocol.sampling import Sampling
from tools.bench.record import machine
from tools.demo.alone import texts_alone
from tools.demo.prompts import PROMPTS
from tools.demo.report import summary, table
from tools.exits import reported
from tools.models import PAIRS, prepare
from tools.modes import MODES
from tools.player import Part, Player
from tools.stage import Stage

DEFAULT_MODES = ("cloud", "sync", "async", "never_wait", "auto")
GAMMA = 4
WARM_TOKENS = 12


def title(mode: str) -> str:
    return f"{MODES[mode].title}, {GAMMA} drafts" if mode == "sync" else MODES[mode].title


def perform(
    console: Console, player: Player, text: Text, modes: tuple[str, ...], prompts: int, max_tokens: int
) -> dict[str, list[dict]]:
    """All prompts in all modes, after a warm-up; modes take turns, so that a noisy moment meets them all."""
    for mode in modes:
        player.play(Part(mode, 0, WARM_TOKENS, gamma=GAMMA))
    played: dict[str, list[dict]] = {mode: [] for mode in modes}
    for number in range(prompts):
        for mode in modes:
            heading = f"\n\n[{title(mode)}] {PROMPTS[number]}"
            console.print(heading, style="bold", markup=False, highlight=False)
            pieces = text.stream()
            for event in player.events(Part(mode, number, max_tokens, seed=number + 1, gamma=GAMMA, aloud=True)):
                if event["event"] == "done":
                    played[mode].append(event)
                else:
                    piece = pieces.push(event["ids"])
                    console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    return played


def play(
    console: Console, drafter: Path, target: Path, *, modes: tuple[str, ...], rtt_ms: float, numerics: str,
    max_tokens: int, sampling: Sampling, prompts: int,
) -> dict:  # fmt: skip
    """All prompts in all modes over one link, compared with the target alone; the demo's JSON object."""
    text = Text.load(drafter, manifest.read(drafter, "drafter"))
    options = [f"--drafter={drafter}", f"--temperature={sampling.temperature}", f"--top-p={sampling.top_p}"]
    edge_core, cloud_core = 0, (os.cpu_count() or 1) - 1
    console.print(f"Starting broker, link of {rtt_ms:g} ms, verifier and board …")
    with Stage() as stage, stage.link(rtt_ms) as link:
        stage.serve_model(target, numerics=numerics, core=cloud_core)
        state = stage.folder / "state"
        with Player("tools.demo.board", options, stage.broker(link), state, core=edge_core) as player:
            played = perform(console, player, text, modes, prompts, max_tokens)
    console.print("\n\nThe target alone, for comparison …")
    expected = texts_alone(target, text, PROMPTS[:prompts], numerics, sampling, max_tokens)
    identical = {mode: [one["ids"] for one in played[mode]] == expected for mode in modes}
    figures = {mode: summary(played[mode]) for mode in modes}
    console.print(table(figures, {mode: title(mode) for mode in modes}, identical))
    return {
        "identical": all(identical.values()),
        "modes": figures,
        "identical_by_mode": identical,
        "rtt_ms": rtt_ms,
        "numerics": numerics,
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p},
        "max_tokens": max_tokens,
        "prompt_tokens": [one["prompt_tokens"] for one in played[modes[0]]],
        "drafter": player.facts["drafter"],
        "target": manifest.read(target, "target").name,
        "cores": {"board": 1, "verifier": 1},
        "machine": machine(),
    }


@click.command()
@click.option("--pair", type=click.Choice(sorted(PAIRS)), default="smollm2", show_default=True)
@click.option("--drafter", type=click.Path(path_type=Path), help="A directory of your own, with --target.")
@click.option("--target", type=click.Path(path_type=Path), help="A directory of your own, with --drafter.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(sorted(MODES)), help="Repeatable; four when absent.")
@click.option("--rtt-ms", type=float, default=80.0, show_default=True)
@click.option("--max-tokens", type=int, default=96, show_default=True)
@click.option("--prompts", type=click.IntRange(1, len(PROMPTS)), default=len(PROMPTS), show_default=True)
@click.option("--numerics", type=click.Choice(["exact", "fast"]), default="exact", show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead.")
def main(
    pair: str, drafter: Path | None, target: Path | None, modes: tuple[str, ...], rtt_ms: float, max_tokens: int,
    prompts: int, numerics: str, temperature: float, top_p: float, as_json: bool,
) -> None:  # fmt: skip
    """Draft on one process, certify on another, over a real broker and an emulated link."""
    if (drafter is None) != (target is None):
        raise click.UsageError("--drafter and --target belong together")
    console = Console(quiet=as_json)
    with reported("demo"):
        if drafter is None or target is None:
            drafter, target = prepare(pair)
        result = play(
            console,
            drafter,
            target,
            modes=modes or DEFAULT_MODES,
            rtt_ms=rtt_ms,
            numerics=numerics,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=temperature, top_p=top_p),
            prompts=prompts,
        )
    if as_json:
        click.echo(json.dumps(result))
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
