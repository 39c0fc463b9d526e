"""Acceptance, and tokens a round, over perplexity: one point a quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.pictures import pyplot, save

NEAR = 0.004  # of acceptance: two labels would cover each other
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
    for names, row in _together(rows):
        at = row["perplexity"]["percent"], row["acceptance"]
        left.annotate(names, at, xytext=(7, 4), textcoords="offset points", fontsize=9)
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
        axes.set(
            xlabel="perplexity on the target's text, % above 16-bit", xlim=(min(0, *worse) - 0.4, 2 + 3 * max(worse))
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{record['drafter']}: {record['positions']} positions")
    save(figure, path)


def _together(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Names of the points that lie on each other, and one of them."""
    found: list[tuple[str, dict[str, Any]]] = []
    for row in rows:
        for i, (names, other) in enumerate(found):
            near = abs(row["acceptance"] - other["acceptance"]) < NEAR
            if near and abs(row["perplexity"]["percent"] - other["perplexity"]["percent"]) < 1:
                found[i] = f"{names}, {row['name']}", other
                break
        else:
            found.append((row["name"], row))
    return found
