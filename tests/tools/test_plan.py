"""The plan's formulas against an event model of the chain, hand-computed rooflines, and the command."""

from __future__ import annotations

import heapq
import itertools
import json
from dataclasses import replace
from math import inf

import pytest
from click.testing import CliRunner

from protocol.errors import ConfigError
from tools.boards import BOARDS
from tools.plan import formulas
from tools.plan.__main__ import main
from tools.plan.acceptance import Independent, Recorded, by_depth
from tools.plan.advice import MODES, Setting, make_plan, paces
from tools.plan.roofline import GPUS, TARGETS, MeasuredStep, Roofline
from tools.plan.synthetic import independent_trace
from tools.traces import Trace, save


def trace(hits: str) -> Trace:
    """`x`: the first guess is the target's; `.`: it is not."""
    ids = tuple((1, 2) if hit == "x" else (2, 1) for hit in hits)
    return Trace("", (1,) * len(hits), ids, ((0.7, 0.3),) * len(hits), (0.5,) * len(hits))


def setting(**changes) -> Setting:
    given = {
        "board": BOARDS["orin-nano"],
        "rtt_s": 0.05,
        "verifier": MeasuredStep(0.06, knee_rows=128, row_s=0.06 / 128),
        "acceptances": [Independent(0.84)],
    }
    return Setting(**{**given, **changes})


def played(hits: list[bool], pass_s: float, rtt_s: float, step_s: float, patience_s: float) -> tuple[float, float]:
    """(seconds, steps) a token of a chain that drafts a text event by event: board, link and verifier each with what
    it alone can know. A guess travels as (position, first wrong position of its chain).
    """
    order, events = itertools.count(), []

    def at(time: float, kind: str, *what: float) -> None:
        heapq.heappush(events, (time, next(order), kind, what))

    tip, wrong, stale = 0, inf, False  # the board: next position to guess, the chain's first wrong guess
    held, frontier, busy, idle_since, steps = [], 0, False, 0.0, 0  # the verifier
    at(0.0, "passed", 1)
    at(patience_s, "look")
    while True:
        now, _, kind, what = heapq.heappop(events)
        if kind == "passed":
            if not what and not stale:
                wrong = min(wrong, tip if tip >= len(hits) or not hits[tip] else inf)
                at(now + rtt_s / 2, "guess", tip, wrong)
                tip += 1
            stale = False
            at(now + pass_s, "passed")
        elif kind == "verdict":
            if what[0] >= len(hits):
                return now / what[0], steps / what[0]
            if wrong < what[0] or tip < what[0]:
                tip, wrong, stale = int(what[0]), inf, True
        elif kind == "guess":
            held.append(what)
        elif kind == "stepped":
            busy, idle_since = False, now
            frontier = int(what[0])
            at(now + rtt_s / 2, "verdict", frontier)
            at(now + patience_s, "look")
        held = [guess for guess in held if guess[0] >= frontier and guess[1] >= frontier]
        if not busy and (held or now >= idle_since + patience_s):
            right = [position for position, first_wrong in held if position < first_wrong]
            at(now + step_s, "stepped", max(right, default=frontier - 1) + 2)
            busy, steps = True, steps + 1


@pytest.mark.parametrize("board", ["pi5", "orin-nano", "agx"])
@pytest.mark.parametrize("patience_s", [0.0, 0.03, inf])
def test_chain_is_what_an_event_model_plays(board, patience_s):
    text = independent_trace(0.8, 3000, seed=3)
    hits = [ids[0] == id for ids, id in zip(text.draft_ids, text.target, strict=True)]
    for rtt_s in (0.02, 0.1, 0.15):
        pass_s = BOARDS[board].pass_s * 1.01  # so that passes and steps do not lock into one rhythm
        expected_s, expected_steps = played(hits, pass_s, rtt_s, 0.06, patience_s)
        for acceptance in (Recorded(text), Independent(text.acceptance)):
            pace = formulas.chain(acceptance, pass_s, rtt_s, 0.06, patience_s)
            assert pace.token_s == pytest.approx(expected_s, rel=0.05)
            assert pace.steps == pytest.approx(expected_steps, rel=0.05)


def test_tokens_a_round_on_a_text_of_independent_guesses():
    text = Recorded(independent_trace(0.7, 20_000, seed=1))
    for gamma in (1, 4, 9):
        assert text.tokens_a_round(gamma) == pytest.approx(Independent(0.7).tokens_a_round(gamma), rel=0.03)


def test_a_recorded_round_ends_at_a_miss_or_behind_its_last_guess():
    text = Recorded(trace("xxx.xx"))
    assert text.tokens_a_round(1) == 2  # x and the target's own token; x and the miss; x and the target's own
    assert text.tokens_a_round(2) == 4 / 2  # xx and the target's own; the miss; the end cuts xx off
    assert text.tokens_a_round(9) == 4


def test_a_run_that_the_texts_end_cuts_off_counts_as_far_as_it_goes():
    text = Recorded(trace("xxx.x.xx"))
    assert [text.survival(k) for k in range(5)] == pytest.approx([1, 1, 2 / 3, 2 / 3, 0])
    assert text.tokens_a_rejection == pytest.approx(1 + 1 + 2 / 3 + 2 / 3)


def test_a_text_without_a_miss_is_all_one_run():
    text = Recorded(trace("xxxx"))
    assert text.tokens_a_rejection == 5 and text.tokens_a_round(2) == 3 and text.tokens_a_round(8) == 4


def test_acceptance_by_depth_shows_that_misses_cluster():
    clustered = by_depth([Recorded(trace("." * 5 + "x" * 15))], 3)
    assert clustered == pytest.approx([1 / 6, 1, 1])
    assert by_depth([Independent(0.6)], 3) == pytest.approx([0.6] * 3)


def test_the_waiting_chain_never_beats_its_lower_bound():
    for alpha in (0.3, 0.8, 0.95):
        for pass_s, rtt_s, step_s in itertools.product((0.008, 0.033), (0.005, 0.15), (0.02, 0.12)):
            least, about = formulas.waiting_estimates(alpha, pass_s, rtt_s, step_s)
            found = formulas.chain(Independent(alpha), pass_s, rtt_s, step_s).token_s
            assert least < found < about + (1 - alpha) * (step_s + pass_s)


@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.9])
def test_never_waiting_is_never_slower_than_the_cloud_alone(alpha):
    for pass_s, rtt_s, step_s in itertools.product((0.008, 0.033, 0.2), (0.0, 0.05, 0.3), (0.02, 0.06, 0.12)):
        pace = formulas.chain(Independent(alpha), pass_s, rtt_s, step_s, patience_s=0.0)
        assert pace.token_s <= step_s * 1.0001 and pace.steps <= 1.0001


def test_a_board_slower_than_the_cloud_is_of_no_use_without_patience():
    pace = formulas.chain(Independent(0.9), pass_s=0.07, rtt_s=0.05, step_s=0.06, patience_s=0.0)
    assert pace.token_s == pytest.approx(0.06, rel=1e-4) and pace.rows == pytest.approx(1, rel=1e-4)
    assert formulas.catch_up_tokens(0.07, 0.05, 0.06) == inf


def test_patience_saves_steps():
    taken = [formulas.chain(Independent(0.8), 0.012, 0.1, 0.06, patience).steps for patience in (0.0, 0.05, inf)]
    assert taken[0] > taken[1] > taken[2]


def test_a_shared_verifier_costs_who_waits_for_it():
    alone, shared = (make_plan(setting(rtt_s=0.02, devices=devices)).modes for devices in (1, 16))
    assert [alone[mode].shared_s for mode in MODES] == [shared[mode].pace.token_s for mode in MODES]
    assert shared["async"].pace.token_s > 1.03 * alone["async"].pace.token_s
    assert shared["never_wait"].pace.token_s == pytest.approx(alone["never_wait"].pace.token_s)


def test_the_round_trip_at_which_waiting_stops_paying():
    plan = make_plan(setting())
    there = paces(setting(), plan.waiting_break_even_rtt_s, shared=False)
    assert there["async"].token_s == pytest.approx(there["cloud"].token_s, rel=1e-3)


def test_at_the_balance_the_next_guesses_arrive_as_the_step_ends():
    step_s = formulas.balance_step_s(0.012, 0.02, gamma=5)
    assert step_s == pytest.approx(0.08)
    assert formulas.balance_gamma(0.012, 0.02, step_s) == pytest.approx(5)


def test_a_chain_leads_until_its_first_verdict_or_its_last_likely_guess():
    assert formulas.lookahead(0.95, 0.012, 0.05, 0.06, floor=0.05) == 10
    assert formulas.lookahead(0.5, 0.012, 0.05, 0.06, floor=0.05) == 4
    assert formulas.lookahead(0.0, 0.012, 0.05, 0.06, floor=0.05) == 1


def test_no_acceptance_without_rejections():
    with pytest.raises(ConfigError):
        Independent(1.0)


# -- the verifier ---------------------------------------------------------------------------------------------------


def test_roofline_of_a_7b_model_on_an_h200_by_hand():
    target = TARGETS["qwen2.5-coder-7b"]
    verifier = Roofline(target, GPUS["h200"], context=1000)
    assert target.bytes_kv_a_token == 57_344
    memory_s = (15.22e9 + 57.344e6) / 4.8e12
    row_s = (15.22e9 + 4 * 28 * 28 * 128 * 1000) / 989e12
    assert verifier.step_s(1) == pytest.approx(memory_s)
    assert verifier.step_s(1000) == pytest.approx(1000 * row_s)
    assert verifier.knee_rows == pytest.approx(memory_s / row_s)
    assert 190 < verifier.knee_rows < 210  # near the card's operations a byte


def test_half_the_peaks_take_twice_the_time():
    whole = Roofline(TARGETS["qwen2.5-coder-7b"], GPUS["l4"], 1000)
    half = replace(whole, reach=0.5)
    assert half.step_s(1) == pytest.approx(2 * whole.step_s(1)) and half.knee_rows == pytest.approx(whole.knee_rows)


@pytest.mark.parametrize(
    "verifier",
    [Roofline(TARGETS["qwen2.5-coder-7b"], GPUS["h200"], 100), MeasuredStep(0.06, knee_rows=128, row_s=0.001)],
    ids=["roofline", "measured"],
)
def test_limits_on_sessions_are_where_the_step_says(verifier):
    rows = 3
    knee = verifier.sessions_to_knee(rows)
    growth = [verifier.step_s(rows * s, s) for s in (knee - 1, knee, knee + 1)]
    assert growth[2] - growth[1] > 1.1 * (growth[1] - growth[0])
    stretched = verifier.sessions_to_stretch(rows, 1.2)
    assert verifier.step_s(rows * stretched, stretched) == pytest.approx(1.2 * verifier.step_s(1))


def test_with_a_long_context_more_sessions_never_reach_the_knee():
    assert Roofline(TARGETS["qwen2.5-coder-7b"], GPUS["h200"], 30_000).sessions_to_knee(1) == inf


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="65 GB of weights"):
        Roofline(TARGETS["qwen2.5-coder-32b"], GPUS["l4"], 1000)


def test_devices_fill_a_verifier_to_its_knee():
    """A board that never waits is in every step, so knee over its rows a step boards fill it."""
    plan = make_plan(setting())
    pace = plan.modes["never_wait"].pace
    assert plan.modes["never_wait"].devices_to_knee == pytest.approx(128 * pace.steps / pace.rows)
    assert plan.modes["cloud"].devices_to_knee == pytest.approx(128)


def test_a_full_verifier_splits_its_price():
    plan = make_plan(setting(usd_per_hour=3.6))
    cloud = plan.modes["cloud"]
    assert plan.usd_per_step == pytest.approx(0.06e-3)
    assert cloud.usd_alone == pytest.approx(60) and cloud.usd_shared == pytest.approx(60 / cloud.devices)


# -- the advice -----------------------------------------------------------------------------------------------------


def test_good_drafts_on_a_quick_board_pay():
    plan = make_plan(setting())
    assert plan.quicker and plan.thriftier and plan.at_patience.pace.token_s < 0.035


def test_drafts_that_are_never_right_do_not_pay():
    plan = make_plan(setting(acceptances=[Independent(0.0)]))
    assert not plan.quicker and plan.patience_s == 0.0


def test_slack_buys_patience_and_patience_saves_steps():
    hurried, relaxed = (make_plan(setting(rtt_s=0.1, slack=slack)) for slack in (0.0, 0.5))
    assert hurried.patience_s < relaxed.patience_s
    assert relaxed.at_patience.pace.steps < hurried.at_patience.pace.steps
    assert relaxed.at_patience.pace.token_s <= 1.5 * hurried.at_patience.pace.token_s


# -- the command ----------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(main, arguments)


def test_json_is_one_object_with_every_mode():
    found = json.loads(run("--board", "pi5", "--rtt-ms", "100", "--gpu", "a100", "--json").stdout)
    assert set(found["modes"]) == set(MODES)
    assert found["cloud_step_ms"] == pytest.approx(found["modes"]["cloud"]["itl_ms"])
    assert found["gamma"] >= 1 and found["knee_rows"] > 100


def test_acceptance_comes_from_traces(tmp_path):
    save(tmp_path / "t.json", [trace("xxxx."), trace("x.x.x")])
    found = json.loads(run("--traces", str(tmp_path / "t.json"), "--cloud-step-ms", "60", "--json").stdout)
    assert found["alpha"] == pytest.approx(0.7)


def test_a_person_reads_whether_drafting_pays():
    assert "drafting is quicker than plain streaming" in run("--cloud-step-ms", "60", "--alpha", "0.9").stdout
    assert "drafting does not pay" in run("--board", "pi5", "--cloud-step-ms", "20", "--alpha", "0.5").stdout


@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.svg", b"<?xml")])
def test_picture(tmp_path, name, start):
    assert run("--cloud-step-ms", "60", "--picture", str(tmp_path / name)).exit_code == 0
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--picture", "p.gif"], 78, "neither .png nor .svg"),
        (["--picture", "/nowhere/p.png"], 78, "cannot be written"),
        (["--traces", "/nowhere/t.json"], 78, "cannot be read"),
        (["--target", "qwen2.5-coder-32b", "--gpu", "l4"], 78, "do not fit"),
        (["--cloud-step-ms", "60", "--gpu", "l4"], 2, "give one"),
        (["--knee", "64"], 2, "need --cloud-step-ms"),
        (["--alpha", "0.8", "--traces", "t.json"], 2, "give one"),
    ],
)
def test_what_cannot_be_planned_is_named(arguments, code, said):
    result = run(*arguments)
    assert result.exit_code == code and said in result.stderr.replace("\n", " ")
