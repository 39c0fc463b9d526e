"""What becomes of a release, event by event; no disk and no network."""

from __future__ import annotations

import random

import msgspec
import pytest

from edge.updates.errors import CompatibilityError, RejectedError, ReplayError
from edge.updates.judge import Rule, Score, judge, radius
from edge.updates.manifest import content_digest
from edge.updates.plan import MAX_STARTS, STEADY_S, Fetch, Plan, Record, Ref, Restart, Test, Usage, describe, may_fetch
from tests.edge.releases import FACTS, Shelf, settings

RULE = Rule(rounds=50, margin=0.05, most=20)
SHELF = Shelf()


def ref(release) -> Ref:
    return Ref(release.release, content_digest(release))


def fetched(plan: Plan, release) -> Ref:
    plan.announced(release, FACTS)
    assert plan.due(0.0, idle=True) == [Fetch(release.kind, ref(release))]
    plan.fetched(release.kind, ref(release))
    return ref(release)


def on_trial(plan: Plan, release) -> Ref:
    found = fetched(plan, release)
    assert plan.due(0.0, idle=True) == [Test(release.kind, found)]
    plan.tested(release.kind, found)
    assert plan.due(0.0, idle=True) == [Restart()]
    restarted(plan)
    return found


def restarted(plan: Plan) -> None:
    """The record is all that is left."""
    plan.__init__(msgspec.json.decode(msgspec.json.encode(plan.record), type=Record), plan.rule)
    plan.started(0.0)
    plan.restart_due = False


def talk(rounds: int, acceptance: float) -> Score:
    hits = round(rounds * 10 * acceptance)
    return Score(rounds, hits, rounds * 10 - hits)


def test_a_release_is_fetched_tested_between_sessions_tried_and_committed():
    plan = Plan(Record(), RULE)
    found = fetched(plan, SHELF.model("m-1", 1))
    assert plan.due(0.0, idle=False) == [], "a session runs"
    assert plan.record.active("model") is None
    plan.tested("model", found)
    assert plan.due(0.0, idle=False) == [] and plan.due(0.0, idle=True) == [Restart()]
    restarted(plan)
    assert plan.record.active("model") == found and plan.record.model.committed is None
    plan.scored(talk(49, 0.8))
    assert plan.record.trial is not None
    plan.scored(talk(1, 0.8))
    assert plan.record.trial is None and plan.record.model.committed == found


def test_a_worse_model_is_rolled_back_and_not_tried_again_under_its_name():
    plan = Plan(Record(), RULE)
    good = on_trial(plan, SHELF.model("m-1", 1))
    plan.scored(talk(200, 0.8))
    on_trial(plan, SHELF.model("m-2", 2))
    plan.scored(talk(100, 0.5))
    assert plan.record.active("model") == good and plan.due(0.0, idle=True) == [Restart()]
    assert "rolled back model m-2: acceptance 0.500" in describe(plan.record)
    plan.scored(talk(500, 0.1))
    assert plan.record.baseline.mean > 0.75, "what the bad one still does until the restart is not the good one's"
    restarted(plan)
    with pytest.raises(RejectedError):
        plan.announced(SHELF.model("m-2", 3), FACTS)
    assert plan.due(0.0, idle=True) == []
    fetched(plan, msgspec.structs.replace(SHELF.model("m-2", 4), release="m-2b"))


def test_an_old_manifest_cannot_be_replayed():
    plan = Plan(Record(), RULE)
    plan.announced(SHELF.model("m-2", 2), FACTS)
    with pytest.raises(ReplayError, match="serial 1 is below 2"):
        plan.announced(SHELF.model("m-1", 1), FACTS)
    with pytest.raises(CompatibilityError):
        plan.announced(SHELF.model("m-1", 9, channel="beta"), FACTS)
    restarted(plan)
    with pytest.raises(ReplayError):
        plan.announced(SHELF.model("m-1", 1), FACTS)
    assert plan.record.model.wanted == ref(SHELF.model("m-2", 2))
    plan.announced(settings("s-1", 1), FACTS)  # each kind counts by itself


def test_a_manifest_that_does_not_fit_still_outdates_the_ones_before():
    plan = Plan(Record(), RULE)
    with pytest.raises(CompatibilityError):
        plan.announced(SHELF.model("m-3", 3, boards=("generic",)), FACTS)
    with pytest.raises(ReplayError):
        plan.announced(SHELF.model("m-1", 1), FACTS)


def test_hearing_it_again_changes_nothing_at_any_stage():
    plan, release = Plan(Record(), RULE), SHELF.model("m-1", 1)
    for event in (
        lambda: plan.announced(release, FACTS),
        lambda: plan.fetched("model", ref(release)),
        lambda: plan.tested("model", ref(release)),
        lambda: plan.scored(talk(60, 0.8)),
    ):
        event()
        before = plan.record
        plan.announced(release, FACTS)
        assert plan.record == before


def test_a_board_outside_the_stage_waits_for_a_wider_one():
    plan = Plan(Record(), RULE)
    plan.announced(SHELF.model("m-1", 1, percent=0), FACTS)
    assert plan.due(0.0, idle=True) == []
    fetched(plan, SHELF.model("m-1", 2, percent=100))
    plan.announced(SHELF.model("m-1", 3, percent=0), FACTS)
    assert plan.due(0.0, idle=True) == [], "a stage that is taken back stops what was not tried yet"


def test_one_release_is_on_trial_at_a_time():
    plan = Plan(Record(), RULE)
    on_trial(plan, SHELF.model("m-1", 1))
    fetched(plan, SHELF.runtime("1.1", 1))
    assert plan.due(0.0, idle=True) == []
    plan.scored(talk(60, 0.8))
    assert plan.due(0.0, idle=True) == [Test("runtime", ref(SHELF.runtime("1.1", 1)))]


def test_a_newer_one_takes_the_place_of_one_that_is_still_fetched():
    plan = Plan(Record(), RULE)
    plan.announced(SHELF.model("m-1", 1), FACTS)
    plan.announced(SHELF.model("m-2", 2), FACTS)
    plan.fetched("model", ref(SHELF.model("m-1", 1)))
    assert plan.record.model.candidate is None and plan.record.model.wanted == ref(SHELF.model("m-2", 2))


def test_pauses_between_attempts_double_up_to_an_hour():
    plan, now, pauses = Plan(Record(), RULE), 0.0, []
    plan.announced(SHELF.model("m-1", 1), FACTS)
    for _ in range(10):
        plan.failed("model", now)
        before = now
        while not plan.due(now, idle=False):
            now += 1.0
        pauses.append(now - before)
    assert pauses == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_trial_that_never_gets_to_a_verified_round_is_rolled_back():
    plan = Plan(Record(), RULE)
    on_trial(plan, SHELF.runtime("1.1", 1))
    for _ in range(MAX_STARTS - 1):
        restarted(plan)
        assert plan.record.trial is not None
    restarted(plan)
    assert plan.record.trial is None and plan.record.active("runtime") is None
    assert "no verified round" in plan.record.rejected[0].why


@pytest.mark.parametrize(
    "lives",
    [
        lambda plan: plan.scored(talk(1, 0.8)),
        lambda plan: plan.stopped(),
        lambda plan: plan.due(STEADY_S, idle=False),
    ],
    ids=["a round", "told to end", "ten minutes"],
)
def test_starts_that_went_well_are_not_held_against_it(lives):
    plan = Plan(Record(), RULE)
    on_trial(plan, SHELF.runtime("1.1", 1))
    for _ in range(3 * MAX_STARTS):
        lives(plan)
        restarted(plan)
    assert plan.record.trial is not None


def test_settings_are_committed_by_rounds_alone_since_they_change_how_much_is_guessed():
    plan = Plan(Record(), RULE)
    on_trial(plan, SHELF.model("m-1", 1))
    plan.scored(talk(200, 0.8))
    found = on_trial(plan, settings("s-1", 1, policy="none"))
    plan.scored(Score(60, 0, 0))
    assert plan.record.settings.committed == found


def test_a_lost_release_is_replaced_by_the_former_one_then_by_what_was_flashed():
    plan = Plan(Record(), RULE)
    first = on_trial(plan, SHELF.model("m-1", 1))
    plan.scored(talk(60, 0.8))
    on_trial(plan, SHELF.model("m-2", 2))
    plan.scored(talk(1000, 0.8))
    plan.lost("model")
    assert plan.record.active("model") == first
    plan.lost("model")
    assert plan.record.active("model") is None


def test_the_months_cap_is_what_is_left_of_it():
    assert may_fetch(Usage("2026-11", 400_000), "2026-11", 1) == 600_000
    assert may_fetch(Usage("2026-11", 4_000_000), "2026-11", 1) == 0
    assert may_fetch(Usage("2026-10", 4_000_000), "2026-11", 1) == 1_000_000
    assert may_fetch(Usage("2026-11", 1 << 40), "2026-11", None) is None


# -- the sequential bound -----------------------------------------------------------------------------------------


def trial(acceptance: float, seed: int, old: Score, rule: Rule) -> tuple[str, int]:
    """(verdict, positions) of a trial with random hits, judged after each round of three positions."""
    chance, new = random.Random(seed), Score()
    while True:
        hits = sum(chance.random() < acceptance for _ in range(3))
        new = new.plus(Score(1, hits, 3 - hits))
        verdict = judge(new, old, rule)
        if verdict != "wait":
            return verdict, new.judged


def test_an_equal_one_is_hardly_ever_rejected_and_a_bad_one_never_committed():
    rule, old = Rule(rounds=100, margin=0.05), Score(5000, 12_000, 3_000)
    equal = [trial(0.8, seed, old, rule) for seed in range(60)]
    bad = [trial(0.6, seed, old, rule) for seed in range(60)]
    assert [verdict for verdict, _ in equal].count("commit") >= 58
    assert {verdict for verdict, _ in bad} == {"reject"}
    assert sorted(count for _, count in bad)[30] < 1500, "it need not be suffered for long"


def test_the_interval_covers_the_mean_at_every_look():
    misses = 0
    for seed in range(300):
        chance, hits = random.Random(seed), 0
        for count in range(1, 1501):
            hits += chance.random() < 0.7
            if abs(hits / count - 0.7) > radius(count):
                misses += 1
                break
    assert misses <= 0.02 * 300


def test_without_anything_to_compare_with_the_rounds_are_enough():
    assert judge(Score(99, 10, 900), Score(), Rule(rounds=100)) == "wait"
    assert judge(Score(100, 10, 900), Score(), Rule(rounds=100)) == "commit"


def test_one_that_never_guesses_is_rejected_in_the_end():
    rule, old = Rule(rounds=100, most=5), Score(5000, 12_000, 3_000)
    assert judge(Score(499), old, rule) == "wait"
    assert judge(Score(500), old, rule) == "reject"
