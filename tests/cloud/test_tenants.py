"""What a tenant was promised, and what it costs others: limits by name, shares, and who pays for rubbish."""

from __future__ import annotations

import pytest

from cloud.engines.base import Outcome, Plan
from cloud.scheduler import Scheduler
from cloud.tenants import Contract
from cloud.usage import Observer
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Close, Commit, Draft, Error, ErrorCode, Open, Opened, encode
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.toys import TARGET, ToyEngine, plain_decode

PROMPT = (3, 4, 5, 6)


class Today:
    """A day's record that a test writes."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def today(self, tenant: str) -> int:
        return self.tokens.get(tenant, 0)

    def left_s(self) -> float:
        return 3600.0


def verifier(day: Today | None = None, observers=(), engine: ToyEngine | None = None, **contracts) -> Verifier:
    return Verifier(
        "v",
        engine or ToyEngine(),
        scheduler=Scheduler(64, 16),
        bounds=Bounds(sessions=500),
        contracts=contracts,
        day=day,
        observers=observers,
    )


def open_session(at: Verifier, session: int, device: str, *, ids=PROMPT, tokens: int = 100, now: float = 0.0):
    message = Open(session, 0, TARGET, len(ids), Ids(ids), Sampling(), tokens)
    at.receive(topics.open_topic(device, TARGET), encode(message), now)
    return next(send.message for send in at.take() if not isinstance(send.message, Commit))


def step(at: Verifier, now: float) -> list:
    plan = at.plan(now)
    if plan.work:
        at.settle(at.engine.step(plan), now)
    return [send.message for send in at.take()]


def test_no_more_sessions_than_promised_and_another_tenant_is_not_asked():
    at = verifier(a=Contract(sessions=2))
    assert isinstance(open_session(at, 1, "a.x"), Opened) and isinstance(open_session(at, 2, "a.y"), Opened)
    refused = open_session(at, 3, "a.z")
    assert (refused.code, "2 sessions" in refused.what) == (ErrorCode.OVER_LIMIT, True) and refused.retry_ms > 0
    assert isinstance(open_session(at, 4, "b.z"), Opened)
    at.receive(topics.draft_topic("a.x", "v"), encode(Close(1, 0)), 0.0)
    assert isinstance(open_session(at, 3, "a.z"), Opened)


def test_a_contract_for_all_that_are_not_named():
    at = verifier(**{"*": Contract(sessions=1), "a": Contract(sessions=2)})
    assert [type(open_session(at, i, "a.x")) for i in range(3)] == [Opened, Opened, Error]
    assert [type(open_session(at, i, "b.x")) for i in range(2)] == [Opened, Error]
    assert isinstance(open_session(at, 1, "c.x"), Opened), "each for itself"


def test_a_text_over_the_tenants_context_is_refused_and_one_that_grows_over_it_ends_there():
    at = verifier(a=Contract(context=8))
    refused = open_session(at, 1, "a.x", ids=range(1, 11))
    assert refused.code == ErrorCode.OVER_CONTEXT and "8" in refused.what and refused.retry_ms is None
    open_session(at, 2, "a.x", ids=range(1, 6))
    said = step(at, 0.1) + step(at, 0.2) + step(at, 0.3)
    assert said[-1].finish == "context" and at.engine.sessions == {}


def test_over_its_rows_a_second_a_tenant_is_slowed_and_new_sessions_are_told_when():
    at = verifier(a=Contract(rows_per_s=20))
    for session in range(10):
        open_session(at, session, "a.x" if session < 5 else "a.y")
    open_session(at, 99, "b.x")
    rows = {"a": 0, "b": 0}
    refused = None
    for turn in range(100):
        now = 0.1 * turn
        plan = at.plan(now)
        for work in plan.work:
            rows[at._by_key[work.key].tenant] += work.rows
        if plan.work:
            at.settle(at.engine.step(plan), now)
            for ledger in at._by_session.values():
                ledger.device_has, ledger.heard_at = ledger.frontier, now
        if turn == 5:
            at.take()
            refused = open_session(at, 50, "a.z", now=now)
    assert 180 <= rows["a"] <= 20 * 11 + 60 and rows["b"] == 100 + 3
    assert refused.code == ErrorCode.OVER_LIMIT and "20 rows a second" in refused.what
    assert 0 < refused.retry_ms < 5000


def test_a_slowed_tenant_is_looked_at_again_when_its_time_has_come():
    at = verifier(a=Contract(rows_per_s=2))
    open_session(at, 1, "a.x")
    now = 0.0
    while at.plan(now).work:
        at.settle(at.engine.step(at._planned), now)
        at.take()
    assert now < at.wake_at(now) <= 1.5


def test_the_days_tokens_end_a_session_with_what_it_has():
    day = Today()
    at = verifier(day, a=Contract(tokens_per_day=1000))
    open_session(at, 1, "a.x")
    open_session(at, 2, "b.x")
    step(at, 0.1)
    day.tokens["a"] = 1000
    at.tick(0.2)
    (ended,) = [send.message for send in at.take() if isinstance(send.message, Error)]
    assert (ended.code, ended.session) == (ErrorCode.OVER_LIMIT, 1)
    assert "1000 tokens of the day" in ended.what and ended.retry_ms == 3_600_001
    assert at.num_sessions == 1 and len(at.engine.sessions) == 1
    assert open_session(at, 3, "a.y").code == ErrorCode.OVER_LIMIT
    day.tokens["a"] = 0
    assert isinstance(open_session(at, 3, "a.y"), Opened)


class Line(ToyEngine):
    """Every row takes 2 ms, a step 60 ms."""

    def step(self, plan: Plan) -> Outcome:
        outcome = super().step(plan)
        outcome.seconds = 0.06 + 0.002 * outcome.rows
        return outcome


def draft_into(at: Verifier, ledger, ids, now: float) -> None:
    message = Draft(ledger.handle, 0, 1, ledger.frontier, ledger.hashes[-1], Ids(ids))
    at.receive(topics.draft_topic(ledger.device, "v"), encode(message), now)


def test_rubbish_costs_who_sends_it():
    """The good guesses of one tenant get rows as if the other did not exist."""

    def good_rows(rubbish: bool) -> int:
        at = verifier(engine=Line())
        for session in range(4):
            open_session(at, session + 1, "good.x", tokens=200)
            open_session(at, session + 11, "bad.x", tokens=200)
        now, rows = 0.0, 0
        for turn in range(60):
            plan = at.plan(now)
            outcome = at.engine.step(plan)
            now += outcome.seconds
            if turn >= 20:
                rows += sum(len(work.draft) for work in plan.work if at._by_key[work.key].tenant == "good")
            at.settle(outcome, now)
            at.take()
            for ledger in list(at._by_session.values()):
                ledger.device_has, ledger.heard_at = ledger.frontier, now
                right = plain_decode(ledger.text, Sampling(), 4)
                if ledger.tenant == "good":
                    draft_into(at, ledger, right, now)
                elif rubbish:
                    draft_into(at, ledger, [(id + 1) % 60 for id in right], now)
        return rows

    alone = good_rows(False)
    assert alone > 300 and good_rows(True) >= 0.9 * alone


class Books(Observer):
    def __init__(self) -> None:
        self.usage: dict[int, object] = {}

    def closed(self, ledger) -> None:
        self.usage[ledger.session] = ledger.usage


def test_every_row_second_and_byte_is_on_somebodys_account():
    books = Books()
    at = verifier(observers=[books], engine=Line())
    for session in range(3):
        open_session(at, session, "a.x", tokens=30)
    now = rows = seconds = 0.0
    while at.engine.sessions:
        plan = at.plan(now)
        outcome = at.engine.step(plan)
        now += outcome.seconds
        rows, seconds = rows + outcome.rows, seconds + outcome.seconds
        at.settle(outcome, now)
        for ledger in list(at._by_session.values()):
            ledger.device_has, ledger.heard_at = ledger.frontier, now
            if not ledger.finish:
                right = plain_decode(ledger.text, Sampling(), 2)
                draft_into(at, ledger, [right[0], (right[1] + 1) % 60], now)
    at.drain()
    usage = list(books.usage.values())
    assert [each.committed for each in usage] == [30] * 3
    assert sum(each.root_rows + each.draft_rows + each.prefill_rows for each in usage) == rows
    assert sum(each.engine_s for each in usage) == pytest.approx(seconds)
    assert all(each.accepted == each.committed - each.root_rows for each in usage)
    assert all(each.bytes_in > 0 for each in usage)


def test_an_evicted_session_pays_for_reading_again_on_a_line_of_its_own():
    at = verifier()
    open_session(at, 1, "a.x")
    step(at, 0.1)
    (ledger,) = at._by_session.values()
    at.engine.evict(ledger.key)
    at.residency.lost(ledger, 0.2)
    step(at, 0.3)
    assert (ledger.usage.prefill_rows, ledger.usage.rebuilt_rows, ledger.usage.root_rows) == (3, 4, 2)
    hash = prefix_hashes(owner_hash(1, "v", 0), ledger.text)[-1]
    assert hash == ledger.hashes[-1]
