"""All sessions of one verifier, message by message: bad data, repair, and a storm."""

from __future__ import annotations

import random
from math import inf

import pytest

from edge.policy import ChainPolicy
from edge.runtime import SessionRun
from edge.session import Request, Timing
from edge.window import Window
from protocol import topics
from protocol.messages import (
    MAX_COUNT,
    Close,
    Commit,
    DeviceState,
    Draft,
    Error,
    ErrorCode,
    Opened,
    Resync,
    VerifierState,
    decode,
    encode,
)
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.cloud.dialogue import (
    DEVICE,
    PROMPT,
    Limited,
    answers,
    hash_of,
    opening,
    resync,
    run_until,
    say,
    step,
    text_of,
    verifier,
)
from tests.toys import TARGET, VOCAB, ToyDrafter, ToyEngine, plain_decode

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


def test_a_step_longer_than_the_wire_can_tell_is_told_as_the_longest():
    """> open, a step of 20 s, < commit, > the same open again, < opened"""
    at = verifier()
    at.engine.step_s = 20.0
    say(at, opening())
    said = [*step(at, 0.0), *say(at, opening())]
    assert [decode(encode(message)) for message in said] == said
    assert {message.step_us for message in said if isinstance(message, Commit | Opened) and message.step_us} == {
        MAX_COUNT
    }


def test_a_late_draft_of_a_session_that_was_closed_harms_none_that_follows():
    """> open 5, > close 5, > open 133, > draft of 5"""
    at = verifier()
    (first,) = say(at, opening(5))
    late = Draft(first.handle, 0, 1, 9, 0, Ids((1,)), 1)
    say(at, Close(5, 0))
    (second,) = say(at, opening(5 + 128))
    answers = say(at, late)
    assert isinstance(second, Opened) and at.num_sessions == 1
    assert [(message.session, message.code) for message in answers] == [(0, ErrorCode.UNKNOWN_SESSION)]
