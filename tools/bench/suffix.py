"""What was written before, as guesses: how many in a row are right, and what a board gains by them in the twin.

Peer: prompt lookup, as transformers and vLLM offer it (the latest three ids, or two, or one, are searched in the text
and what followed them there is guessed), on the same texts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from edge.config import DraftingConfig
from edge.drafters.recall import Recall, RecallOdds
from tools import traces
from tools.arrivals import mean_gap_ms
from tools.bench.record import BOUND, machine
from tools.boards import BOARDS
from tools.traces import Trace
from tools.twin.fleet import Result, Scene, simulate
from tools.twin.replay import Script, StepTime
from tools.twin.report import figures

GUESSES = 10  # in a row, of the synchronous scheme; prompt lookup's own default
LOOKUP_IDS = 3  # that prompt lookup matches at most
STEP_S = 0.060
PREFILL_ROW_S = 1 / 20_000
RTTS_MS = (50, 150)
PHASES = 6  # spread over a step: where a text's misses fall in it decides more than a drafter does
HOWS = ("off", "mixed", "alone")

Guess = Callable[[Sequence[int]], list[int]]


def lookup(text: Sequence[int]) -> list[int]:
    """What prompt lookup guesses behind a text: at most GUESSES ids."""
    for size in range(min(LOOKUP_IDS, len(text) - 1), 0, -1):
        end = list(text[-size:])
        for at in range(len(text) - size):
            if list(text[at : at + size]) == end:
                return list(text[at + size : at + size + GUESSES])
    return []


def recalls(odds: RecallOdds) -> Guess:
    """The likeliest chain of the suffix automaton, for calls with ever longer texts."""
    recall = Recall(odds)

    def guess(text: Sequence[int]) -> list[int]:
        recall.become(text)
        match = recall.end()
        guesses: list[int] = []
        while len(guesses) < GUESSES and (best := recall.candidates(match, 1)):
            guesses.append(best[0].id)
            match = recall.step(match, best[0].id)
        return guesses

    return guess


def rounds(trace: Trace, guess: Guess) -> tuple[int, int]:
    """(rounds, guesses) of the synchronous scheme: GUESSES at most, as many as are right and one more are accepted."""
    target, done, num, guessed = trace.target, 0, 0, 0
    while done < len(target):
        guesses = guess([*trace.prompt_ids, *target[:done]])
        right = 0
        while right < len(guesses) and target[done + right : done + right + 1] == (guesses[right],):
            right += 1
        done, num, guessed = done + right + 1, num + 1, guessed + len(guesses)
    return num, guessed


def guesses(recorded: Sequence[Trace]) -> dict[str, dict[str, float]]:
    """Tokens and guesses a round of the synchronous scheme over all texts, without a model, by who guesses."""
    odds = RecallOdds()
    tokens = sum(len(trace.target) for trace in recorded)
    found = {}
    for name, make in (("suffix", lambda: recalls(odds)), ("prompt_lookup", lambda: lookup)):
        played = [rounds(trace, make()) for trace in recorded]
        num = sum(one for one, _ in played)
        found[name] = {
            "tokens_per_round": round(tokens / num, 3),
            "guesses_per_round": round(sum(one for _, one in played) / num, 2),
        }
    return found


def play(
    scripts: Sequence[Script], board: str, rtt_ms: float, patience_s: float, how: str, policy: str, phases: int
) -> list[Result]:
    """All texts one after another on one device, in each of so many phases of step and round trip."""
    return [
        simulate(
            Scene(
                scripts=scripts,
                board=BOARDS[board],
                time=StepTime(STEP_S, prefill_row_s=PREFILL_ROW_S),
                drafting=DraftingConfig(policy=policy),  # type: ignore[arg-type]
                patience_s=patience_s,
                rtt_s=rtt_ms / 1e3 + phase * STEP_S / phases,
                seed=phase,
                suffix=how,  # type: ignore[arg-type]
            )
        )
        for phase in range(phases)
    ]


def cell(
    scripts: Sequence[Script], board: str, rtt_ms: float, patience_s: float, policy: str, phases: int = PHASES
) -> dict[str, Any]:
    """The three ways beside each other. speed, accepted: of the mixed drafter over the model alone; worst_text: of
    the text of least speed, over all phases.
    """
    by_how = {how: play(scripts, board, rtt_ms, patience_s, how, policy, phases) for how in HOWS}
    row: dict[str, Any] = {"board": board, "policy": policy, "rtt_ms": rtt_ms}
    row["patience_s"] = "inf" if patience_s == inf else patience_s
    gaps_ms: dict[str, NDArray[np.float64]] = {}  # [phases, texts]
    for how, played in by_how.items():
        found = [figures(one) for one in played]
        steps = sum(one["cloud_steps_per_token"] for one in found) / phases
        itl_ms = sum(one["itl_ms_mean"] for one in found) / phases
        row[how] = {
            "tokens_per_s": round(1e3 / itl_ms, 2),
            "tokens_per_round": round(1 / steps, 3),
            "board_rows_per_token": round(sum(one["board_rows_per_token"] for one in found) / phases, 2),
            "bytes_per_token": round(sum(one["bytes_per_token"] for one in found) / phases, 1),
        }
        gaps_ms[how] = np.array([[mean_gap_ms(story.arrivals) for story in one.stories[0]] for one in played])
    for name, key in (("speed", "tokens_per_s"), ("accepted", "tokens_per_round")):
        row[name] = round(row["mixed"][key] / row["off"][key], 4)
    worst, bound = min(map(speed, gaps_ms["off"].T, gaps_ms["mixed"].T), key=lambda one: one[0])
    row["worst_text"] = {"speed": round(worst, 4), "bound_95": None if bound is None else round(bound, 4)}
    return row


def speed(before: NDArray[np.float64], now: NDArray[np.float64]) -> tuple[float, float | None]:
    """How many times as fast a text is whose tokens came so many ms apart in each phase [phases], and the half-width of
    the 95 % interval of that ratio of means of pairs, None where one phase is all there is.
    """
    ratio = float(before.mean() / now.mean())
    if before.size == 1:
        return ratio, None
    return ratio, BOUND * float((before - ratio * now).std(ddof=1) / now.mean()) / math.sqrt(before.size)


def measure(files: Sequence[Path], boards: Sequence[str], policies: Sequence[str], phases: int) -> dict[str, Any]:
    """Everything, by the name of each trace file. Raises ConfigError for traces without the prompts' ids."""
    record: dict[str, Any] = {"benchmark": "suffix", "machine": machine(), "step_ms": 1e3 * STEP_S, "phases": phases}
    record["texts"] = {}
    for file in files:
        recorded = traces.load(file)
        scripts = [Script.recorded(trace) for trace in recorded]
        cells = list(product(boards, policies, (0.0, inf), RTTS_MS))
        record["texts"][file.stem] = {
            "acceptance": [round(trace.acceptance, 3) for trace in recorded],
            "guesses": guesses(recorded),
            "cells": [
                cell(scripts, board, rtt_ms, patience_s, policy, phases)
                for board, policy, patience_s, rtt_ms in track(cells, file.stem, transient=True)
            ],
        }
    return record


@click.command()
@click.option("--traces", "files", type=click.Path(path_type=Path), multiple=True, help="With ids of their prompts.")
@click.option("--board", "boards", type=click.Choice(sorted(BOARDS)), multiple=True, help="Repeatable; all if absent.")
@click.option("--policy", "policies", type=click.Choice(["auto", "chain", "tree"]), multiple=True, default=["auto"])
@click.option("--phases", type=click.IntRange(1), default=PHASES, show_default=True, help="Of step and round trip.")
def main(files: tuple[Path, ...], boards: tuple[str, ...], policies: tuple[str, ...], phases: int) -> None:
    """What guessing from what was written before brings, alone and beside the model; one JSON record."""
    chosen = files or (traces.RECORDED_CODE, traces.RECORDED)
    click.echo(json.dumps(measure(chosen, boards or sorted(BOARDS), policies, phases)))
