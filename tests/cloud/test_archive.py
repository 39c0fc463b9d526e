"""The next turn of a conversation at its verifier: the text is put together, and what is held is not read again."""

from __future__ import annotations

from cloud.archive import Archive
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from protocol import topics
from protocol.messages import Close, Commit, Error, ErrorCode, Open, Opened, encode
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.toys import TARGET, ToyEngine, plain_decode

PROMPT = (3, 4, 5, 6)


def verifier() -> Verifier:
    return Verifier("v", ToyEngine(), scheduler=Scheduler(16, 8), bounds=Bounds())


def say(at: Verifier, message, device: str = "t.b") -> list:
    topic = topics.open_topic(device, "v") if isinstance(message, Open) else topics.draft_topic(device, "v")
    at.receive(topic, encode(message), 0.0)
    return [send.message for send in at.take()]


def finish(at: Verifier) -> list[int]:
    """What is drawn until nobody is due."""
    drawn: list[int] = []
    while (plan := at.plan(1.0)).work:
        at.settle(at.engine.step(plan), 1.0)
        drawn += [id for send in at.take() if isinstance(send.message, Commit) for id in send.message.ids]
    return drawn


def first_turn(at: Verifier) -> list[int]:
    say(at, Open(1, 0, TARGET, len(PROMPT), Ids(PROMPT), Sampling(), 6))
    drawn = finish(at)
    say(at, Close(1, 0))
    return [*PROMPT, *drawn]


def test_the_text_goes_on_as_if_all_of_it_had_been_sent():
    at = verifier()
    text = first_turn(at)
    (opened,) = say(at, Open(2, 0, TARGET, len(text) + 2, Ids((7, 8)), Sampling(), 5, (), 0, (1, len(text))))
    assert isinstance(opened, Opened) and opened.length == len(text) + 2
    assert finish(at) == plain_decode([*text, 7, 8], Sampling(), 5)


def test_a_part_of_the_text_will_do_and_more_than_there_is_will_not():
    at = verifier()
    text = first_turn(at)
    say(at, Open(2, 0, TARGET, 7, Ids((9,)), Sampling(), 5, (), 0, (1, 6)))
    assert finish(at) == plain_decode([*text[:6], 9], Sampling(), 5)
    (answer,) = say(at, Open(3, 0, TARGET, len(text) + 2, Ids((9,)), Sampling(), 5, (), 0, (1, len(text) + 1)))
    assert isinstance(answer, Error) and answer.code == ErrorCode.UNKNOWN_PREFIX


def test_nobody_goes_on_from_anothers_text():
    at = verifier()
    text = first_turn(at)
    message = Open(2, 0, TARGET, len(text) + 1, Ids((9,)), Sampling(), 5, (), 0, (1, len(text)))
    (answer,) = say(at, message, device="t.other")
    assert isinstance(answer, Error) and answer.code == ErrorCode.UNKNOWN_PREFIX and at.num_sessions == 0


def test_the_oldest_texts_give_way():
    at = verifier()
    at.archive = Archive(most_tokens=25)
    texts = []
    for session in (1, 2, 3):
        say(at, Open(session, 0, TARGET, len(PROMPT), Ids(PROMPT), Sampling(), 6))
        texts.append([*PROMPT, *finish(at)])
        say(at, Close(session, 0))
    asked = [Open(9, 0, TARGET, 11, Ids((1,)), Sampling(), 5, (), 0, (session, 10)) for session in (1, 2, 3)]
    assert [at.archive.whole("t.b", message) is not None for message in asked] == [False, True, True]
