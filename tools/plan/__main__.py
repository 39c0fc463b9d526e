"""`python -m tools.plan`: see `--help`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tools.boards import NAMES, BoardTiming, board_timing
from tools.exits import reported
from tools.plan.acceptance import Acceptance, Independent, Recorded
from tools.plan.advice import Setting, make_plan
from tools.plan.report import print_plan, record
from tools.plan.roofline import GPUS, TARGETS, Gpu, MeasuredStep, Roofline, Target, Verifier
from tools.traces import load

POSITIVE = click.FloatRange(min=0, min_open=True)
COUNT = click.IntRange(min=1)

BOARD = (
    click.option("--board", type=click.Choice(NAMES), default="orin-nano", show_default=True),
    click.option("--pass-ms", type=POSITIVE, help="A drafter's pass of one row, instead of the board's."),
    click.option("--row-share", type=click.FloatRange(min=0), help="What a further row adds, as a share of the pass."),
    click.option("--rtt-ms", type=click.FloatRange(min=0), default=50.0, show_default=True, help="Of the link."),
)
ACCEPTANCE = (
    click.option("--alpha", type=click.FloatRange(0, 0.99), help="Share of guesses that are right; 0.8 unless said."),
    click.option("--traces", type=click.Path(path_type=Path), help="Recorded drafting to take it from instead."),
)  # fmt: skip
TARGET = (
    click.option("--target", type=click.Choice(sorted(TARGETS)), help="qwen2.5-coder-7b unless said."),
    click.option("--params", "num_params", type=POSITIVE, help="Parameters, instead of the target's."),
    click.option("--layers", "num_layers", type=COUNT),
    click.option("--heads", "num_heads", type=COUNT, help="Query heads."),
    click.option("--kv-heads", "num_kv_heads", type=COUNT),
    click.option("--head-dim", type=COUNT),
    click.option("--weight-bytes", type=POSITIVE, help="Bytes a weight; 2 unless said."),
    click.option("--kv-bytes", type=POSITIVE, help="Bytes a cached value; 2 unless said."),
    click.option("--context", type=COUNT, default=2000, show_default=True, help="Tokens a session."),
)
GPU = (
    click.option("--gpu", type=click.Choice(sorted(GPUS)), help="l4 unless said."),
    click.option("--bandwidth-gbs", type=POSITIVE, help="Peak, in GB/s, instead of the GPU's."),
    click.option("--tflops", type=POSITIVE, help="Peak, 16 bits, dense."),
    click.option("--memory-gb", type=POSITIVE),
    click.option("--reach", type=click.FloatRange(0, 1, min_open=True), help="Share of both peaks; 1 unless said."),
)
STEP = (
    click.option("--cloud-step-ms", type=POSITIVE, help="A measured verifier, instead of target and GPU."),
    click.option("--knee", type=POSITIVE, help="Rows up to which its step takes no longer; 128 unless said."),
    click.option("--row-ms", type=POSITIVE, help="A row beyond; in proportion to the step at the knee unless said."),
)
GOALS = (
    click.option("--devices", type=COUNT, default=1, show_default=True, help="Boards on the verifier."),
    click.option("--stretch", type=click.FloatRange(min=1), default=1.1, show_default=True, help="Of a step, at most."),
    click.option("--usd-per-hour", type=click.FloatRange(min=0), default=2.0, show_default=True, help="Of a verifier."),
    click.option("--slack", type=click.FloatRange(min=0), default=0.05, show_default=True,
                 help="How much slower than the quickest patience a thriftier one may be."),
    click.option("--picture", type=click.Path(path_type=Path), help="Time a token over R: .png or .svg."),
    click.option("--json", "as_json", is_flag=True, help="One JSON object."),
)  # fmt: skip


def options(*groups: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


@click.command()
@options(BOARD, ACCEPTANCE, TARGET, GPU, STEP, GOALS)
def main(picture: Path | None, as_json: bool, **given: Any) -> None:
    """What a board, a link and a verifier give together, and whether drafting pays.

    R is the link's round trip, t_d a drafter's pass, t_v a cloud step, alpha the share of guesses that are right.
    "boards": how many one verifier takes until its step lasts --stretch times as long or its memory is full.
    "shared": on such a verifier, which steps without pause; "$/M alone" pays a whole step for each.
    """
    with reported("plan"):
        setting = _setting(given)
        plan = make_plan(setting)
        if picture:
            from tools.plan.picture import draw

            title = f"{_board_title(given)}, cloud step {plan.step_s * 1e3:.3g} ms, alpha {setting.alpha:.2f}"
            draw(setting, picture, title)
    if as_json:
        click.echo(json.dumps(record(setting, plan), allow_nan=False))
    else:
        print_plan(setting, plan)


def _setting(given: dict[str, Any]) -> Setting:
    return Setting(
        board=_board(given),
        rtt_s=given["rtt_ms"] / 1e3,
        verifier=_verifier(given),
        acceptances=_acceptances(given),
        **{name: given[name] for name in ("usd_per_hour", "context", "devices", "slack", "stretch")},
    )


def _board(given: dict[str, Any]) -> BoardTiming:
    board = board_timing(given["board"])
    pass_s = given["pass_ms"] / 1e3 if given["pass_ms"] else board.pass_s
    return replace(board, pass_s=pass_s, row_share=_either(given["row_share"], board.row_share))


def _acceptances(given: dict[str, Any]) -> list[Acceptance]:
    if given["traces"] is None:
        return [Independent(_either(given["alpha"], 0.8))]
    if given["alpha"] is not None:
        raise click.UsageError("--alpha and --traces say the same thing: give one")
    return [Recorded(trace) for trace in load(given["traces"])]


def _verifier(given: dict[str, Any]) -> Verifier:
    sizes = {name: given[name] for name in Target.__dataclass_fields__ if given[name] is not None}
    gpu_figures = ("bandwidth_gbs", "tflops", "memory_gb", "reach")
    modelled = sizes or any(given[name] is not None for name in ("target", "gpu", *gpu_figures))
    measured = any(given[name] is not None for name in ("cloud_step_ms", "knee", "row_ms"))
    if not measured:
        gpu = GPUS[given["gpu"] or "l4"]
        target = replace(TARGETS[given["target"] or "qwen2.5-coder-7b"], **sizes)
        bandwidth, tflops, memory, reach = (given[name] for name in gpu_figures)
        gpu = Gpu(
            bandwidth * 1e9 if bandwidth else gpu.bandwidth,
            tflops * 1e12 if tflops else gpu.arithmetic,
            memory * 1e9 if memory else gpu.memory,
        )
        return Roofline(target, gpu, given["context"], reach or 1.0)
    if modelled:
        raise click.UsageError("a verifier is either measured (--cloud-step-ms) or a target on a GPU: give one")
    if given["cloud_step_ms"] is None:
        raise click.UsageError("--knee and --row-ms need --cloud-step-ms")
    base_s, knee = given["cloud_step_ms"] / 1e3, given["knee"] or 128.0
    return MeasuredStep(base_s, knee, given["row_ms"] / 1e3 if given["row_ms"] else base_s / knee)


def _either(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _board_title(given: dict[str, Any]) -> str:
    return given["board"] if given["pass_ms"] is None else f"board of {given['pass_ms']:g} ms a pass"


if __name__ == "__main__":
    main()
