"""Application bytes a verified token on the whole path: the demo's own fleet, chains and trees."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from protocol.sampling import Sampling
from tools.demo.__main__ import play

MODES = ("async", "never_wait", "tree")


def measure(drafter: Path, target: Path, *, max_tokens: int) -> dict[str, object]:
    """Bytes of payloads in both directions, open and close included, over the tokens of three texts."""
    result = play(
        Console(quiet=True),
        drafter,
        target,
        modes=MODES,
        rtt_ms=80.0,
        numerics="exact",
        max_tokens=max_tokens,
        sampling=Sampling(),
        prompts=3,
    )
    return {
        "drafter": result["drafter"]["name"],
        "target": result["target"],
        "rtt_ms": 80.0,
        "prompt_tokens": result["prompt_tokens"],
        "identical": result["identical"],
        "bytes_per_token": {mode: figures["bytes_per_token"] for mode, figures in result["modes"].items()},
        "acceptance": {mode: figures["acceptance"] for mode, figures in result["modes"].items()},
    }
