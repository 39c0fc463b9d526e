"""Time a token over the round trip, one line a mode, from the benchmark's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.pictures import name_axes, pyplot, save

STYLES = {
    "cloud": ("cloud alone", "#666666"),
    "sync": (r"synchronous, best $\gamma$ at each R", "#d55e00"),
    "async": ("asynchronous chain, waits", "#e69f00"),
    "never_wait": ("asynchronous chain, never waits", "#0072b2"),
    "tree": ("tree, never waits", "#56b4e9"),
    "auto": ("auto", "#009e73"),
}
COLOCATED = {
    "colocated_sync": (r"drafter beside the verifier, synchronous", "#d55e00"),
    "colocated_async": ("drafter beside the verifier, asynchronous", "#e69f00"),
}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write PNG or SVG, by the suffix of `path`: what was measured as lines, the twin's figures as rings.

    Raises ConfigError where it cannot be written.
    """
    first_tls = record["cells"][0]["tls"]
    cells = [cell for cell in record["cells"] if cell["tls"] == first_tls]
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for mode, (label, colour) in STYLES.items():
        line = sorted((cell["rtt_ms"], cell["itl_ms_mean"]) for cell in cells if cell["mode"] == mode)
        twin = sorted(
            (c["rtt_ms"], c["twin_itl_ms_mean"]) for c in cells if c["mode"] == mode and "twin_itl_ms_mean" in c
        )
        if line:
            axes.plot(*zip(*line, strict=True), "o-", color=colour, label=label, linewidth=2, markersize=4)
        if twin:
            axes.plot(*zip(*twin, strict=True), "o", color=colour, markersize=10, markerfacecolor="none")
    for cell in cells:
        if cell["mode"] in COLOCATED:
            label, colour = COLOCATED[cell["mode"]]
            axes.axhline(cell["itl_ms_mean"], color=colour, label=label, linewidth=1, linestyle=":")
    if any("twin_itl_ms_mean" in cell for cell in cells):
        axes.plot([], [], "o", color="#444444", markersize=10, markerfacecolor="none", label="the twin's figure")
    what = ", ".join(record["traces"]) if "traces" in record else record["drafter"]["name"]
    name_axes(axes, f"Measured live: {what}")
    figure.legend(frameon=False, loc="outside right upper")
    save(figure, path)
