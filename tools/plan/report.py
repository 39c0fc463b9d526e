"""The plan as a person reads it, and as a machine does."""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.plan.acceptance import by_depth
from tools.plan.advice import ModeFigures, Plan, Setting

NAMES = {"cloud": "cloud alone", "async": "chain, waits", "never_wait": "chain, never waits"}
DEPTHS = 8


def record(setting: Setting, plan: Plan) -> dict[str, Any]:
    """The plan for a machine: milliseconds and dollars; "inf" where a number has no bound."""
    least, about = plan.waiting_estimates_s
    return {
        "pass_ms": _number(setting.board.pass_s * 1e3),
        "rtt_ms": _number(setting.rtt_s * 1e3),
        "alpha": _number(setting.alpha),
        "alpha_by_depth": [_number(a) for a in by_depth(setting.acceptances, DEPTHS)],
        "cloud_step_ms": _number(plan.step_s * 1e3),
        "knee_rows": _number(setting.verifier.knee_rows),
        "max_sessions": _number(setting.verifier.max_sessions),
        "usd_per_step": plan.usd_per_step,
        "gamma": plan.gamma,
        "tokens_a_round": _number(plan.tokens_a_round),
        "modes": {mode: _mode_record(figures) for mode, figures in plan.modes.items()},
        "waiting_least_ms": _number(least * 1e3),
        "waiting_about_ms": _number(about * 1e3),
        "waiting_break_even_rtt_ms": _number(plan.waiting_break_even_rtt_s * 1e3),
        "catch_up_tokens": _number(plan.catch_up_tokens),
        "balance_step_ms": _number(plan.balance_step_s * 1e3),
        "balance_gamma": _number(plan.balance_gamma),
        "quicker": plan.quicker,
        "thriftier": plan.thriftier,
        "patience_s": _number(plan.patience_s),
        "at_patience": _mode_record(plan.at_patience),
        "lookahead": plan.lookahead,
        "sibling_share": plan.sibling_share,
        "board_prefill_s": _number(plan.prefill_s),
    }


def _mode_record(figures: ModeFigures) -> dict[str, Any]:
    return {
        "itl_ms": _number(figures.pace.token_s * 1e3),
        "itl_ms_shared": _number(figures.shared_s * 1e3),
        "cloud_steps_per_token": _number(figures.pace.steps),
        "rows_per_token": _number(figures.pace.rows),
        "devices_to_knee": _number(figures.devices_to_knee),
        "devices_to_stretch": _number(figures.devices_to_stretch),
        "devices": _number(figures.devices),
        "usd_per_mtok_alone": _number(figures.usd_alone),
        "usd_per_mtok_shared": _number(figures.usd_shared),
    }


def _number(value: float) -> float | str:
    return round(value, 6) if isfinite(value) else "inf"


def print_plan(setting: Setting, plan: Plan) -> None:
    """The plan for a person."""
    console = Console()
    ms = 1e3
    by_guess = " ".join(f"{share:.2f}" for share in by_depth(setting.acceptances, DEPTHS))
    console.print(
        f"t_d {setting.board.pass_s * ms:g} ms, R {setting.rtt_s * ms:g} ms, t_v {plan.step_s * ms:.3g} ms, "
        f"alpha {setting.alpha:.3f} (guess by guess {by_guess})",
        soft_wrap=True,
    )
    console.print(
        f"verifier: knee at {setting.verifier.knee_rows:.0f} rows of one session, memory for "
        f"{_count(setting.verifier.max_sessions)} sessions, ${plan.usd_per_step:.2e} a step",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("a token takes", no_wrap=True)
    for column in ("ms", "ms\nshared", "steps", "rows", "boards\nto knee", "boards", "$/M\nalone", "$/M\nshared"):
        table.add_column(column, justify="right", no_wrap=True)
    for mode, figures in plan.modes.items():
        name = f"sync, {plan.gamma} a round" if mode == "sync" else NAMES[mode]
        table.add_row(name, *_cells(figures))
    table.add_row(f"patience {_patience(plan.patience_s)}", *_cells(plan.at_patience), style="bold")
    console.print(table)
    for line in _advice(setting, plan):
        console.print(f"- {line}", soft_wrap=True)


def _cells(figures: ModeFigures) -> list[str]:
    pace = figures.pace
    return [
        *(f"{pace.token_s * 1e3:.1f}", f"{figures.shared_s * 1e3:.1f}", f"{pace.steps:.2f}", f"{pace.rows:.2f}"),
        *(_count(figures.devices_to_knee), _count(figures.devices)),
        *(f"{figures.usd_alone:.2f}", f"{figures.usd_shared:.3f}"),
    ]


def _advice(setting: Setting, plan: Plan) -> list[str]:
    ms = 1e3
    least, about = plan.waiting_estimates_s
    lines = [
        f"a synchronous round of {plan.gamma} guesses yields E[A] = {plan.tokens_a_round:.2f} tokens",
        f"the chain that waits: at least {least * ms:.1f}, about {about * ms:.1f} ms a token by the short formulas; "
        + (
            f"quicker than streaming up to R = {plan.waiting_break_even_rtt_s * ms:.0f} ms"
            if plan.waiting_break_even_rtt_s > 0
            else "slower than streaming at every R"
        ),
        f"balance: a step of {plan.balance_step_s * ms:.0f} ms takes as long as the next {plan.gamma} guesses; "
        + (
            f"a step of {plan.step_s * ms:.3g} ms is in balance with {plan.balance_gamma:.1f} guesses"
            if plan.balance_gamma > 0
            else "the verdict's way is longer than this step, so a verifier that waits idles"
        ),
        f"after a rejection new guesses overtake a cloud that goes on alone after {plan.catch_up_tokens:.1f} tokens"
        if isfinite(plan.catch_up_tokens)
        else "the board drafts no faster than the cloud decodes: a cloud that goes on alone is never overtaken",
        f"the board reads {setting.context} tokens in {plan.prefill_s:.1f} s and drafts from then on",
    ]
    if plan.quicker or plan.thriftier:
        gain = "quicker" if plan.quicker else "no quicker but thriftier"
        lines.append(
            f"drafting is {gain} than plain streaming: patience {_patience(plan.patience_s)}, a chain of up to "
            f"{plan.lookahead} guesses; a sibling is worth a row where it is likelier than {plan.sibling_share:g} of "
            "the first guess"
        )
    else:
        lines.append("drafting does not pay here: stream from the cloud")
    return lines


def _patience(patience_s: float) -> str:
    return "inf" if patience_s == inf else f"{patience_s * 1e3:.0f} ms"


def _count(number: float) -> str:
    return f"{number:.0f}" if isfinite(number) else "any"
