"""What the policies reach in the twin: the table, every cell in which `auto` must not lose, loads and bad drafts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path

import click
from rich.progress import track

from cloud.verifier import Bounds
from edge.config import DraftingConfig
from tools import traces
from tools.arrivals import mean_gap_ms
from tools.bench.record import machine
from tools.boards import BOARDS
from tools.modes import MODES
from tools.traces import Trace
from tools.twin.fleet import Result, Scene, simulate
from tools.twin.replay import Script, StepTime
from tools.twin.report import figures

STEP_S = 0.060
PREFILL_ROW_S = 1 / 20_000
TABLE_RTT_MS = (20, 50, 100, 150)
GRID_STEP_MS = (20, 30, 60, 120)
GRID_RTT_MS = (5, 20, 50, 100, 200, 300)
KNEE = 128
LOADS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
LOAD_FIGURES = ("tokens_per_s", "whole_run_tokens_per_s", "itl_ms_mean", "itl_ms_p95", "rows_per_token")
CLOUD_SLACK, RIVAL_SLACK, RIVAL_RTT_MS = 1.01, 1.03, 20
SHORT, LONG = 20, 2000  # tokens of a prompt
TURNS = 3  # seeds, each with a prompt of another length, so that one phase of step and pass does not decide


@dataclass(frozen=True)
class Cell:
    """One board, link and verifier."""

    board: str
    rtt_ms: float
    step_ms: float = 1e3 * STEP_S

    def play(
        self,
        mode: str,
        recorded: Sequence[Trace],
        *,
        seed: int = 0,
        prompt: int = SHORT,
        paced: bool = False,
        patience_s: float | None = None,
    ) -> Result:
        """All traces in this mode, one after another on one device."""
        chosen = MODES[mode]
        return simulate(
            Scene(
                scripts=[Script(trace, prompt) for trace in recorded],
                board=BOARDS[self.board],
                time=StepTime(self.step_ms / 1e3, prefill_row_s=PREFILL_ROW_S),
                drafting=DraftingConfig(policy=chosen.policy, paced=paced),
                patience_s=chosen.patience_s if patience_s is None else patience_s,
                rtt_s=self.rtt_ms / 1e3,
                seed=seed,
            )
        )


def itl(result: Result) -> list[float]:
    """Mean ms a token of each text."""
    return [mean_gap_ms(story.arrivals) for device in result.stories for story in device]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def table(recorded: Sequence[Trace]) -> list[dict]:
    """Mean ms a token over all traces, before and after pacing, by board, round trip and mode."""
    rows = []
    asked = [
        ("cloud", "cloud", False, None),
        ("async", "async", False, None),
        ("never_wait", "never_wait", False, None),
        ("auto", "auto", False, None),
        ("auto_paced", "auto", True, None),
        ("auto_waits", "auto", False, inf),
        ("auto_waits_paced", "auto", True, inf),
    ]
    cells = list(product(BOARDS, TABLE_RTT_MS))
    for board, rtt_ms in track(cells, "table", transient=True):
        row: dict = {"board": board, "rtt_ms": rtt_ms}
        for name, mode, paced, patience_s in asked:
            played = [
                Cell(board, rtt_ms).play(mode, recorded, seed=i, prompt=SHORT + i, paced=paced, patience_s=patience_s)
                for i in range(TURNS)
            ]
            found = [figures(result) for result in played]
            row[name] = {
                "itl_ms": round(mean([one["itl_ms_mean"] for one in found]), 2),
                "cloud_steps_per_token": round(mean([one["cloud_steps_per_token"] for one in found]), 3),
                "bytes_per_token": round(mean([one["bytes_per_token"] for one in found]), 1),
                "drafts_per_step": round(
                    mean([one["drafts_per_token"] / one["cloud_steps_per_token"] for one in found]), 2
                ),
            }
        rows.append(row)
    return rows


def grid(recorded: Sequence[Trace]) -> dict:
    """Every cell and trace: `auto` at patience 0 beside cloud alone and, from 20 ms on, the better of the chains."""
    cells = [Cell(board, rtt, step) for board, step, rtt in product(sorted(BOARDS), GRID_STEP_MS, GRID_RTT_MS)]
    lost: list[dict] = []
    over_cloud, over_rival = [], []
    for cell in track(cells, "grid", transient=True):
        auto, waits, never = (itl(cell.play(mode, recorded)) for mode in ("auto", "async", "never_wait"))
        for i, ours in enumerate(auto):
            rival = min(waits[i], never[i])
            over_cloud.append(ours / cell.step_ms)
            if cell.rtt_ms >= RIVAL_RTT_MS:
                over_rival.append(ours / rival)
            slower = cell.rtt_ms >= RIVAL_RTT_MS and ours > RIVAL_SLACK * rival
            if slower or ours > CLOUD_SLACK * cell.step_ms:
                lost.append(
                    {
                        "board": cell.board, "step_ms": cell.step_ms, "rtt_ms": cell.rtt_ms, "trace": i,
                        "auto": round(ours, 2), "waits": round(waits[i], 2), "never_waits": round(never[i], 2),
                    }
                )  # fmt: skip
    return {
        "cells": len(over_cloud),
        "lost": lost,
        "auto_over_cloud": {"worst": round(max(over_cloud), 4), "mean": round(mean(over_cloud), 3)},
        "auto_over_better_chain": {"worst": round(max(over_rival), 4), "mean": round(mean(over_rival), 3)},
    }


def whole_answers(recorded: Sequence[Trace]) -> dict:
    """From the request to the last token, prefill on both sides included: the worst of `auto` over cloud alone."""
    worst: dict[str, float] = {}
    for prompt in (SHORT, LONG):
        ratios = []
        for board, step_ms, rtt_ms in product(sorted(BOARDS), GRID_STEP_MS, GRID_RTT_MS):
            cell = Cell(board, rtt_ms, step_ms)
            auto, cloud = (cell.play(mode, recorded, prompt=prompt) for mode in ("auto", "cloud"))
            for ours, theirs in zip(auto.stories[0], cloud.stories[0], strict=True):
                ratios.append((ours.arrivals[-1][0] - ours.asked_at) / (theirs.arrivals[-1][0] - theirs.asked_at))
        worst[f"prompt_{prompt}"] = round(max(ratios), 4)
    return worst


def load(recorded: Sequence[Trace], loads: Sequence[int] = LOADS, board: str = "orin-nano") -> list[dict]:
    """One verifier, flat to KNEE rows and proportional beyond, with more and more devices at R 50."""
    rows = []
    for devices in track(loads, "load", transient=True):
        row: dict = {"devices": devices}
        for mode in ("cloud", "auto"):
            scene = Scene(
                scripts=[Script(trace, SHORT) for trace in recorded],
                board=BOARDS[board],
                time=StepTime(STEP_S, KNEE, STEP_S / KNEE, PREFILL_ROW_S),
                drafting=DraftingConfig(policy=MODES[mode].policy),
                devices=devices,
                texts=len(recorded) if devices <= KNEE else 2,
                spread_s=2.0,
                bounds=Bounds(sessions=devices + 1),
            )
            found = figures(simulate(scene))
            row[mode] = {name: found[name] for name in LOAD_FIGURES}
        for name, rate in (("gain", "tokens_per_s"), ("whole_run_gain", "whole_run_tokens_per_s")):
            row[name] = round(row["auto"][rate] / row["cloud"][rate], 3)
        rows.append(row)
    return rows


def spoiled(recorded: Sequence[Trace], keep: float = 0.15) -> list[Trace]:
    """The same texts with a drafter that is right at only every 1/keep-th position, and as sure as ever."""
    every = round(1 / keep)
    return [spoil(trace, [i for i in range(len(trace.target)) if i % every]) for trace in recorded]


def spoil(trace: Trace, positions: Sequence[int]) -> Trace:
    ids = list(trace.draft_ids)
    for i in positions:
        ids[i] = tuple(range(10**6, 10**6 + len(ids[i])))
    return Trace(trace.prompt, trace.target, tuple(ids), trace.draft_p, trace.p_target)


def bad_drafts(recorded: Sequence[Trace]) -> list[dict]:
    """`auto` with a drafter that is hardly ever right, beside cloud alone, at both ends of patience."""
    bad = spoiled(recorded)
    rows = []
    for board, patience_s in product(sorted(BOARDS), (0.0, inf)):
        played = Cell(board, 50).play("auto", bad, paced=True, patience_s=patience_s)
        found, means = figures(played), itl(played)
        rows.append(
            {
                "board": board,
                "patience_s": "inf" if patience_s == inf else patience_s,
                "over_cloud": [round(one / (1e3 * STEP_S), 3) for one in means],
                "board_rows_per_token": found["board_rows_per_token"],
                "bytes_per_token": found["bytes_per_token"],
            }
        )
    return rows


PARTS = {"table": table, "grid": grid, "whole_answers": whole_answers, "load": load, "bad_drafts": bad_drafts}


@click.command()
@click.option("--traces", "path", type=click.Path(path_type=Path), default=traces.RECORDED, show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(sorted(PARTS)))
def main(path: Path, parts: tuple[str, ...]) -> None:
    """The policies in the twin: one JSON record of what they reach and where they lose."""
    recorded = traces.load(path)
    record: dict = {"benchmark": "policy", "machine": machine(), "traces": path.name}
    record["acceptance"] = [round(trace.acceptance, 3) for trace in recorded]
    for part in parts or PARTS:
        record[part] = PARTS[part](recorded)
    click.echo(json.dumps(record))
