"""What a step holds, for sessions in every state."""

from __future__ import annotations

import random
from copy import deepcopy
from math import inf

import pytest

from cloud.cost import StepCost
from cloud.engines.base import Outcome, Work
from cloud.experience import Experience
from cloud.ledger import Ledger
from cloud.scheduler import LEAST, Scheduler
from cloud.tenants import Contract, Tenants
from protocol.messages import Draft, Limits, Open
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from protocol.tree import deltas_of
from tests.cloud.pricing import knee, learned, line

LIMITS = Limits(draft_rows=20, ahead=16, context=200, vocab_size=100)
PROMPT = (11, 12, 13)


def ledger(
    key: int,
    *,
    guesses=(),
    parents=None,
    patience_ms: int | None = 0,
    idle_since=0.0,
    max_tokens=50,
    device="a.b",
) -> Ledger:
    opened = Open(key, 0, "t", 3, Ids(PROMPT), Sampling(), max_tokens, (), patience_ms)
    made = Ledger(device, opened, verifier="v", handle=key, key=key, limits=LIMITS, now=idle_since)
    if guesses:
        hash = prefix_hashes(owner_hash(key, "v", 0), PROMPT)[-1]
        made.graft(Draft(key, 0, 1, 3, hash, Ids(guesses), 0, Ids(deltas_of(parents or ()))), idle_since)
    return made


FREE = learned(lambda rows: 0.06)
LINE = learned(line)


def plan(ledgers, *, rows=64, chunk=8, pending=None, now=0.0, cost=FREE, **options) -> dict[int, Work]:
    unread = pending or {}
    work = Scheduler(rows, chunk).plan(ledgers, lambda key: unread.get(key, 1), now, cost, **options).work
    assert len({one.key for one in work}) == len(work), "a session is twice in one step"
    assert sum(one.rows + len(one.draft) for one in work) <= rows, "over the budget"
    assert all(one.rows for one in work)
    return {one.key: one for one in work}


def worth_a_row(ledger: Ledger) -> int:
    """Guesses that may be filled and are not hopeless."""
    found, open_nodes = 0, [(1.0, ledger.tree.root)]
    while open_nodes:
        path, node = open_nodes.pop()
        behind = [(path * chance, child) for chance, child in ledger.guesses_behind(node) if path * chance >= LEAST]
        found += len(behind)
        open_nodes += behind
    return found


def taught(made: Ledger, hits: int, misses: int) -> Ledger:
    """As if so many of its only guesses at every depth had been right and wrong."""
    for depth in range(3):
        for i in range(hits + misses):
            made.acceptance.learn(depth, 0, (i + 1) * hits // (hits + misses) > i * hits // (hits + misses))
    return made


def test_each_due_session_gets_its_root_row_before_anyone_gets_a_draft_row():
    ledgers = [ledger(i, guesses=range(1, 11)) for i in range(6)]
    work = plan(ledgers, rows=6)
    assert sorted(work) == list(range(6))
    assert all((one.rows, len(one.draft)) == (1, 0) for one in work.values())


def test_sessions_that_fare_alike_get_as_many_draft_rows():
    ledgers = [ledger(i, guesses=range(1, 11)) for i in range(3)]
    assert sorted(len(one.draft) for one in plan(ledgers, rows=3 + 10).values()) == [3, 3, 4]
    few = [ledger(0, guesses=[1]), ledger(1, guesses=range(1, 11)), ledger(2)]
    shares = {key: len(one.draft) for key, one in plan(few, rows=3 + 8).items()}
    assert shares == {0: 1, 1: 7, 2: 0}


def test_rows_that_a_session_cannot_use_go_to_another():
    """One session is two tokens from its end, so that only the first of its ten guesses is worth a row."""
    short = ledger(0, guesses=range(1, 11), max_tokens=2)
    long = ledger(1, guesses=range(1, 11))
    work = plan([short, long], rows=2 + 8)
    assert (len(work[0].draft), len(work[1].draft)) == (1, 7)


def test_when_not_all_roots_fit_the_longest_waiting_go_first():
    ledgers = [ledger(i, idle_since=float(i % 3)) for i in range(6)]
    work = plan(ledgers, rows=3, now=10.0)
    assert set(work) == {0, 3, 1}


def test_a_tree_keeps_its_parents():
    (work,) = plan([ledger(1, guesses=[1, 2, 3, 4], parents=[-1, 0, 0, 2])]).values()
    assert (list(work.draft), list(work.parents)) == ([1, 2, 3, 4], [-1, 0, 0, 2])


@pytest.mark.parametrize("most", range(6))
def test_a_part_of_a_tree_is_a_tree(most):
    (work,) = plan([ledger(1, guesses=[1, 2, 3, 4, 5], parents=[-1, -1, 0, 1, 3])], rows=1 + most).values()
    assert len(work.draft) == most
    assert all(-1 <= parent < i for i, parent in enumerate(work.parents))


def test_prefill_comes_in_chunks_beside_the_roots():
    ledgers = [ledger(0), ledger(1)]
    work = plan(ledgers, pending={1: 100}, chunk=8)
    assert (work[0].rows, work[1].rows) == (1, 8)
    last = plan(ledgers, pending={1: 5}, chunk=8)
    assert last[1].rows == 5, "the last chunk of a due session holds its root row, so that it draws a token"


def test_a_prefill_never_crowds_out_the_root_rows():
    work = plan([ledger(0), *(ledger(i) for i in range(1, 4))], pending={0: 100}, rows=5, chunk=8)
    assert {key: one.rows for key, one in work.items()} == {0: 2, 1: 1, 2: 1, 3: 1}


def test_prefill_goes_before_draft_rows():
    work = plan([ledger(0, guesses=range(1, 11)), ledger(1)], pending={1: 100}, rows=10, chunk=8)
    assert (work[1].rows, len(work[0].draft)) == (8, 1)


def test_infinite_patience_prefills_but_draws_nothing():
    waiting = ledger(1, patience_ms=None)
    assert waiting.due_at() == inf
    assert plan([waiting], pending={1: 20})[1].rows == 8
    assert plan([waiting], pending={1: 4})[1].rows == 3, "all but the root row"
    assert plan([waiting], pending={1: 1}, now=1e9) == {}


def test_patience_that_is_over_is_due():
    patient = ledger(1, patience_ms=300)
    assert plan([patient], now=0.29) == {}
    assert plan([patient], now=0.3)[1].rows == 1
    assert plan([ledger(1, patience_ms=None, guesses=[1])])[1].draft == [1]


def test_what_is_complete_or_too_far_ahead_gets_nothing():
    ahead = ledger(1)
    ahead.commit(range(1, 17), 0.0)
    complete = ledger(2, max_tokens=1)
    complete.commit([1], 0.0)
    assert plan([ahead, complete]) == {}
    ahead.heard(10, None, 0.0)
    assert set(plan([ahead])) == {1}


def test_any_mixture_keeps_the_budget_and_the_order():
    """Never over the budget, no due root left out while a draft row is in, nothing left undone while rows are free."""
    rng = random.Random(3)
    for _ in range(400):
        rows, now = rng.randint(1, 20), 1.0
        ledgers, pending = [], {}
        for key in range(rng.randint(0, 10)):
            guesses = range(1, 1 + rng.randint(0, 9))
            patience = rng.choice([0, 500, 2000, None])
            ledgers.append(ledger(key, guesses=guesses, patience_ms=patience, max_tokens=rng.choice([1, 3, 50])))
            pending[key] = rng.choice([1, 1, 1, 2, 7, 30])
        work = plan(ledgers, rows=rows, chunk=4, pending=pending, now=now)
        due = {one.key for one in ledgers if pending[one.key] == 1 and one.may_run() and one.due_at() <= now}
        drafts = sum(len(one.draft) for one in work.values())
        used = sum(one.rows for one in work.values()) + drafts
        if drafts:
            assert due <= set(work)
            wanted = sum(left - 1 for key, left in pending.items() if left > 1 and not ledgers[key].finish)
            assert sum(one.rows for one in work.values() if pending[one.key] > 1) >= min(wanted, 4, rows // 4)
        if used < rows:
            assert due <= set(work)
            assert all(len(work[key].draft) == worth_a_row(ledgers[key]) for key in due)
        for key, one in work.items():
            assert one.rows <= min(4, pending[key]) and (not one.draft or key in due)


def test_a_full_house_leaves_a_fourth_of_the_step_to_who_comes_in():
    ledgers = [ledger(key) for key in range(1, 9)]
    pending = dict.fromkeys(range(1, 9), 1) | {8: 20}
    step = Scheduler(rows=8, prefill_chunk=16).plan(ledgers, pending.__getitem__, 1.0, FREE)
    rows = {work.key: work.rows for work in step.work}
    assert rows[8] == 2 and sum(rows.values()) == 8


def test_the_session_whose_guesses_are_accepted_gets_the_rows():
    good = taught(ledger(1, guesses=range(1, 11)), 30, 0)
    bad = taught(ledger(2, guesses=range(1, 11)), 0, 30)
    work = plan([bad, good], rows=2 + 8)
    assert len(work[1].draft) >= 7


def test_a_guess_that_nobody_believes_in_gets_no_row_even_where_rows_are_free():
    work = plan([taught(ledger(1, guesses=range(1, 11)), 0, 100)], rows=64)
    assert len(work[1].draft) <= 1


def test_siblings_are_alternatives():
    """A second guess for a position has what the first left, so a guess behind a sure first goes before it."""
    made = ledger(1, guesses=[1, 2, 3], parents=[-1, -1, 0])
    for _ in range(40):
        made.acceptance.learn(0, 1, True)
    assert plan([made], rows=1 + 2)[1].draft == [1, 3]
    unsure = ledger(2, guesses=[1, 2, 3], parents=[-1, -1, 0])
    for hit in [False] * 40:
        unsure.acceptance.learn(0, 1, hit)
        unsure.acceptance.learn(0, 2, True)
    assert set(plan([unsure], rows=1 + 2)[2].draft) == {1, 2} or plan([unsure], rows=1 + 2)[2].draft[0] == 2


def test_draft_rows_fill_the_step_up_to_its_knee_and_not_beyond():
    cost = learned(lambda rows: knee(rows, at=32))
    ledgers = [ledger(i, guesses=range(1, 11)) for i in range(16)]
    work = plan(ledgers, rows=500, cost=cost)
    assert sum(1 + len(one.draft) for one in work.values()) == 32


def test_beyond_the_knee_there_are_only_root_rows():
    cost = learned(lambda rows: knee(rows, at=32))
    ledgers = [taught(ledger(i, guesses=range(1, 11)), 40, 2) for i in range(40)]
    work = plan(ledgers, rows=500, cost=cost)
    assert len(work) == 40 and not any(one.draft for one in work.values())


def test_on_an_engine_without_a_knee_a_row_is_taken_while_it_raises_tokens_a_second():
    """50 ms and 5 a row: behind one root, the best n is where the next guess adds less to E / T than its time."""
    cost = learned(line, most=64)
    one = taught(ledger(1, guesses=range(1, 17)), 400, 100)
    chance = one.acceptance.rate(5, 0)
    rates = [sum(chance**i for i in range(n + 1)) / line(1 + n) for n in range(14)]
    best = rates.index(max(rates))
    assert 3 < best < 12
    assert abs(len(plan([one], rows=64, cost=cost)[1].draft) - best) <= 1


def test_a_row_tile_is_filled():
    """Rows that come in tiles of 16 at the same price: none or all of a tile."""
    cost = learned(lambda rows: 0.02 + 0.03 * -(-rows // 16))
    ledgers = [taught(ledger(i, guesses=range(1, 11)), 40, 10) for i in range(4)]
    assert sum(1 + len(one.draft) for one in plan(ledgers, rows=500, cost=cost).values()) in (16, 32)


def test_a_verifier_that_knows_no_price_takes_no_draft_rows():
    assert plan([ledger(1, guesses=[1, 2])], cost=StepCost())[1].draft == []


def test_the_guard_cuts_the_draft_rows_of_its_tenant():
    tenants = Tenants()
    ledgers = [ledger(i, guesses=range(1, 11), device="a.b" if i < 2 else "b.b") for i in range(4)]
    full = plan(ledgers, tenants=tenants)
    tenants["a"].goodput.share = 0.5
    guarded = plan(ledgers, tenants=tenants)
    kept = [sum(len(guarded[key].draft) for key in pair) for pair in ((0, 1), (2, 3))]
    were = [sum(len(full[key].draft) for key in pair) for pair in ((0, 1), (2, 3))]
    assert abs(kept[0] - were[0] / 2) <= 1 and kept[1] == were[1]


# -- tenants ----------------------------------------------------------------------------------------------------------


def shared_out(many: int, few: int, *, cost=LINE, weights=(1.0, 1.0), guesses=(), rows=512, steps=40) -> list[float]:
    """Tokens that each of two tenants gets a second, where one has `many` sessions and one `few`, if guesses fare as
    they have and steps take what they should.
    """
    tenants = Tenants({"a": Contract(weight=weights[0]), "b": Contract(weight=weights[1])})
    experience = Experience(deepcopy(cost))
    ledgers = [ledger(i, device="a.b") for i in range(many)]
    ledgers += [ledger(many + i, device="b.b", guesses=guesses) for i in range(few)]
    for one in ledgers:
        tenants[one.tenant].num_sessions += 1
    chance = {one.key: one.acceptance.rate(0, 0) for one in ledgers}
    tokens, owed, seconds = [0.0, 0.0], 0.0, 0.0
    for turn in range(steps):
        step = Scheduler(rows, 8).plan(ledgers, lambda key: 1, float(turn), cost, tenants=tenants)
        outcome = Outcome(seconds=cost.seconds(step.roots + step.drafts, step.context))
        seconds += outcome.seconds
        for work in step.work:
            owed += sum(chance[work.key] ** (i + 1) for i in range(len(work.draft)))
            right, owed = int(owed), owed % 1
            outcome.accepted[work.key] = [0] * (1 + right)
            outcome.ran[work.key] = 1 + len(work.draft)
            tokens[work.key >= many] += 1 + right
            ledgers[work.key].idle_since = float(turn)
        experience.learn(step, outcome, {one.key: one for one in ledgers}, tenants)
    return [each / seconds for each in tokens]


@pytest.mark.parametrize(("many", "few"), [(60, 6), (40, 1), (12, 10)])
def test_a_tenant_with_many_sessions_leaves_another_its_part(many, few):
    alone = shared_out(0, few)[1]
    assert shared_out(many, few)[1] >= 0.97 * alone / 2


def test_a_part_is_by_weight():
    alone = shared_out(0, 6)[1]
    assert shared_out(60, 6, weights=(1.0, 3.0))[1] >= 0.97 * alone * 3 / 4
    assert shared_out(60, 6, weights=(3.0, 1.0))[1] >= 0.97 * alone / 4


def test_the_draft_rows_that_pay_alone_are_a_part_too():
    """Beside sixty sure root rows no guess would pay, and the other tenant's speculation would be over."""
    cost = learned(lambda rows: line(rows, fixed_s=0.1, row_s=0.002))
    alone = shared_out(0, 6, cost=cost, guesses=range(1, 6))[1]
    assert alone > 1.3 * shared_out(0, 6, cost=cost)[1]
    assert shared_out(60, 6, cost=cost, guesses=range(1, 6))[1] >= 0.9 * alone / 2


def test_the_guard_leaves_a_tenant_its_part_though_others_rows_would_bring_more():
    cost = learned(lambda rows: max(0.03 + 0.0008 * rows, 0.0016 * rows))
    alone = shared_out(0, 4, cost=cost, guesses=range(1, 7), steps=120)[1]
    assert shared_out(60, 4, cost=cost, guesses=range(1, 7), steps=120)[1] >= alone / 2


def test_where_rows_are_free_nobody_is_held_back():
    assert shared_out(60, 6, cost=FREE) == shared_out(60, 6, cost=FREE, weights=(1.0, 100.0))
    (many, few) = shared_out(60, 6, cost=FREE)
    assert many == pytest.approx(10 * few)


def test_equal_tenants_get_the_same_of_a_step_that_is_too_small():
    for num in (3, 7):
        tokens = shared_out(num, num, rows=4, steps=100)
        assert tokens[0] == pytest.approx(tokens[1], rel=0.03)


def test_prompts_of_one_tenant_do_not_queue_behind_those_of_another():
    ledgers = [ledger(i, device="a.b") for i in range(30)] + [ledger(30, device="b.b", idle_since=1.0)]
    work = plan(ledgers, rows=64, pending=dict.fromkeys(range(31), 50), now=2.0)
    assert work[30].rows == 8, "a whole chunk, though thirty came before"


def test_a_tenant_that_has_had_its_rows_a_second_waits():
    tenants = Tenants({"a": Contract(rows_per_s=10)})
    ledgers = [ledger(0, device="a.b"), ledger(1, device="b.b")]
    tenants["a"].charge(10, 0.0)
    assert set(plan(ledgers, now=0.0, tenants=tenants)) == {0, 1}, "a second's worth is a burst"
    tenants["a"].charge(5, 0.0)
    assert set(plan(ledgers, now=0.1, tenants=tenants)) == {1}
    assert tenants["a"].ready_at() == pytest.approx(0.5)
    assert set(plan(ledgers, now=0.5, tenants=tenants)) == {0, 1}


def test_a_step_is_kept_below_the_time_that_is_wished_for():
    cost = learned(line)
    ledgers = [ledger(i) for i in range(40)]
    step = Scheduler(512, 8, step_s=line(16)).plan(ledgers, lambda key: 1, 1.0, cost)
    assert step.roots == 16 and step.due == 40


def test_who_is_held_in_a_crowd_is_not_held_otherwise():
    opened = Open(1, 0, "t", 3, Ids(PROMPT), Sampling(), 50, (), 0)
    held = Ledger(
        "a.b", opened, verifier="v", handle=1, key=1, limits=LIMITS, now=0.0, contract=Contract(patience_least_s=0.2)
    )
    assert plan([held], now=0.1)[1].rows == 1
    assert plan([held], now=0.1, crowded=True) == {}
    assert plan([held], now=0.2, crowded=True)[1].rows == 1


def test_many_prefills_stretch_a_step_by_half_at_most():
    cost = learned(knee)
    for prefill in [0, 64] * 30:
        cost.learn(32, 0.06 + prefill * 0.001, prefill=prefill)
    ledgers = [ledger(i) for i in range(40)]
    pending = {i: 1 if i < 20 else 500 for i in range(40)}
    step = Scheduler(512, 16).plan(ledgers, pending.__getitem__, 1.0, cost)
    assert step.roots == 20
    assert 25 <= step.prefill <= 33


def test_prefill_of_unknown_price_grows_from_step_to_step():
    cost = learned(knee)
    ledgers = [ledger(i) for i in range(40)]
    pending = {i: 1 if i < 20 else 500 for i in range(40)}
    most = []
    for _ in range(4):
        step = Scheduler(512, 16).plan(ledgers, pending.__getitem__, 1.0, cost)
        most.append(step.prefill)
        cost.learn(step.roots, 0.06, prefill=step.prefill)
    assert most == [16, 32, 64, 128]
