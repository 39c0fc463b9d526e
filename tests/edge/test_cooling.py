"""A hot board rests between passes, says so, and comes back slowly."""

from __future__ import annotations

import logging

import pytest

from edge.config import BoardConfig
from edge.cooling import CALM_LOOKS, NEWS_LOOKS, Cooled, Watch
from edge.drafters.base import Candidate
from edge.policy import ChainPolicy
from edge.window import Window
from protocol.messages import Draft, Limits
from tests.edge.boardfiles import BoardFiles
from tests.edge.windows import owned, said

PASS_S = 0.03
SURE = [Candidate(1, 0.95)]
WIDE = Limits(draft_rows=1000, ahead=1000, context=2000, vocab_size=100)
HOT = BoardConfig(hot_c=80.0)


def draft(policy: Cooled, window: Window, seconds: float) -> int:
    """Passes of PASS_S made by the drafting loop's rules within so many seconds."""
    now, passes = 0.0, 0
    window.tree.root.note.candidates = SURE
    while now < seconds:
        nodes = policy.grow(window, now)
        if policy.send_at(window, now, PASS_S if nodes else 0.0) <= now:
            window.flush(now)
        if not nodes:
            wake = policy.send_at(window, now, 0.0)
            if wake > seconds:
                break
            now = wake
            continue
        for node in nodes:
            node.note.row, node.note.candidates = object(), SURE
        passes += 1
        now += PASS_S
    return passes


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_it_drafts_for_that_share_of_the_time_and_is_woken_for_it(share):
    policy = Cooled(ChainPolicy(lookahead=1000, floor=0.0, paced=False), lambda: share)
    window = owned(max_tokens=1000, limits=WIDE)
    passes = draft(policy, window, 3.0)
    assert passes == pytest.approx(share * 3.0 / PASS_S, abs=2)


def test_guesses_that_were_made_leave_also_while_it_rests():
    policy = Cooled(ChainPolicy(paced=False), lambda: 0.25)
    window = owned()
    window.tree.root.note.candidates = SURE
    (node,) = policy.grow(window, 0.0)
    node.note.row, node.note.candidates = object(), SURE
    assert policy.grow(window, PASS_S) == [] and policy.send_at(window, PASS_S, 0.0) <= PASS_S
    window.flush(PASS_S)
    assert [type(message) for message in said(window)] == [Draft]
    assert policy.send_at(window, PASS_S, 0.0) == pytest.approx(4 * PASS_S)


def test_it_falls_at_once_and_rises_a_step_at_a_time(tmp_path, caplog):
    temp = BoardFiles(tmp_path).zone("cpu-thermal", 60_000)
    told: list[float] = []
    watch = Watch(HOT, on_news=lambda: told.append(watch.share), root=tmp_path)
    assert watch.share == 1
    temp.write_text("82000\n")
    with caplog.at_level(logging.INFO):
        watch.look()
        assert watch.share == 0.25 and told == [0.25]
        assert "drafting 25 % of the time: cpu-thermal is at 82 °C" in caplog.text
        temp.write_text("55000\n")
        shares = []
        for _ in range(3 * CALM_LOOKS):
            watch.look()
            shares.append(watch.share)
    assert shares == [0.25] * (CALM_LOOKS - 1) + [0.5] * CALM_LOOKS + [0.75] * CALM_LOOKS + [1.0]
    assert "drafts all the time again" in caplog.text


def test_a_temperature_that_flutters_about_a_step_does_not_flutter_the_share(tmp_path):
    temp = BoardFiles(tmp_path).zone("cpu-thermal", 71_000)
    watch = Watch(HOT, root=tmp_path)
    for milli in (69_500, 70_500) * 5:
        temp.write_text(f"{milli}\n")
        watch.look()
        assert watch.share == 0.75


def test_quiet_boards_are_told_of_now_and_then(tmp_path):
    BoardFiles(tmp_path).zone("cpu-thermal", 40_000)
    told: list[int] = []
    watch = Watch(HOT, on_news=lambda: told.append(1), root=tmp_path)
    for _ in range(2 * NEWS_LOOKS):
        watch.look()
    assert len(told) == 2
