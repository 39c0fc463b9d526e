"""How long a session is held without drafts: what its device wishes, within its tenant's contract, by the load."""

from __future__ import annotations

import pytest

from cloud.engines.base import Outcome, Plan
from cloud.scheduler import Scheduler
from cloud.tenants import Contract
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Open, Opened, encode
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.toys import TARGET, ToyEngine

PROMPT = (3, 4, 5, 6)


class Proportional(ToyEngine):
    """Every row takes its 10 ms, so that everybody's plain rows are in everybody's way."""

    def step(self, plan: Plan) -> Outcome:
        outcome = super().step(plan)
        outcome.seconds = 0.01 * sum(work.rows + len(work.draft) for work in plan.work)
        return outcome


def verifier(contracts: dict[str, Contract]) -> Verifier:
    return Verifier("v", Proportional(), scheduler=Scheduler(64, 16), bounds=Bounds(), contracts=contracts)


def open_session(at: Verifier, device: str, patience_ms: int | None, session: int = 1) -> Opened:
    message = Open(session, 0, TARGET, len(PROMPT), Ids(PROMPT), Sampling(), 300, (), patience_ms)
    at.receive(topics.open_topic(device, at.id), encode(message), 0.0)
    (opened,) = [send.message for send in at.take()]
    assert isinstance(opened, Opened)
    return opened


def steps(at: Verifier, start: float, num: int) -> dict[str, int]:
    """Commits by device of so many steps, 50 ms apart."""
    drawn: dict[str, int] = {}
    for i in range(num):
        now = start + 0.05 * i
        plan = at.plan(now)
        if plan.work:
            at.settle(at.engine.step(plan), now)
        for send in at.take():
            device = topics.parse(send.topic).device
            drawn[device] = drawn.get(device, 0) + 1
    return drawn


@pytest.mark.parametrize(
    ("wish_ms", "contract", "granted_ms"),
    [
        (300, Contract(), 300),
        (None, Contract(), None),
        (0, Contract(), 0),
        (None, Contract(patience_most_s=0.5), 500),
        (0, Contract(patience_least_s=0.2), 200),
        (300, Contract(patience_least_s=0.1, patience_most_s=0.2), 200),
    ],
)
def test_the_device_is_told_how_long_it_may_be_held(wish_ms, contract, granted_ms):
    at = verifier({"acme": contract})
    assert open_session(at, "acme.b1", wish_ms).patience_ms == granted_ms
    assert open_session(at, "other.b1", wish_ms).patience_ms == wish_ms, "another's contract is not its business"


def test_with_patience_0_nobody_is_ever_held():
    at = verifier({})
    for i in range(8):
        open_session(at, f"t.b{i}", 0, session=i + 1)
    steps(at, 0.0, 2)
    assert set(steps(at, 0.5, 20).values()) == {20}
    assert at.experience.crowded


def test_a_contract_holds_its_sessions_in_a_crowd_and_not_otherwise():
    at = verifier({"cheap": Contract(patience_least_s=0.4)})
    open_session(at, "cheap.b1", 0)
    assert steps(at, 0.0, 10)["cheap.b1"] >= 9
    for i in range(6):
        open_session(at, f"dear.b{i}", 0, session=i + 2)
    steps(at, 0.5, 6)
    crowd = steps(at, 0.8, 20)
    assert crowd["dear.b0"] == 20 and 1 <= crowd["cheap.b1"] <= 4


def test_a_contract_cuts_what_a_device_would_wait():
    at = verifier({"acme": Contract(patience_most_s=0.2)})
    open_session(at, "acme.b1", None)
    open_session(at, "other.b1", None, session=2)
    drawn = steps(at, 0.0, 40)
    assert 6 <= drawn["acme.b1"] <= 10 and "other.b1" not in drawn
