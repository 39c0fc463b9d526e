"""How pictures of time a token over the round trip look, and how they are written."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from protocol.errors import ConfigError


def name_axes(axes: Axes, title: str, longest_rtt_ms: float | None = None) -> None:
    """Name the axes, both from zero on."""
    axes.set(
        xlabel="round trip R, ms",
        ylabel="time a token, ms",
        title=title,
        ylim=(0, None),
        xlim=(0, longest_rtt_ms),
    )
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: Path) -> None:
    """Write a PNG or an SVG, by the suffix, and forget the figure. Raises ConfigError where it cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path)) from None
    finally:
        pyplot.close(figure)
