"""A hot board's share of drafting falls at once, comes back slowly, and is said."""

from __future__ import annotations

import logging

from edge.config import BoardConfig
from edge.cooling import CALM_LOOKS, NEWS_LOOKS, Watch
from tests.edge.boardfiles import BoardFiles

HOT = BoardConfig(hot_c=80.0)


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
