"""What a verifier asks of its boards follows its load, both ways."""

from __future__ import annotations

from cloud.engines.base import Outcome, Plan
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Close, Commit, Draft, Open, Opened, encode
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.cloud.pricing import knee
from tests.toys import TARGET, ToyEngine, plain_decode

PROMPT = (3, 4, 5, 6)
TOKENS = 450


class Knee(ToyEngine):
    """60 ms up to 16 rows, in proportion beyond."""

    def step(self, plan: Plan) -> Outcome:
        outcome = super().step(plan)
        outcome.seconds = knee(sum(work.rows + len(work.draft) for work in plan.work), at=16)
        return outcome


class Fleet:
    """Boards that draft perfectly, as many guesses as they are advised, over a link without delay."""

    def __init__(self, num: int) -> None:
        self.at = Verifier(
            "v", Knee(), scheduler=Scheduler(256, 16), bounds=Bounds(sessions=99, draft_rows=8, ahead=900)
        )
        self.now = 0.0
        self.truth = plain_decode(PROMPT, Sampling(), TOKENS)
        self.text: dict[str, list[int]] = {}
        self.handle: dict[str, int] = {}
        self.advice: dict[str, int] = {}
        for i in range(num):
            device = f"t.b{i}"
            message = Open(i + 1, 0, TARGET, len(PROMPT), Ids(PROMPT), Sampling(), TOKENS)
            self.at.receive(topics.open_topic(device, "v"), encode(message), 0.0)
            self.text[device] = list(PROMPT)
        self._hear()

    def run(self, steps: int) -> float:
        """Tokens a second."""
        started, before = self.now, self.at.tally.committed
        for _ in range(steps):
            for device in self.text:
                self._draft(device)
            outcome = self.at.engine.step(self.at.plan(self.now))
            self.now += outcome.seconds
            self.at.settle(outcome, self.now)
            self._hear()
        return (self.at.tally.committed - before) / (self.now - started)

    def leave(self, num: int) -> None:
        for device in list(self.text)[:num]:
            close = Close(int(device[3:]) + 1, 0)
            self.at.receive(topics.draft_topic(device, "v"), encode(close), self.now)
            for known in (self.text, self.handle, self.advice):
                known.pop(device, None)  # type: ignore[attr-defined]

    def _draft(self, device: str) -> None:
        text, rows = self.text[device], min(8, self.advice.get(device, 8))
        at = len(text) - len(PROMPT)
        guesses = self.truth[at : at + rows]
        session = int(device[3:]) + 1
        hash = prefix_hashes(owner_hash(session, "v", 0), text)[-1]
        message: Draft = Draft(self.handle[device], 0, 1, len(text), hash, Ids(guesses))
        if guesses:
            self.at.receive(topics.draft_topic(device, "v"), encode(message), self.now)
        else:  # a board that drafts nothing is still heard of
            self.at._by_handle[device, self.handle[device]].heard(len(text), hash, self.now)

    def _hear(self) -> None:
        for send in self.at.take():
            device = topics.parse(send.topic).device
            match send.message:
                case Opened() as opened:
                    self.handle[device] = opened.handle
                case Commit() as commit if device in self.text:
                    self.text[device] = [*self.text[device][: commit.base], *commit.ids]
                    if commit.advice is not None:
                        self.advice[device] = commit.advice


def test_advice_falls_in_a_crowd_and_rises_when_it_has_gone():
    fleet = Fleet(40)
    fleet.run(60)
    assert set(fleet.advice.values()) == {0}, "a root row for each of 40 is all that 16 rows' worth of time can do"
    fleet.leave(37)
    fleet.run(30)
    assert min(fleet.advice.values()) >= 3, "nobody drafts, and yet they are invited again"
    assert fleet.run(10) > 2 * 3 / 0.06


def test_a_crowd_loses_nothing_by_drafting():
    fleet = Fleet(40)
    fleet.run(20)
    assert fleet.run(100) >= 0.99 * 16 / 0.06
