"""The next turn of a conversation: opened where the KV is, and only what is new is sent."""

from __future__ import annotations

from edge.session import Request
from edge.turns import LEAST, MOST, Turns
from edge.window import Window
from protocol import topics
from protocol.messages import Commit, Error, ErrorCode, Opened
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from tests.edge.windows import LIMITS, TIMING

PROMPT = tuple(range(1, 31))
ANSWER = (50, 51, 52)


def written(session: int, verifier: str, prompt=PROMPT, answer=ANSWER, *, target: str = "t") -> Window:
    """A window whose text is complete, if there is an answer."""
    request = Request(session, target, tuple(prompt), Sampling(), 50)
    window = Window("a.b", request, timing=TIMING, now=0.0)
    window.tick(0.0)
    window.receive(Opened(session, 0, verifier, 1, len(prompt), LIMITS), 0.0)
    if answer:
        hash = prefix_hashes(owner_hash(session, verifier, 0), prompt)[-1]
        window.receive(Commit(1, 0, len(prompt), hash, Ids(answer), finish="stop"), 0.1)
        assert window.finish
    return window


def test_the_text_with_most_in_common_is_gone_on_from():
    turns = Turns()
    turns.ended(written(1, "v1"))
    turns.ended(written(2, "v2", prompt=PROMPT[:20]))
    turns.ended(written(3, "v3", target="other"))
    former = turns.former("t", (*PROMPT, *ANSWER, 60, 61))
    assert (former.verifier, former.prefix) == ("v1", (1, 33))
    assert turns.former("t", (*PROMPT, 99)).prefix == (1, 30), "an edited turn has less in common"
    assert turns.former("t", (*PROMPT[: LEAST - 1], 99)) is None


def test_texts_that_are_of_no_use_any_more_are_forgotten():
    turns = Turns()
    turns.ended(written(1, "v1", answer=()))
    assert turns.former("t", PROMPT) is None, "not complete, so not held under that id"
    turns.ended(written(2, "v2"))
    turns.forget("v2")
    assert turns.former("t", PROMPT) is None
    for session in range(MOST + 1):
        turns.ended(written(session, f"v{session}", prompt=range(session * 40, session * 40 + 30)))
    assert turns.former("t", tuple(range(30))) is None
    assert turns.former("t", tuple(range(40, 70))).verifier == "v1"


def next_turn() -> Window:
    request = Request(9, "t", (*PROMPT, *ANSWER, 60, 61), Sampling(), 50)
    window = Window("a.b", request, timing=TIMING, now=0.0, former="v1", prefix=(1, 33))
    window.tick(0.0)
    return window


def test_only_what_is_new_is_sent_to_the_verifier_that_has_the_rest():
    (send,) = next_turn().take()
    assert send.topic == topics.open_topic("a.b", "v1")
    assert (send.message.prefix, list(send.message.ids), send.message.prompt_len) == ((1, 33), [60, 61], 35)


def test_a_verifier_that_has_forgotten_the_text_costs_a_round_trip():
    """> open to v1 with a prefix, < unknown-prefix, > open to the target with the whole text."""
    window = next_turn()
    window.take()
    window.receive(Error(9, 0, ErrorCode.UNKNOWN_PREFIX, "", 0), 0.05)
    window.tick(0.05)
    (send,) = window.take()
    assert send.topic == topics.open_topic("a.b", "t") and send.message.epoch == 1
    assert send.message.prefix is None and len(send.message.ids) == 35


def test_a_verifier_that_is_gone_is_not_waited_for():
    """> open to v1 with a prefix; the broker: nobody subscribes. > open to the target with the whole text."""
    window = next_turn()
    window.take()
    window.unserved(0.05)
    window.tick(0.05)
    (send,) = window.take()
    assert send.message.prefix is None and len(send.message.ids) == 35
