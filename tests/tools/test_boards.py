"""The boards that plan and twin know by name."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from protocol.errors import ConfigError
from tools.boards import BOARDS, NAMES, BoardTiming, board_timing
from tools.plan.__main__ import main as plan
from tools.twin.__main__ import main as twin


@pytest.mark.parametrize(
    ("short", "name", "timing"),
    [
        ("pi5", "raspberry-pi-5", BoardTiming(0.033, 0.50, 120.0)),
        ("orin-nano", "jetson-orin-nano", BoardTiming(0.012, 0.15, 1500.0)),
        ("agx", "jetson-agx-orin", BoardTiming(0.008, 0.10, 4000.0)),
    ],
)
def test_the_short_names_are_aliases_and_have_the_figures_of_the_published_tables(short, name, timing):
    assert BOARDS[short] == board_timing(short) == board_timing(name) == timing


def test_each_file_has_a_timing():
    assert len(NAMES) == 11
    assert board_timing("raspberry-pi-4").pass_s > board_timing("raspberry-pi-5").pass_s


def test_a_name_that_is_none_is_answered_with_those_that_are():
    with pytest.raises(ConfigError, match=r"'pi6'.*pi5.*jetson-agx-thor"):
        board_timing("pi6")


def test_the_twin_and_the_plan_take_a_files_name():
    run = CliRunner().invoke(twin, ["--board", "jetson-agx-thor", "--mode", "auto", "--texts", "1", "--json"])
    assert run.exit_code == 0, run.output
    alone = CliRunner().invoke(plan, ["--board", "raspberry-pi-4", "--cloud-step-ms", "60", "--json"])
    assert alone.exit_code == 0 and json.loads(alone.stdout)
    assert "raspberry-pi-5" in CliRunner().invoke(plan, ["--board", "pi6"]).output
