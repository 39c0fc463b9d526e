"""What is refused, ignored or wanted no more: who is told, and what it leaves alone."""

from __future__ import annotations

import random
import threading
import time

import httpx
import pytest

from edge.api import Api
from edge.config import ApiConfig
from edge.session import Request
from link.mqtt import MqttLink
from link.outbox import EXPIRED
from protocol import topics
from protocol.errors import SessionError
from protocol.messages import Close, Commit, Draft, Error, Open, Opened, Resync, VerifierState, encode
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.boards import PROMPT, SAMPLED, broker_at, make_request
from tests.integration.broker_fleet.conftest import LIMIT_S, read, wait_for
from tests.toys import TARGET, plain_decode
from tools.broker import free_port

pytestmark = pytest.mark.usefixtures("broker_kinds")


def test_a_prompt_that_cannot_be_served_is_refused_in_words(fleet):
    fleet.verifier("v-refuses")
    board = fleet.board("t.long")
    request = Request(1, TARGET, tuple([5] * 600), Sampling(), 10)
    with pytest.raises(SessionError, match="600 tokens does not fit the context of 512"):
        read(board.open(request))


def test_an_open_that_expired_on_its_way_out_is_no_refusal(fleet, caplog):
    """The session's own timer opens again; nothing says that nobody serves the target."""
    board = fleet.board("t.expired")
    stream = board.open(make_request(1, max_tokens=30))
    run = stream.run
    run.link_down("the network has gone")
    board._on_puback(topics.open_topic("t.expired", TARGET), EXPIRED)
    assert run.window.problem == "the network has gone" and "refused" not in caplog.text
    run.cancel()


def test_garbage_on_all_topics_disturbs_nothing(fleet):
    """Another client says nonsense, and half-right nonsense, to the board and the verifier as fast as it can."""
    gateway = fleet.verifier("v-target", step_s=0.006)
    board = fleet.board("t.target")
    evil = MqttLink(broker_at(fleet.broker.port), "evil", on_message=lambda topic, payload: None).start()
    fleet.stack.callback(evil.close)
    evil.wait_up(LIMIT_S)
    stream = board.open(make_request(1, max_tokens=200))
    begun = read(stream, 5)
    window, rng, sent = stream.run.window, random.Random(1), 0
    handle = window._handle
    payloads = [
        encode(message)
        for message in (
            Opened(1, 0, "v-false", 3, 17, gateway.verifier.limits),
            Opened(1, 9, "v-false", handle, 17, gateway.verifier.limits),
            Commit(handle, 0, len(PROMPT), 5, Ids((1, 2, 3)), finish="stop"),
            Commit(handle, 0, 90, 5, Ids((1, 2, 3)), finish="stop"),
            Commit(handle, 1, len(PROMPT), 5, Ids((1,))),
            Error(2, 0, "bad-open"),
            Error(1, 7, "bad-open"),
            VerifierState("v-other", "gone"),
            Close(9, 0),
            Draft(handle, 0, 1, 17, 1, Ids((1, 2))),
            Resync(handle, 0, 17, 1, True),
            Open(5, 0, TARGET, 1, Ids((99,)), Sampling(), 5),
        )
    ]
    names = ["t.evil", "t.target2"]
    while not window.done and sent < 20_000:
        payload = rng.choice([rng.choice(payloads), rng.randbytes(rng.randint(0, 60))])
        device = rng.choice(names)
        topic = rng.choice(
            [
                topics.verdict_topic("t.target"),
                topics.draft_topic(device, "v-target"),
                topics.open_topic(device, "v-target"),
                topics.open_topic(device, TARGET),
                topics.verifier_state_topic("v-other"),
            ]
        )
        evil.publish(topic, payload)
        sent += 1
        if sent % 20 == 0:
            time.sleep(0.01)
    assert begun + read(stream) == plain_decode(PROMPT, SAMPLED, 200)
    assert window.epoch == 0 and sent > 500
    assert sum(gateway.verifier.tally.errors.values()) > 100
    assert sum(window.tally.ignored.values()) > 20


def test_a_board_that_closes_ends_its_streams_and_can_go_on_later(fleet):
    gateway = fleet.verifier("v-waits", step_s=0.006)
    board = fleet.board("t.closes")
    stream = board.open(make_request(1, max_tokens=200))
    begun = read(stream, 20)
    threading.Timer(0.1, board.close).start()
    with pytest.raises(SessionError, match="journal"):
        while True:
            begun += read(stream, 1)
    again = fleet.board("t.closes")
    (entry,) = again.journal.unfinished()
    assert entry.committed == begun
    assert begun + read(again.resume(entry)) == plain_decode(PROMPT, SAMPLED, 200)
    assert gateway.verifier.tally.committed <= 1.1 * 200 + 2


def test_a_cancelled_stream_ends_and_frees_the_verifier(fleet):
    gateway = fleet.verifier("v-freed", step_s=0.006)
    board = fleet.board("t.cancels")
    stream = board.open(make_request(1, max_tokens=500))
    read(stream, 10)
    stream.run.cancel()
    assert not board.journal.unfinished(), "after a restart nobody waits for it either"
    with pytest.raises(SessionError, match="cancelled"):
        read(stream)
    wait_for(lambda: gateway.verifier.num_sessions == 0)
    assert gateway.verifier.engine.sessions == {}


class Letters:
    """A text of the toy's ids, a word each."""

    stop_ids = frozenset({0})

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return list(PROMPT)

    def stream(self) -> Letters:
        return self

    def push(self, ids: list[int]) -> str:
        return "".join(f"{id} " for id in ids)

    def flush(self) -> str:
        return ""


def test_an_application_that_hangs_up_wants_no_more_of_its_text(fleet):
    gateway = fleet.verifier("v-hears", step_s=0.006)
    board = fleet.board("t.hangs-up")
    api = Api(board, Letters(), ApiConfig(port=free_port()))
    api.start()
    try:
        body = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"http://{api.address}/v1/chat/completions", json=body, timeout=LIMIT_S) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert len([next(lines) for _ in range(5)]) == 5
        wait_for(lambda: gateway.verifier.num_sessions == 0)
        assert not board.journal.unfinished()
    finally:
        api.stop()
