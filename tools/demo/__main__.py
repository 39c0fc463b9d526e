"""`python -m tools.demo`: two machines' worth of processes on this one, and what drafting gains over the same link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console

from edge.drafters import manifest
from edge.text import Text
from protocol.errors import OutriderError
from tools.bench.record import machine
from tools.demo.modes import MODES, PROMPTS
from tools.demo.report import summary, table
from tools.demo.stage import Stage, last_words, spawn
from tools.models import PAIRS, prepare

DEFAULT_MODES = ("cloud", "sync", "async", "never_wait")


def board_events(port: int, drafter: Path, state: Path, core: int, options: list[str]) -> Iterator[dict]:
    """The board's process and its events. Raises OutriderError when it ends before its last one."""
    arguments = ["-m", "tools.demo.board", "--port", str(port), "--drafter", str(drafter), "--state", str(state)]
    board = spawn([*arguments, *options], core=core, stdout=subprocess.PIPE)
    assert board.stdout is not None
    try:
        for line in board.stdout:
            event = json.loads(line)
            yield event
            if event["event"] == "end":
                return
        raise OutriderError(f"the board's process ended with {board.wait()}", where="tools.demo.board")
    finally:
        last_words(board)


def references(
    target: Path, drafter: Path, numerics: str, sampling: dict, max_tokens: int, num: int
) -> list[list[int]]:
    """The target's own text for each prompt, from a process that shares no session code with the fleet."""
    text = Text.load(drafter, manifest.read(drafter, "drafter"))
    lines = [
        {
            "prompt": text.chat([{"role": "user", "content": prompt}]),
            "sampling": {**sampling, "seed": seed},
            "max_tokens": max_tokens,
            "stop_ids": sorted(text.stop_ids),
        }
        for seed, prompt in enumerate(PROMPTS[:num], start=1)
    ]
    alone = spawn(
        ["-m", "tools.demo.reference", "--target", str(target), "--numerics", numerics],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    out, _ = alone.communicate("".join(json.dumps(line) + "\n" for line in lines))
    if alone.returncode:
        raise OutriderError("the reference could not be computed", where="tools.demo.reference")
    return [json.loads(line) for line in out.splitlines()]


def play(
    console: Console, drafter: Path, target: Path, *, modes: tuple[str, ...], rtt_ms: float, numerics: str,
    max_tokens: int, sampling: dict, prompts: int,
) -> dict:  # fmt: skip
    """All prompts in all modes over one link, compared with the target alone; the demo's JSON object."""
    options = [f"--mode={mode}" for mode in modes]
    options += [f"--max-tokens={max_tokens}", f"--prompts={prompts}"]
    options += [f"--temperature={sampling['temperature']}", f"--top-p={sampling['top_p']}"]
    texts: dict[str, list[dict]] = {mode: [] for mode in modes}
    end: dict = {}
    console.print(f"Starting broker, link of {rtt_ms:g} ms, verifier and board …")
    edge_core, cloud_core = 0, (os.cpu_count() or 1) - 1
    with Stage(target, rtt_ms=rtt_ms, numerics=numerics, verifier_core=cloud_core) as stage:
        at = ""
        for event in board_events(stage.board_port, drafter, stage.folder / "state", edge_core, options):
            match event["event"]:
                case "piece":
                    heading = f"[{MODES[event['mode']].title}] {PROMPTS[len(texts[event['mode']])]}"
                    if heading != at:
                        console.print(f"\n\n{heading}", style="bold", markup=False, highlight=False)
                        at = heading
                    console.print(event["text"], end="", markup=False, highlight=False, soft_wrap=True)
                case "done":
                    texts[event["mode"]].append(event)
                case "end":
                    end = event
    console.print("\n\nThe target alone, for comparison …")
    expected = references(target, drafter, numerics, sampling, max_tokens, prompts)
    identical = {mode: [text["ids"] for text in texts[mode]] == expected for mode in modes}
    figures = {mode: summary(texts[mode]) for mode in modes}
    console.print(table(figures, end["titles"], identical))
    return {
        "identical": all(identical.values()),
        "modes": figures,
        "identical_by_mode": identical,
        "rtt_ms": rtt_ms,
        "numerics": numerics,
        "sampling": sampling,
        "max_tokens": max_tokens,
        "prompt_tokens": [text["prompt_tokens"] for text in texts[modes[0]]],
        "drafter": end["drafter"],
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
    try:
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
            sampling={"temperature": temperature, "top_p": top_p},
            prompts=prompts,
        )
    except OutriderError as error:
        click.echo(f"demo: {error}", err=True)
        sys.exit(error.exit_code)
    if as_json:
        click.echo(json.dumps(result))
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
