"""What guessing from what was written before must reach on recorded texts, and what it must never cost."""

from __future__ import annotations

import json
from math import inf

import numpy as np
import pytest
from click.testing import CliRunner

from tools import traces
from tools.bench import suffix
from tools.bench.suffix import cell, guesses, lookup, main, rounds, speed
from tools.traces import Trace
from tools.twin.replay import Script

CODE = [Script.recorded(trace) for trace in traces.load(traces.RECORDED_CODE)]
OTHERS = [Script.recorded(trace) for trace in traces.load()]


@pytest.mark.parametrize(("board", "patience_s"), [("pi5", inf), ("orin-nano", 0.0)])
def test_code_to_change_is_written_in_fewer_steps_and_everything_else_as_fast(board, patience_s):
    code, others = (cell(scripts, board, 50, patience_s, "auto", 3) for scripts in (CODE, OTHERS))
    assert code["accepted"] >= 1.10 and code["speed"] >= 1.0
    assert others["speed"] >= 0.99


@pytest.mark.parametrize("patience_s", [0.0, inf])
def test_a_copy_in_which_a_variable_is_renamed_is_as_fast_as_the_model_alone_far_from_the_verifier(patience_s):
    assert cell(CODE[:1], "agx", 150, patience_s, "auto")["worst_text"]["speed"] >= 0.99


def test_a_text_s_speed_has_the_bound_of_the_pairs_that_it_was_measured_in():
    before, now = np.array([10.0, 12.0, 11.0]), np.array([5.0, 6.0, 5.5])
    assert speed(before, now) == (2.0, 0.0)
    ratio, bound = speed(before, now + np.array([0.5, -0.5, 0.0]))
    assert ratio == 2.0 and bound == pytest.approx(1.96 / 5.5 / 3**0.5, rel=1e-3)
    assert speed(before[:1], now[:1]) == (2.0, None)


def test_prompt_lookup_guesses_what_followed_the_same_ids():
    assert lookup([1, 2, 3, 4, 9, 2, 3, 4]) == [9, 2, 3, 4]
    assert lookup([5, 1, 7, 1]) == [7, 1]
    assert lookup([1, 2, 3]) == []


def test_a_round_is_what_was_right_and_one_token_more():
    trace = Trace("", (1, 2, 3, 4, 9), ((0,),) * 5, ((0.5,),) * 5, (0.5,) * 5, (7,))
    offers = {1: [1, 2, 8], 4: [4, 9]}
    assert rounds(trace, lambda text: offers[len(text)]) == (2, 5)


def test_it_guesses_as_well_as_prompt_lookup_with_fewer_guesses():
    found = guesses(traces.load(traces.RECORDED_CODE))
    ours, theirs = found["suffix"], found["prompt_lookup"]
    assert ours["tokens_per_round"] > 0.98 * theirs["tokens_per_round"] > 1.5
    assert ours["guesses_per_round"] < theirs["guesses_per_round"]


def test_the_command_prints_one_record(monkeypatch):
    monkeypatch.setattr(suffix, "RTTS_MS", (50,))
    ran = CliRunner().invoke(main, ["--traces", str(traces.RECORDED_CODE), "--board", "pi5", "--phases", "1"])
    assert ran.exit_code == 0, ran.output
    record = json.loads(ran.stdout)
    (found,) = record["texts"].values()
    assert record["benchmark"] == "suffix" and [one["patience_s"] for one in found["cells"]] == [0.0, "inf"]
