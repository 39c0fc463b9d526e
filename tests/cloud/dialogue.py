"""One verifier, message by message: what is said to it, and what it answers."""

from __future__ import annotations

from cloud.engines.base import Outcome, Plan
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.errors import ModelError
from protocol.messages import Commit, Open, Opened, Resync, encode
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.toys import TARGET, ToyEngine

DEVICE = "t.board"
PROMPT = (3, 4, 5, 6)


class Limited(ToyEngine):
    """Room for a text of some length; fails the keys it is told to, and loses the KV of others."""

    def __init__(self, room_for: int = 400, context: int = 64) -> None:
        super().__init__(context=context)
        self.room_for = room_for
        self.failing: set[int] = set()
        self.evicting: set[int] = set()

    def open(self, key, ids, sampling, length, tenant="") -> None:
        if length > self.room_for:
            raise ModelError("the cache is too small")
        super().open(key, ids, sampling, length, tenant)

    def step(self, plan: Plan) -> Outcome:
        good = [work for work in plan.work if work.key not in self.failing]
        outcome = super().step(Plan(good))
        outcome.failed = {work.key: "not a number" for work in plan.work if work.key in self.failing}
        outcome.evicted = [key for key in self.evicting if key in self.sessions]
        for key in outcome.evicted:
            self.read[key] = 0
        self.evicting = set()
        return outcome


def verifier(engine: ToyEngine | None = None, **bounds) -> Verifier:
    return Verifier("v", engine or Limited(), scheduler=Scheduler(16, 4), bounds=Bounds(**bounds))


def opening(session: int = 1, **options) -> Open:
    fields = {"epoch": 0, "target": TARGET, "prompt_len": len(PROMPT), "ids": Ids(PROMPT), "max_tokens": 12}
    return Open(session, **{"sampling": Sampling(), **fields, **options})


def say(at: Verifier, message, now: float = 0.0, *, device: str = DEVICE) -> list:
    """What it answers."""
    topic = (topics.open_topic if isinstance(message, Open) else topics.draft_topic)(device, at.id)
    at.receive(topic, encode(message), now)
    return answers(at)


def answers(at: Verifier) -> list:
    return [send.message for send in at.take()]


def step(at: Verifier, now: float) -> list:
    plan = at.plan(now)
    assert plan.work, "nothing to do"
    at.settle(at.engine.step(plan), now)
    return answers(at)


def hash_of(ids, *, session: int = 1, epoch: int = 0) -> int:
    return prefix_hashes(owner_hash(session, "v", epoch), ids)[-1]


def resync(opened: Opened, text, *, ask: bool = False) -> Resync:
    hash = hash_of(text, session=opened.session, epoch=opened.epoch)
    return Resync(opened.handle, opened.epoch, len(text), hash, ask)


def text_of(commits) -> list[int]:
    return [id for message in commits if isinstance(message, Commit) for id in message.ids]


def run_until(at: Verifier, now: float, until: float) -> list:
    """Let it act at the times it names itself."""
    said = []
    while True:
        now = max(now, at.wake_at(now))
        if now > until:
            return said
        at.tick(now)
        plan = at.plan(now)
        if plan.work:
            at.settle(at.engine.step(plan), now)
        said += answers(at)
        now += 1e-3
