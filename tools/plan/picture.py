"""Time a token over the round trip, one line a mode."""

from __future__ import annotations

from pathlib import Path

from protocol.errors import ConfigError
from tools.pictures import name_axes, pyplot, save
from tools.plan.advice import Setting, paces

LONGEST_RTT_MS = 300
SPACING_MS = 5
STYLES = {
    "cloud": ("cloud alone", "#666666", "--"),
    "sync": (r"synchronous, best $\gamma$ at each R", "#d55e00", "-"),
    "async": ("asynchronous chain, waits", "#e69f00", "-"),
    "never_wait": ("asynchronous chain, never waits", "#0072b2", "-"),
}


def draw(setting: Setting, path: Path, title: str) -> None:
    """Write PNG or SVG, by the suffix of `path`. Raises ConfigError for any other and where it cannot be written."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"{path.name!r} is neither .png nor .svg", where="--picture", remedy="Name it so")
    rtts_ms = range(0, LONGEST_RTT_MS + 1, SPACING_MS)
    lines: dict[str, list[float]] = {mode: [] for mode in STYLES}
    for rtt_ms in rtts_ms:
        rtt_s = rtt_ms / 1e3
        for mode, pace in paces(setting, rtt_s, setting.shared).items():
            lines[mode].append(pace.token_s * 1e3)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for mode, (label, colour, style) in STYLES.items():
        # Cloud alone lies on top: where the chain that never waits gains nothing, the two are one line.
        axes.plot(
            rtts_ms, lines[mode], style, color=colour, label=label, linewidth=2, zorder=3 if mode == "cloud" else 2
        )
    axes.axvline(setting.rtt_s * 1e3, color="#999999", linewidth=1, linestyle=":")
    axes.annotate(
        f"R = {setting.rtt_s * 1e3:g} ms", (setting.rtt_s * 1e3, 0.02), xycoords=("data", "axes fraction"),
        xytext=(4, 0), textcoords="offset points", color="#444444",
    )  # fmt: skip
    name_axes(axes, title, LONGEST_RTT_MS)
    axes.legend(frameon=False, loc="best")
    save(figure, path)
