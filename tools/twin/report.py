"""The figures of a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.arrivals import gaps_ms, mean_gap_ms, p95
from tools.twin.fleet import Result
from tools.twin.world import Story


def tokens_per_s(stories: Sequence[Sequence[Story]]) -> float:
    """Committed by the whole fleet while all devices are at work; over everything where there is no such time."""
    arrivals = [arrival for device in stories for story in device for arrival in story.arrivals]
    begin = max(device[0].arrivals[0][0] for device in stories)
    end = min(device[-1].arrivals[-1][0] for device in stories)
    if end <= begin:
        begin, end = min(device[0].asked_at for device in stories), max(at for at, _ in arrivals)
    return sum(tokens for at, tokens in arrivals if begin < at <= end) / (end - begin)


def figures(result: Result) -> dict[str, Any]:
    """itl_ms_mean: of the texts' own means; itl_ms_p95: over all tokens; cloud_steps_per_token: session-steps, so a
    step that serves ten sessions counts ten; rows_per_token: that verifiers evaluated, prompts included;
    wasted_draft_share: of the guesses sent, those that were not committed; bytes_per_token: application payloads, both
    ways; board_rows_per_token: that drafters evaluated behind the text; board_busy: share of the time from question to
    last token that they worked; tokens_per_s: while all devices are at work,
    whole_run_tokens_per_s: from the scene's beginning to the last token.
    """
    stories = [story for device in result.stories for story in device]
    tallies = [run.window.tally for run in result.runs]
    tokens = sum(len(story.ids) for story in stories)
    gaps = [gap for story in stories for gap in gaps_ms(story.arrivals)]
    means = [mean_gap_ms(story.arrivals) for story in stories]
    drafted, used = sum(tally.drafted for tally in tallies), sum(tally.used for tally in tallies)
    traffic = [story.traffic for story in stories]
    return {
        "itl_ms_mean": round(sum(means) / len(means), 2),
        "itl_ms_p95": round(p95(gaps), 2),
        "first_token_ms": round(1e3 * sum(s.arrivals[0][0] - s.asked_at for s in stories) / len(stories), 1),
        "whole_answer_ms": round(1e3 * sum(s.arrivals[-1][0] - s.asked_at for s in stories) / len(stories), 1),
        "cloud_steps_per_token": round(sum(tally.commits for tally in tallies) / tokens, 4),
        "rows_per_token": round(result.rows / tokens, 3),
        "acceptance": round(_share(sum(t.guessed for t in tallies), sum(t.missed for t in tallies)), 3),
        "wasted_draft_share": round(1 - used / drafted, 3) if drafted else 0.0,
        "drafts_per_token": round(sum(tally.drafts for tally in tallies) / tokens, 3),
        "board_rows_per_token": round(sum(story.rows for story in stories) / tokens, 3),
        "board_busy": round(sum(s.busy_s for s in stories) / sum(s.arrivals[-1][0] - s.asked_at for s in stories), 3),
        "bytes_per_token": round(sum(one.bytes_up + one.bytes_down for one in traffic) / tokens, 1),
        "messages_per_token": round(sum(one.messages_up + one.messages_down for one in traffic) / tokens, 3),
        "tokens_per_s": round(tokens_per_s(result.stories), 2),
        "whole_run_tokens_per_s": round(tokens / max(story.arrivals[-1][0] for story in stories), 2),
        "tokens": tokens,
        "verifier_steps": result.steps,
        "draft_passes": result.passes,
        "simulated_s": round(result.sim_s, 3),
        "wall_s": round(result.wall_s, 3),
        "draft_passes_per_wall_s": round(result.passes / result.wall_s) if result.wall_s else 0,
        "tokens_per_wall_s": round(tokens / result.wall_s) if result.wall_s else 0,
    }


def _share(part: int, rest: int) -> float:
    return part / (part + rest) if part + rest else 0.0
