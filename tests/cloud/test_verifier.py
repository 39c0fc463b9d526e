"""All sessions of one verifier, message by message; `>` is said to it, `<` by it."""

from __future__ import annotations

import random
from math import inf

import pytest

from cloud.engines.base import Outcome, Plan
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.policy import ChainPolicy
from edge.runtime import SessionRun
from edge.session import Request, Timing
from edge.window import Window
from protocol import topics
from protocol.errors import ModelError
from protocol.messages import (
    Close,
    Commit,
    DeviceState,
    Draft,
    Error,
    ErrorCode,
    Open,
    Opened,
    Resync,
    VerifierState,
    encode,
)
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.toys import TARGET, VOCAB, ToyDrafter, ToyEngine, plain_decode

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


# -- admission --------------------------------------------------------------------------------------------------------


def test_an_open_is_answered_with_id_handle_and_limits():
    at = verifier(draft_rows=9, ahead=5)
    (answer,) = say(at, opening())
    assert isinstance(answer, Opened)
    assert (answer.session, answer.epoch, answer.verifier, answer.length) == (1, 0, "v", 4)
    assert (answer.limits.draft_rows, answer.limits.ahead, answer.limits.context) == (9, 5, 64)
    assert (answer.limits.vocab_size, answer.limits.trees) == (VOCAB, True)


@pytest.mark.parametrize(
    ("code", "wrong", "names"),
    [
        (ErrorCode.WRONG_TARGET, {"target": "other-target"}, "other-target"),
        (ErrorCode.BAD_OPEN, {"ids": Ids((3, 4, 5, VOCAB))}, str(VOCAB)),
        (ErrorCode.BAD_OPEN, {"max_tokens": 0}, "max_tokens"),
        (ErrorCode.OVER_CONTEXT, {"ids": Ids([3] * 65)}, "65"),
        (ErrorCode.OVER_CONTEXT, {"ids": Ids([3] * 64), "prompt_len": 64}, "64"),
        (ErrorCode.UNKNOWN_PREFIX, {"prefix": (0xABC, 4)}, "abc"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_code(code, wrong, names):
    at = verifier()
    (answer,) = say(at, opening(**wrong))
    assert isinstance(answer, Error) and (answer.code, answer.session, answer.epoch) == (code, 1, 0)
    assert names in answer.what
    assert at.num_sessions == 0 and at.tally.errors[code] == 1


def test_a_full_verifier_says_when_to_come_back():
    at = verifier(sessions=2)
    say(at, opening(1), device="t.a")
    say(at, opening(2), device="t.b")
    (answer,) = say(at, opening(3), device="t.c")
    assert answer.code == ErrorCode.NO_ROOM and answer.retry_ms
    say(at, Close(1, 0), device="t.a")
    assert isinstance(say(at, opening(3), device="t.c")[0], Opened)


def test_an_open_that_was_not_looked_at_in_time_is_not_served():
    """Its device has opened again by then, and would only take a prefill and a place from others."""
    at = verifier(open_s=4.0)
    at.receive(topics.open_topic(DEVICE, TARGET), encode(opening()), 0.0, 4.1)
    assert answers(at) == [] and at.num_sessions == 0 and at.tally.late == 1
    at.receive(topics.open_topic(DEVICE, TARGET), encode(opening()), 0.0, 3.9)
    assert at.num_sessions == 1


def test_one_device_cannot_take_all_sessions():
    at = verifier(sessions_per_device=2)
    say(at, opening(1))
    say(at, opening(2))
    assert say(at, opening(3))[0].code == ErrorCode.OVER_LIMIT
    assert isinstance(say(at, opening(3), device="t.other")[0], Opened)


def test_no_memory_for_a_session_of_this_length():
    at = verifier(Limited(room_for=20))
    (answer,) = say(at, opening(max_tokens=17))
    assert answer.code == ErrorCode.OVER_CONTEXT and "too small" in answer.what and answer.retry_ms is None
    assert at.num_sessions == 0 and not at.plan(0.0).work
    assert isinstance(say(at, opening(max_tokens=16))[0], Opened)


def test_a_draining_verifier_sends_its_sessions_away_and_takes_none():
    at = verifier()
    say(at, opening(1))
    at.drain()
    (moved,) = answers(at)
    assert (moved.code, moved.session) == (ErrorCode.DRAINING, 1)
    assert say(at, opening(2))[0].code == ErrorCode.DRAINING
    assert at.num_sessions == 0 and at.engine.sessions == {}


def test_a_text_that_is_already_complete_is_answered_at_once():
    at = verifier()
    opened, commit = say(at, opening(ids=Ids((*PROMPT, 9)), stop_ids=(9,)))
    assert isinstance(opened, Opened) and (commit.finish, list(commit.ids)) == ("stop", [])
    assert at.engine.sessions == {}


# -- the same session again -------------------------------------------------------------------------------------------


def test_the_same_open_twice_is_one_session():
    """> open 0, < opened, < commits, > open 0, < opened, < all commits again"""
    at = verifier()
    (first,) = say(at, opening())
    drawn = text_of(step(at, 0.1) + step(at, 0.2))
    again, news = say(at, opening(), 0.3)
    assert isinstance(again, Opened) and again.handle == first.handle and again.length == 4 + len(drawn)
    assert news.base == 4 and list(news.ids) == drawn
    assert at.num_sessions == len(at.engine.sessions) == 1


def test_an_older_epoch_is_ignored_and_a_newer_one_replaces():
    """> open 3, > open 2 (late), > open 4"""
    at = verifier()
    say(at, opening(epoch=3))
    assert say(at, opening(epoch=2)) == []
    (opened,) = say(at, opening(epoch=4))
    assert opened.epoch == 4
    assert at.num_sessions == len(at.engine.sessions) == 1
    assert step(at, 0.1)[0].epoch == 4


def test_a_board_that_was_killed_gets_what_was_drawn_meanwhile():
    """> open 0, < 6 tokens of which the device has 2, > open 1 with those, < opened, < the other 4 under epoch 1"""
    at = verifier(ahead=6)
    say(at, opening())
    drawn = text_of(run_until(at, 0.0, 1.0))
    assert len(drawn) == 6
    opened, news = say(at, opening(epoch=1, ids=Ids((*PROMPT, *drawn[:2])), patience_ms=None), 2.0)
    assert (opened.epoch, opened.length, opened.patience_ms) == (1, 10, None)
    assert (news.base, list(news.ids), news.epoch) == (6, drawn[2:], 1)
    assert news.hash == hash_of([*PROMPT, *drawn[:2]], epoch=1)
    assert at.tally.committed == 6 and at.engine.pending(1) == 1
    say(at, resync(opened, [*PROMPT, *drawn]), 2.1)
    hash = hash_of([*PROMPT, *drawn], epoch=1)
    (right,) = plain_decode([*PROMPT, *drawn], Sampling(), 1)
    say(at, Draft(opened.handle, 1, 1, 10, hash, Ids((right,))), 2.2)
    (commit,) = step(at, 2.3)
    assert [*drawn, *commit.ids] == plain_decode(PROMPT, Sampling(), 8)


@pytest.mark.parametrize(
    "other",
    [
        {"ids": Ids((*PROMPT, 63, 63))},
        {"ids": Ids((3, 4, 5, 7))},
        {"max_tokens": 11},
        {"stop_ids": (9,)},
        {"ids": Ids([*PROMPT, *plain_decode(PROMPT, Sampling(), 9)])},
    ],
    ids=["text", "prompt", "length", "stop ids", "further"],
)
def test_another_text_under_a_newer_epoch_starts_anew(other):
    at = verifier(ahead=6)
    say(at, opening())
    run_until(at, 0.0, 1.0)
    request = opening(epoch=1, **other)
    opened, *news = say(at, request, 2.0)
    assert (opened.epoch, opened.length, news) == (1, len(request.ids), [])
    assert at.num_sessions == len(at.engine.sessions) == 1


def test_a_late_close_of_an_older_epoch_closes_nothing():
    at = verifier()
    say(at, opening(epoch=3))
    say(at, Close(1, 2))
    assert at.num_sessions == 1
    say(at, Close(1, 3))
    assert at.num_sessions == 0 and at.engine.sessions == {}


def test_what_is_said_in_an_old_epoch_is_of_an_unknown_session():
    at = verifier()
    (old,) = say(at, opening(epoch=3))
    say(at, opening(epoch=4))
    (answer,) = say(at, resync(old, PROMPT, ask=True))
    assert (answer.code, answer.epoch) == (ErrorCode.UNKNOWN_SESSION, 3)
    assert at.num_sessions == 1


def test_an_unknown_handle_is_named_in_the_answer():
    at = verifier()
    (answer,) = say(at, Draft(77, 5, 1, 4, 0, Ids((1,))))
    assert (answer.code, answer.session, answer.epoch, answer.handle) == (ErrorCode.UNKNOWN_SESSION, 0, 5, 77)


def test_another_devices_handle_is_unknown():
    at = verifier()
    (opened,) = say(at, opening())
    (answer,) = say(at, resync(opened, PROMPT, ask=True), device="t.thief")
    assert answer.code == ErrorCode.UNKNOWN_SESSION
    say(at, Close(1, 9), device="t.thief")
    assert at.num_sessions == 1


def test_two_sessions_of_a_device_at_two_verifiers_differ_in_their_handles():
    """Both verifiers answer on the one topic of the device, which tells its sessions apart by their handles."""
    first = say(verifier(), opening(0x100))[0].handle
    second = say(Verifier("w", Limited(), scheduler=Scheduler(), bounds=Bounds()), opening(0x201))[0].handle
    assert first != second


def test_handles_of_one_device_differ_even_where_its_session_ids_end_alike():
    at = verifier(sessions_per_device=8)
    handles = [say(at, opening(0x7F + (i << 16)))[0].handle for i in range(8)]
    assert len(set(handles)) == 8


# -- bad data ---------------------------------------------------------------------------------------------------------


def test_bytes_that_are_no_message_are_counted_and_stop_nothing():
    at = verifier()
    say(at, opening())
    for topic in ("outrider/v1/t.board/draft/v", "outrider/v1/t.board/open/x", "nonsense", "outrider/v1/t.board/state"):
        for payload in (b"", b"\x00", b"\x01", b"\x09\x90", b"\x92\xc1", b"\xff" * 100, b"\x91" * 3000):
            at.receive(topic, payload, 0.1)
    assert answers(at) == []
    assert at.tally.errors[ErrorCode.BAD_MESSAGE] == 28
    assert step(at, 0.2)


def test_an_open_that_cannot_be_read_is_answered_where_its_session_is_known():
    """An unknown sampling parameter: the device learns its name."""
    at = verifier()
    payload = encode(opening(0xABCD, epoch=6, sampling=Sampling(temperature=0.5, top_p=0.5))).replace(
        b"top_p", b"min_p"
    )
    at.receive(topics.open_topic(DEVICE, TARGET), payload, 0.0)
    (answer,) = answers(at)
    assert (answer.code, answer.session, answer.epoch) == (ErrorCode.BAD_OPEN, 0xABCD, 6)
    assert "min_p" in answer.what


@pytest.mark.parametrize(
    "message",
    [
        Opened(1, 0, "v", 0, 4, verifier().limits),
        Error(1, 0, "no-room"),
        DeviceState("online"),
        VerifierState("v", "gone"),
    ],
)
def test_a_message_that_is_not_a_devices_to_send_is_counted(message):
    at = verifier()
    say(at, opening())
    assert say(at, message) == []
    assert at.tally.errors[ErrorCode.BAD_MESSAGE] == 1 and at.num_sessions == 1


def bad_drafts(opened: Opened) -> dict[str, Draft | Resync]:
    handle, hash = opened.handle, hash_of(PROMPT)
    return {
        "vocabulary": Draft(handle, 0, 1, 4, hash, Ids((VOCAB,))),
        "rows": Draft(handle, 0, 1, 4, hash, Ids([1] * 200)),
        "prompt": Draft(handle, 0, 1, 2, hash, Ids((1,))),
        "future": Draft(handle, 0, 1, 40, hash, Ids((1,))),
        "tree": Draft(handle, 0, 1, 4, hash, Ids((1, 2)), 0, Ids((1, 7))),
        "other text": Resync(handle, 0, 4, hash ^ 1, True),
        "longer text": Resync(handle, 0, 9, hash, True),
    }


@pytest.mark.parametrize("kind", sorted(bad_drafts(Opened(1, 0, "v", 0, 4, verifier().limits))))
def test_bad_data_quarantines_one_session_and_leaves_the_others(kind):
    at = verifier()
    (bad,) = say(at, opening(1))
    say(at, opening(2))
    say(at, opening(3), device="t.other")
    (answer,) = say(at, bad_drafts(bad)[kind])
    assert isinstance(answer, Error) and answer.session == 1
    assert answer.code in (ErrorCode.BAD_MESSAGE, ErrorCode.DIVERGED)
    assert at.num_sessions == len(at.engine.sessions) == 2
    assert len(step(at, 0.1)) == 2


# -- repair -----------------------------------------------------------------------------------------------------------


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


def test_a_lost_opened_is_said_again():
    """> open, < opened (lost), ... < opened, < what there is"""
    at = verifier(repair_s=1.5)
    say(at, opening(patience_ms=None))
    said = run_until(at, 0.0, 1.6)
    assert isinstance(said[0], Opened) and isinstance(said[1], Commit) and list(said[1].ids) == []


def test_a_lost_last_commit_is_said_again_until_the_device_has_it():
    """< last commit (lost), ... < all since what the device has, > resync, silence, > close"""
    at = verifier(repair_s=1.5)
    (opened,) = say(at, opening(max_tokens=3))
    say(at, resync(opened, PROMPT))
    drawn = text_of(run_until(at, 0.0, 1.0))
    assert len(drawn) == 3
    again = run_until(at, 1.0, 4.0)
    assert [(message.base, list(message.ids), message.finish) for message in again] == [(4, drawn, "length")] * 2
    say(at, resync(opened, [*PROMPT, *drawn]), 4.0)
    assert run_until(at, 4.0, 20.0) == []
    say(at, Close(1, 0), 20.0)
    assert at.num_sessions == 0


def test_a_complete_text_frees_the_engine_and_can_still_be_asked_for():
    at = verifier()
    (opened,) = say(at, opening(max_tokens=3))
    drawn = text_of(run_until(at, 0.0, 1.0))
    assert at.engine.sessions == {} and at.num_sessions == 1
    (again,) = say(at, resync(opened, [*PROMPT, drawn[0]], ask=True), 1.0)
    assert (again.base, list(again.ids), again.finish) == (5, drawn[1:], "length")


def test_a_late_word_of_the_device_takes_nothing_back():
    at = verifier(ahead=5)
    (opened,) = say(at, opening(max_tokens=40))
    drawn = text_of(run_until(at, 0.0, 1.0))
    say(at, resync(opened, [*PROMPT, *drawn]), 1.0)
    say(at, resync(opened, [*PROMPT, *drawn[:1]]), 1.0)
    assert len(text_of(run_until(at, 1.0, 1.4))) == 5


def test_a_draft_whose_predecessor_is_lost_counts_once_the_text_has_come_so_far():
    """> draft 1 2 (lost), > draft 3 behind them, < 1 2 by itself: 3 is a guess"""
    at = verifier()
    (opened,) = say(at, opening())
    right = plain_decode(PROMPT, Sampling(), 3)
    before = [*PROMPT, *right[:2]]
    say(at, Draft(opened.handle, 0, 2, 6, hash_of(before), Ids(right[2:]), 2))
    commits = [message for message in run_until(at, 0.0, 0.05) if isinstance(message, Commit)]
    assert [len(message.ids) for message in commits[:3]] == [1, 1, 2] and commits[1].held == 1


def test_a_device_that_has_everything_is_left_in_peace():
    at = verifier()
    (opened,) = say(at, opening(patience_ms=None))
    say(at, resync(opened, PROMPT))
    assert run_until(at, 0.0, 50.0) == []


def test_a_silent_device_is_forgotten_and_its_memory_freed():
    at = verifier(idle_s=30.0)
    (opened,) = say(at, opening(patience_ms=None))
    say(at, resync(opened, PROMPT), 10.0)
    run_until(at, 10.0, 39.9)
    assert at.num_sessions == 1
    run_until(at, 39.9, 40.1)
    assert at.num_sessions == 0 and at.engine.sessions == {}
    assert at.wake_at(41.0) == inf
    assert say(at, resync(opened, PROMPT), 42.0)[0].code == ErrorCode.UNKNOWN_SESSION


def test_it_runs_no_further_ahead_than_it_said():
    at = verifier(ahead=5)
    (opened,) = say(at, opening(max_tokens=40))
    drawn = text_of(message for message in run_until(at, 0.0, 1.0))
    assert len(drawn) == 5
    say(at, resync(opened, [*PROMPT, *drawn[:3]]), 1.0)
    assert len(text_of(run_until(at, 1.0, 1.4))) == 3


def test_an_engine_failure_of_one_session_moves_that_one_on():
    engine = Limited()
    at = verifier(engine)
    say(at, opening(1))
    say(at, opening(2))
    engine.failing = {1}
    said = step(at, 0.1)
    (failed,) = [message for message in said if isinstance(message, Error)]
    assert (failed.session, failed.code) == (1, ErrorCode.ENGINE) and "not a number" in failed.what
    assert at.num_sessions == len(engine.sessions) == 1
    said += run_until(at, 0.2, 1.0)
    assert text_of(said) == plain_decode(PROMPT, Sampling(), 12)


def test_a_lost_cache_is_read_again_and_the_text_is_the_same():
    engine = Limited()
    at = verifier(engine, ahead=64)
    say(at, opening(max_tokens=20))
    said = step(at, 0.1) + step(at, 0.2)
    engine.evicting = {1}
    said += step(at, 0.3)
    assert engine.pending(1) > 1
    said += run_until(at, 0.4, 1.4)
    assert text_of(said) == plain_decode(PROMPT, Sampling(), 20)


def test_wake_at_is_never_later_than_the_next_thing_to_do():
    """Random sessions and events: between now and wake_at, neither `tick` nor `plan` has anything to do."""
    rng = random.Random(5)
    for _ in range(60):
        engine = Limited()
        at = verifier(engine, sessions=6, repair_s=1.5, idle_s=8.0, ahead=rng.choice([2, 64]))
        sessions: dict[int, Opened] = {}
        now = 0.0
        for turn in range(40):
            action = rng.random()
            if action < 0.25:
                patience = rng.choice([0, 300, None])
                said = say(at, opening(turn + 1, patience_ms=patience, max_tokens=rng.choice([1, 5, 40])), now)
                sessions.update({m.session: m for m in said if isinstance(m, Opened)})
            elif action < 0.6 and sessions:
                opened = rng.choice(list(sessions.values()))
                ledger = at._by_session.get((DEVICE, opened.session))
                if ledger is not None:
                    text = ledger.text[: rng.randint(ledger.device_has, ledger.frontier)]
                    if rng.random() < 0.5:
                        say(at, resync(opened, text, ask=rng.random() < 0.5), now)
                    else:
                        hash = hash_of(text, session=opened.session)
                        guess = Ids(rng.randrange(VOCAB) for _ in range(3))
                        say(at, Draft(opened.handle, 0, turn, len(text), hash, guess), now)
            elif action < 0.65:
                engine.evicting = {rng.randint(1, 6)}
            at.tick(now)
            plan = at.plan(now)
            if plan.work:
                at.settle(engine.step(plan), now)
                now += 0.01
            answers(at)
            wake_at = at.wake_at(now)
            if wake_at > now:
                before = min(wake_at, now + 20.0) - 1e-6
                at.tick(before)
                assert answers(at) == []
                assert not at.plan(before).work, f"work at {before}, but it wanted to sleep until {wake_at}"
                if rng.random() < 0.4:
                    now = before + 2e-6
                    if wake_at < now + 20.0:
                        count = at.num_sessions
                        at.tick(now)
                        due = bool(answers(at)) or at.num_sessions < count or bool(at.plan(now).work)
                        assert due, f"it woke at {now} for nothing"


# -- a storm ----------------------------------------------------------------------------------------------------------


def test_20_000_mutated_payloads_stop_nothing_beside_a_good_session():
    """Mutations of every message, on every topic, from the good device's neighbours and from itself."""
    rng = random.Random(11)
    at = verifier(ToyEngine(), sessions=16, sessions_per_device=4, idle_s=1e6)
    now = 0.0
    good: list[bytes] = []
    run = SessionRun(
        Window("t.good", Request(99, TARGET, PROMPT, Sampling(), 200), timing=Timing(), now=0.0),
        ToyDrafter(lambda position: position % 5 == 0),
        ChainPolicy(),
        publish=lambda send: (good.append(encode(send.message)), at.receive(send.topic, good[-1], now)),
        listener=Listener(),
        clock=lambda: now,
    )
    originals = [
        encode(message)
        for message in (
            opening(7),
            opening(7, epoch=1, ids=Ids((*PROMPT, 1)), stop_ids=(2,), patience_ms=None, prefix=(3, 4)),
            Opened(7, 0, "v", 0, 4, at.limits),
            Draft(7, 0, 1, 4, hash_of(PROMPT, session=7), Ids((1, 2, 3)), 0, Ids((1, 1, 2))),
            Draft(7, 0, 1, 5, 0, Ids((1, 2, 3)), 1),
            Commit(7, 0, 4, 5, Ids((1,)), 1, 2, "stop", 3, 4),
            Resync(7, 0, 4, hash_of(PROMPT, session=7), True, True),
            Close(7, 0, "why"),
            Error(7, 0, "no-room", "why", 1, 2),
            DeviceState("online"),
            VerifierState("v", "up", limits=at.limits),
        )
    ]
    run.begin()
    sent = 0
    while sent < 20_000 or not run.window.done:
        for _ in range(200 if sent < 20_000 else 0):
            payload = mutated(rng.choice(originals if rng.random() < 0.7 else good), rng)
            device = rng.choice(["t.evil", "t.worse", "u.good"])
            topic = rng.choice(
                [
                    topics.open_topic(device, TARGET),
                    topics.open_topic(device, "v"),
                    topics.draft_topic(device, "v"),
                    topics.verdict_topic(device),
                    topics.device_state_topic(device),
                    topics.verifier_state_topic("v"),
                    "outrider/v1/" + device,
                    "$SYS/broker",
                ]
            )
            at.receive(topic, payload, now)
            sent += 1
        at.tick(now)
        plan = at.plan(now)
        if plan.work:
            at.settle(at.engine.step(plan), now)
        for send in at.take():
            encode(send.message)
            if send.topic == topics.verdict_topic("t.good"):
                run.receive(send.message)
        now += 0.01
        if not run.window.done:
            run.turn()
        assert now < 500
    assert run.window.committed == plain_decode(PROMPT, Sampling(), 200)
    assert run.window.epoch == 0, "the good session was disturbed"
    assert sum(at.tally.errors.values()) > 5_000


class Listener:
    def verified(self, ids) -> None:
        pass

    def ended(self) -> None:
        pass


def mutated(payload: bytes, rng: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] = rng.randrange(256)
            case 1 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 4)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            case _:
                data[at:at] = data[: rng.randint(0, 6)]
    return bytes(data)
