"""`python -m tools.bench link`: texts over a long link in every mode, through broker, proxy and both processes."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tools.arrivals import gaps_ms, mean_gap_ms, p95
from tools.bench.record import machine
from tools.bench.sides import Real, Replayed, Sides, Way
from tools.boards import NAMES, BoardTiming, board_timing
from tools.exits import reported
from tools.models import PAIRS
from tools.modes import MODES
from tools.player import Player
from tools.stage import LongLink, Stage
from tools.traces import RECORDED
from tools.wan import Counters

DEFAULT_MODES = ("cloud", "sync", "async", "never_wait", "auto")
DEFAULT_RTTS_MS = (20.0, 50.0, 100.0, 150.0)
COLOCATED_MODES = ("sync", "async")


@dataclass
class Takes:
    """What was measured of one way. texts: by the text's number, what each round of it told; wire: None without a link
    to count at.
    """

    way: Way
    texts: dict[int, list[dict]] = field(default_factory=dict)
    wire: Counters | None = None

    def add(self, text: int, done: dict, wire: Counters | None) -> None:
        self.texts.setdefault(text, []).append(done)
        if wire is not None:
            so_far = self.wire or Counters()
            self.wire = replace(
                so_far, bytes_up=so_far.bytes_up + wire.bytes_up, bytes_down=so_far.bytes_down + wire.bytes_down
            )

    def figures(self, expected: Sequence[Sequence[int]], twin_ms: float | None, *, tls: bool) -> dict[str, Any]:
        """itl_ms_mean: over the texts, of the median of each text's rounds; bytes: those of open and close are in."""
        rounds = [done for takes in self.texts.values() for done in takes]
        tokens = sum(len(done["ids"]) for done in rounds)
        gaps = [gap for done in rounds for gap in gaps_ms(done["arrivals"])]
        itl_ms = statistics.fmean(
            statistics.median(mean_gap_ms(done["arrivals"]) for done in takes) for takes in self.texts.values()
        )
        found: dict[str, Any] = {
            "rtt_ms": self.way.rtt_ms,
            "mode": self.way.name,
            "tls": tls,
            "gamma": self.way.gamma or None,
            "texts": len(self.texts),
            "rounds": len(rounds) // len(self.texts),
            "tokens": tokens,
            "identical": all(done["ids"] == list(expected[text]) for text in self.texts for done in self.texts[text]),
            "itl_ms_mean": round(itl_ms, 2),
            "itl_ms_p50": round(statistics.median(gaps), 2) if gaps else 0.0,
            "itl_ms_p95": round(p95(gaps), 2),
            "first_token_ms": round(statistics.median(done["arrivals"][0][0] for done in rounds) * 1e3, 1),
            "cloud_steps_per_token": round(sum(done["tally"]["commits"] for done in rounds) / tokens, 4),
            "drafts_per_token": round(sum(done["tally"]["drafts"] for done in rounds) / tokens, 3),
            "application_bytes_per_token": _share(
                sum(done["bytes_up"] for done in rounds), sum(done["bytes_down"] for done in rounds), tokens
            ),
            "wire_bytes_per_token": self.wire and _share(self.wire.bytes_up, self.wire.bytes_down, tokens),
            "heard_ms": {
                name: round(statistics.median(values), 2) if (values := _known(rounds, name)) else None
                for name in ("pass", "step", "round_trip")
            },
        }
        if twin_ms is not None:
            found["twin_itl_ms_mean"] = round(twin_ms, 2)
            found["live_over_twin"] = round(itl_ms / twin_ms, 3)
        return found


def _share(up: int, down: int, tokens: int) -> dict[str, float]:
    return {"up": round(up / tokens, 2), "down": round(down / tokens, 2), "both": round((up + down) / tokens, 2)}


def _known(rounds: Sequence[dict], name: str) -> list[float]:
    return [done["heard_ms"][name] for done in rounds if done["heard_ms"][name]]


@dataclass
class Show:
    """All ways of one link, as one player plays them."""

    sides: Sides
    progress: Progress
    rounds: int

    def perform(self, ways: Sequence[Way], player: Player, link: LongLink | None) -> list[Takes]:
        """Each text in each way, taking turns so that a noisy moment meets them all."""
        takes = []
        for way in ways:
            if way.mode == "sync":
                way = replace(way, gamma=self.sides.best_gamma(way, player))
            player.play(self.sides.part(way, 0, warm=True))
            takes.append(Takes(way))
        task = self.progress.add_task(self._title(ways), total=self.rounds * self.sides.texts * len(ways))
        for _ in range(self.rounds):
            for text in range(self.sides.texts):
                for take in takes:
                    mark = link.settled() if link else None
                    done = player.play(self.sides.part(take.way, text))
                    take.add(text, done, link.settled().since(mark) if link and mark else None)
                    self.progress.advance(task)
        return takes

    @staticmethod
    def _title(ways: Sequence[Way]) -> str:
        return "co-located" if ways[0].colocated else f"R {ways[0].rtt_ms:g} ms"


def measure(
    sides: Sides, *, modes: Sequence[str], rtts_ms: Sequence[float], colocated: bool, tls: Sequence[bool], rounds: int,
    console: Console,
) -> dict[str, Any]:  # fmt: skip
    """Everything that was asked for; see `Takes.figures` for a cell. Raises OutriderError when a process fails."""
    played: list[tuple[bool, Takes]] = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        show = Show(sides, progress, rounds)
        for encrypted in tls:
            with Stage(tls=encrypted) as stage:
                broker_kind = stage.broker_kind
                sides.serve(stage)
                for rtt_ms in rtts_ms:
                    with ExitStack() as scene:
                        link = scene.enter_context(stage.link(rtt_ms))
                        player = scene.enter_context(sides.player(stage, stage.broker(link), colocated=False))
                        takes = show.perform([Way(mode, rtt_ms) for mode in modes], player, link)
                    played += [(encrypted, one) for one in takes]
                    _report(console, sides, takes, encrypted)
                if colocated and encrypted is tls[0]:
                    with sides.player(stage, stage.broker(), colocated=True) as player:
                        ways = [Way(mode, 0.0, colocated=True) for mode in COLOCATED_MODES]
                        takes = show.perform(ways, player, None)
                    played += [(encrypted, one) for one in takes]
                    _report(console, sides, takes, encrypted)
    expected = sides.expected()
    cells = [take.figures(expected, sides.twin_ms(take.way), tls=encrypted) for encrypted, take in played]
    return {
        "benchmark": "link",
        "identical": all(cell["identical"] for cell in cells),
        "broker": broker_kind,
        **sides.facts(),
        "cells": cells,
        "machine": machine(),
    }


def _report(console: Console, sides: Sides, takes: Sequence[Takes], tls: bool) -> None:
    for take in takes:
        itl_ms = statistics.fmean(mean_gap_ms(done["arrivals"]) for texts in take.texts.values() for done in texts)
        twin_ms = sides.twin_ms(take.way)
        gamma = f", {take.way.gamma} drafts" if take.way.gamma else ""
        twin = f", twin {twin_ms:.1f}" if twin_ms else ""
        line = (
            f"R {take.way.rtt_ms:g} ms{', TLS' if tls else ''}, {take.way.name}{gamma}: {itl_ms:.1f} ms a token{twin}"
        )
        console.print(line, markup=False, highlight=False)


@click.command()
@click.option(
    "--traces",
    "files",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Of `twin record`; the recorded ones if absent.",
)
@click.option("--board", type=click.Choice(NAMES), default="orin-nano", show_default=True)
@click.option("--cloud-step-ms", type=click.FloatRange(0.01), default=60.0, show_default=True)
@click.option("--cloud-prefill", type=click.FloatRange(1), default=20_000.0, show_default=True, help="Tokens a second.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=20, show_default=True)
@click.option("--colocated-pass-ms", type=click.FloatRange(0.01), default=4.0, show_default=True)
@click.option("--real", is_flag=True, help="Real models instead of traces.")
@click.option("--pair", type=click.Choice(sorted(PAIRS)), default="smollm2", show_default=True, help="With --real.")
@click.option("--max-tokens", type=click.IntRange(2), default=96, show_default=True, help="With --real.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(sorted(MODES)), help="Repeatable; five when absent.")
@click.option("--rtt-ms", "rtts_ms", multiple=True, type=click.FloatRange(0), help="Repeatable; 20 50 100 150.")
@click.option("--colocated/--no-colocated", default=True, show_default=True, help="The drafter beside the verifier.")
@click.option("--tls", type=click.Choice(["off", "on", "both"]), default="both", show_default=True)
@click.option("--texts", type=click.IntRange(0), default=0, help="The first so many; 0: all.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Of which the median counts.")
@click.option("--picture", type=click.Path(path_type=Path), help="A PNG or SVG of ms a token over R.")
def main(
    files: tuple[Path, ...], board: str, cloud_step_ms: float, cloud_prefill: float, prompt_tokens: int,
    colocated_pass_ms: float, real: bool, pair: str, max_tokens: int, modes: tuple[str, ...],
    rtts_ms: tuple[float, ...], colocated: bool, tls: str, texts: int, rounds: int, picture: Path | None,
) -> None:  # fmt: skip
    """Milliseconds a token, cloud steps and bytes in every mode over an emulated link; one JSON record on stdout."""
    if real and files:
        raise click.UsageError("--real plays no --traces")
    if picture and (picture.suffix.lower() not in (".png", ".svg") or not picture.absolute().parent.is_dir()):
        raise click.BadParameter("name a .png or .svg in a folder that exists", param_hint="--picture")
    console = Console(stderr=True)
    sides: Sides
    with reported("bench"):
        if real:
            sides = Real.of(pair, texts, max_tokens)
        else:
            timing = board_timing(board)
            beside = BoardTiming(colocated_pass_ms / 1e3, timing.row_share, cloud_prefill)
            sides = Replayed.of(
                files or (RECORDED,), texts, prompt_tokens, timing, beside, cloud_step_ms / 1e3, 1 / cloud_prefill
            )
        record = measure(
            sides,
            modes=modes or DEFAULT_MODES,
            rtts_ms=rtts_ms or DEFAULT_RTTS_MS,
            colocated=colocated,
            tls={"off": [False], "on": [True], "both": [False, True]}[tls],
            rounds=rounds,
            console=console,
        )
        click.echo(json.dumps(record))
        if picture:
            from tools.bench.link_picture import draw  # matplotlib takes a second, and not everybody wants a picture

            draw(record, picture)
    sys.exit(0 if record["identical"] else 1)
