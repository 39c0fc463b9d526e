"""What the demo measured, from the board's events."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from tools.arrivals import gaps_ms, p95


def summary(texts: Sequence[dict]) -> dict[str, float]:
    """The figures of one mode over its texts. tokens_per_s counts from the request, the link and prefill included."""
    tokens = sum(len(text["ids"]) for text in texts)
    gaps = [gap for text in texts for gap in gaps_ms(text["arrivals"])]
    tally = {key: sum(text["tally"][key] for text in texts) for key in texts[0]["tally"]}
    judged = tally["guessed"] + tally["missed"]
    return {
        "tokens_per_s": round(tokens / sum(text["arrivals"][-1][0] for text in texts), 2),
        "itl_ms_p50": round(statistics.median(gaps), 1),
        "itl_ms_p95": round(p95(gaps), 1),
        "acceptance": round(tally["guessed"] / judged, 3) if judged else 0.0,
        "cloud_steps_per_token": round(tally["commits"] / tokens, 3),
        "bytes_per_token": round(sum(text["bytes_up"] + text["bytes_down"] for text in texts) / tokens, 1),
        "first_token_ms": round(statistics.median(text["arrivals"][0][0] for text in texts) * 1e3, 1),
        "tokens": tokens,
    }


def table(modes: dict[str, dict], titles: dict[str, str], identical: dict[str, bool]) -> Table:
    shown = Table(title="Same prompts, same link, same text?")
    for column in (
        "mode",
        "tokens/s",
        "ms a token p50",
        "p95",
        "acceptance",
        "cloud steps a token",
        "bytes a token",
        "identical",
    ):
        shown.add_column(column, justify="left" if column == "mode" else "right")
    for mode, figures in modes.items():
        shown.add_row(
            titles[mode],
            f"{figures['tokens_per_s']:.1f}",
            f"{figures['itl_ms_p50']:.0f}",
            f"{figures['itl_ms_p95']:.0f}",
            f"{figures['acceptance']:.2f}" if figures["acceptance"] else "-",
            f"{figures['cloud_steps_per_token']:.2f}",
            f"{figures['bytes_per_token']:.0f}",
            "yes" if identical[mode] else "NO",
        )
    return shown
