"""`python -m tools.twin`: a fleet in one process, faster than it lives."""

from __future__ import annotations

import json
import os
from math import inf
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from edge.config import DraftingConfig
from link.command import CommandGroup
from tools import traces
from tools.boards import NAMES, BoardTiming, board_timing
from tools.modes import MODES
from tools.twin.fleet import Scene, simulate
from tools.twin.record import record
from tools.twin.replay import Script, StepTime
from tools.twin.report import figures


def board_of(name: str, pass_ms: float | None, row_share: float | None, prefill: float | None) -> BoardTiming:
    """The named board, with what was said otherwise."""
    board = board_timing(name)
    return BoardTiming(
        board.pass_s if pass_ms is None else pass_ms / 1e3,
        board.row_share if row_share is None else row_share,
        board.prefill_tokens_per_s if prefill is None else prefill,
    )


@click.group(cls=CommandGroup, command="twin", invoke_without_command=True)
@click.option("--traces", "path", type=click.Path(path_type=Path), default=traces.RECORDED, help="Of `twin record`.")
@click.option("--board", type=click.Choice(NAMES), default="orin-nano", show_default=True)
@click.option("--pass-ms", type=float, help="Of the drafter, instead of the board's.")
@click.option("--row-share", type=float, help="What a further row adds, as a share of a pass.")
@click.option("--board-prefill", type=float, help="Tokens a second, instead of the board's.")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Of its time that it may draft.")
@click.option("--devices", type=click.IntRange(1), default=1, show_default=True)
@click.option("--texts", type=click.IntRange(0), default=0, help="For each device; 0: as many as there are traces.")
@click.option("--rtt-ms", type=click.FloatRange(0), default=50.0, show_default=True)
@click.option("--cloud-step-ms", type=click.FloatRange(0.01), default=60.0, show_default=True)
@click.option("--knee", type=click.FloatRange(1), default=inf, help="Rows up to which a step takes no longer.")
@click.option("--row-ms", type=click.FloatRange(0), help="Of a row beyond the knee; when absent, step / knee.")
@click.option("--cloud-prefill", type=click.FloatRange(1), default=20_000.0, show_default=True, help="Tokens a second.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=20, show_default=True)
@click.option("--mode", type=click.Choice(sorted(MODES)), default="auto", show_default=True)
@click.option("--patience-s", type=click.FloatRange(0), help="When absent, what the mode is made for: 0 for `auto`.")
@click.option("--gamma", type=click.IntRange(1), default=4, show_default=True, help="Of `sync`.")
@click.option("--paced/--not-paced", default=True, show_default=True, help="Whether drafts are gathered.")
@click.option("--verifiers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--spread-s", type=click.FloatRange(0), default=1.0, help="In which all devices start, if several.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.pass_context
def main(
    context: click.Context, path: Path, board: str, pass_ms: float | None, row_share: float | None,
    board_prefill: float | None, share: float, devices: int, texts: int, rtt_ms: float, cloud_step_ms: float,
    knee: float, row_ms: float | None, cloud_prefill: float, prompt_tokens: int, mode: str, patience_s: float | None,
    gamma: int, paced: bool, verifiers: int, spread_s: float, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """The real window, policies, ledger and scheduler on a virtual clock; compute is times, the drafter a trace."""
    if context.invoked_subcommand:
        return
    chosen = MODES[mode]
    past_knee_s = 0.0 if knee == inf else cloud_step_ms / 1e3 / knee if row_ms is None else row_ms / 1e3
    scene = Scene(
        scripts=[Script(trace, prompt_tokens) for trace in traces.load(path)],
        board=board_of(board, pass_ms, row_share, board_prefill),
        time=StepTime(cloud_step_ms / 1e3, knee, past_knee_s, 1 / cloud_prefill),
        drafting=DraftingConfig(policy=chosen.policy, gamma=gamma, paced=paced),
        patience_s=chosen.patience_s if patience_s is None else patience_s,
        rtt_s=rtt_ms / 1e3,
        devices=devices,
        texts=texts,
        verifiers=verifiers,
        spread_s=spread_s if devices > 1 else 0.0,
        seed=seed,
        share=share,
    )
    asked = {
        name: context.params[name] for name in ("board", "devices", "rtt_ms", "cloud_step_ms", "mode", "paced", "seed")
    }
    asked["patience_s"] = "inf" if scene.patience_s == inf else scene.patience_s
    found = {**asked, "traces": os.path.basename(path), **figures(simulate(scene))}
    if as_json:
        click.echo(json.dumps(found))
        return
    table = Table("figure", "value", title=f"{chosen.title}: {devices} of {board}, {rtt_ms:g} ms away")
    for name, value in found.items():
        table.add_row(name, str(value))
    Console().print(table)


main.add_command(record)

if __name__ == "__main__":
    main()
