"""Acceptance, and tokens a round, over perplexity: one point a quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.pictures import pyplot, save

COLOURS = {"4": "#0072b2", "8": "#d55e00"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write PNG or SVG, by the suffix of `path`. Rows without a perplexity are left out.

    Raises ConfigError where it cannot be written.
    """
    rows = [row for row in record["rows"] if row["perplexity"]]
    worse = [row["perplexity"]["percent"] for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    bounds = [row["acceptance_points"]["bound_95"] / 100 for row in rows]
    left.errorbar(worse, [row["acceptance"] for row in rows], yerr=bounds, fmt="o", color="#0072b2", capsize=3)
    for row, x in zip(rows, worse, strict=True):
        left.annotate(row["name"], (x, row["acceptance"]), xytext=(6, 5), textcoords="offset points", fontsize=9)
    left.set(ylabel="acceptance, with the 95 % bound of the difference")
    for draft, colour in COLOURS.items():
        found = [row["tokens_a_round"][draft] for row in rows]
        right.plot(worse, [one["measured"] for one in found], "o", color=colour, label=f"drafts of {draft}, measured")
        right.plot(
            worse, [one["formula"] for one in found], "o", color=colour, markersize=10, markerfacecolor="none",
            label=f"drafts of {draft}, by the formula",
        )  # fmt: skip
    right.set(ylabel="tokens a round E[A]", ylim=(0, None))
    right.legend(frameon=False, loc="best")
    for axes in (left, right):
        # Small losses and a collapse in one picture.
        axes.set_xscale("symlog", linthresh=2)
        axes.set(xlabel="perplexity on the target's text, % above 16-bit")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{record['drafter']}: {record['positions']} positions")
    save(figure, path)
