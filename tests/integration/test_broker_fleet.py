"""Boards and verifiers at a real broker, over an emulated long link: whatever dies, the text is the target's."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from cloud.engines.base import Outcome, Plan
from cloud.gateway import Gateway
from edge.api import Api
from edge.board import Board, Stream
from edge.config import ApiConfig
from edge.policy import NoDraftPolicy
from edge.session import Request
from link.mqtt import MqttLink
from link.outbox import EXPIRED
from protocol import topics
from protocol.errors import SessionError
from protocol.messages import (
    Close,
    Commit,
    DeviceState,
    Draft,
    Error,
    Open,
    Opened,
    Resync,
    VerifierState,
    decode,
    encode,
)
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.boards import PROMPT, SAMPLED, broker_at, make_board, make_gateway, make_request
from tests.toys import TARGET, plain_decode
from tools.broker import Broker, available, free_port
from tools.wan import WanThread

ROOT = Path(__file__).parents[2]
RTT_S = 0.03
LIMIT_S = 20.0

pytestmark = pytest.mark.skipif(not available(), reason="no MQTT broker: install mosquitto, or `pip install iotcore`")


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker.start() as running:
        yield running


@pytest.fixture
def wan(broker: Broker) -> Iterator[WanThread]:
    with WanThread((broker.host, broker.port), rtt_s=RTT_S, jitter_s=0.005) as link:
        yield link


class Fleet:
    """What a test starts, ended with it."""

    def __init__(self, broker: Broker, wan: WanThread, folder: Path) -> None:
        self.broker, self.wan, self.folder = broker, wan, folder
        self.stack = ExitStack()

    def verifier(self, name: str, **options) -> Gateway:
        gateway = make_gateway(self.broker.port, name, **options)
        thread = threading.Thread(target=gateway.run, daemon=True)
        thread.start()
        gateway.link.wait_up(LIMIT_S)

        def end() -> None:
            gateway.stop()
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "the gateway's loop does not end"

        self.stack.callback(end)
        return gateway

    def board(self, name: str, **options) -> Board:
        board = make_board(self.wan.port, name, self.folder / name, **options).start()
        self.stack.callback(board.close)
        board.link.wait_up(LIMIT_S)
        return board


@pytest.fixture
def fleet(broker: Broker, wan: WanThread, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(broker, wan, tmp_path)
    with made.stack:
        yield made


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.boards", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def read(stream: Stream, least: int | None = None) -> list[int]:
    """At least so many ids, or all."""
    ids: list[int] = []
    watchdog = threading.Timer(LIMIT_S, stream.abandon, [TimeoutError(f"not finished within {LIMIT_S} s")])
    watchdog.start()
    try:
        while least is None or len(ids) < least:
            ids += next(stream)
    except StopIteration:
        pass
    finally:
        watchdog.cancel()
    return ids


def wait_for(what: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    until = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.005)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", ["auto", "tree"])
def test_the_text_is_the_targets(fleet, sampling, policy):
    fleet.verifier(f"v-{policy}-{sampling.greedy}")
    board = fleet.board(f"t.{policy}-{sampling.greedy}", policy=policy)
    stream = board.open(make_request(1, sampling=sampling))
    assert read(stream) == plain_decode(PROMPT, sampling, 100)
    window = stream.run.window
    assert window.finish == "length" and window.epoch == 0
    assert window.tally.guessed > 10, "drafts were of no use"
    (entry,) = board.journal.entries()
    assert entry.end == "length" and entry.committed == window.committed


def test_a_board_finds_the_target_that_the_broker_names(fleet):
    gateway = fleet.verifier("v-find")
    board = fleet.board("t.find")
    found = board.find_target(5.0)
    assert (found.verifier, found.target, found.limits) == ("v-find", TARGET, gateway.verifier.limits)


def test_two_verifiers_share_the_sessions(fleet):
    gateways = [fleet.verifier("v-share-1"), fleet.verifier("v-share-2")]
    streams = [fleet.board(f"t.share-{i}").open(make_request(i + 1, max_tokens=40)) for i in range(6)]
    for stream in streams:
        assert read(stream) == plain_decode(PROMPT, SAMPLED, 40)
    done = [gateway.verifier.tally.committed for gateway in gateways]
    # More than was asked for where a loaded machine let an open run into its timer, so that two took it.
    assert sum(done) >= 6 * 40 and min(done) >= 40
    wait_for(lambda: not any(gateway.verifier.num_sessions for gateway in gateways))


def test_several_boards_share_one_verifier(fleet):
    gateway = fleet.verifier("v-several")
    samplings = [Sampling(), *(Sampling(temperature=0.8, seed=seed) for seed in range(7))]
    streams = [
        fleet.board(f"t.several-{i}", policy=["auto", "chain", "tree"][i % 3]).open(
            make_request(i + 1, sampling=sampling, max_tokens=60, patience_s=[0.0, 0.02][i // 4])
        )
        for i, sampling in enumerate(samplings)
    ]
    for stream, sampling in zip(streams, samplings, strict=True):
        assert read(stream) == plain_decode(PROMPT, sampling, 60)
    tally = gateway.verifier.tally
    assert tally.committed == 8 * 60
    # A session in a step draws exactly one token that nobody had guessed, so alone each would take this many steps.
    alone = tally.committed - tally.guessed
    assert tally.steps < 0.8 * alone, "sessions do not share steps"
    assert not tally.errors


def test_a_second_session_of_a_board_streams_without_the_drafter(fleet):
    fleet.verifier("v-second", step_s=0.008)
    board = fleet.board("t.second")
    first = board.open(make_request(1, max_tokens=120))
    second = board.open(make_request(2, sampling=Sampling(), max_tokens=60))
    assert isinstance(second.run.policy, NoDraftPolicy) and second.run.drafter is None
    assert read(second) == plain_decode(PROMPT, Sampling(), 60)
    assert second.run.window.tally.drafts == 0 and first.run.window.tally.drafts > 0
    assert read(first) == plain_decode(PROMPT, SAMPLED, 120)
    wait_for(lambda: not board._runs)
    third = board.open(make_request(3, max_tokens=10))
    assert third.run.drafter is not None
    assert read(third) == plain_decode(PROMPT, SAMPLED, 10)


def test_two_sessions_of_a_board_at_two_verifiers(fleet):
    gateways = [fleet.verifier("v-apart-1"), fleet.verifier("v-apart-2")]
    board = fleet.board("t.apart")
    streams = [board.open(make_request(0x7F00 + i, max_tokens=50 + 20 * i)) for i in range(4)]
    for i, stream in enumerate(streams):
        assert read(stream) == plain_decode(PROMPT, SAMPLED, 50 + 20 * i)
        assert stream.run.window.epoch == 0
    assert all(gateway.verifier.tally.committed for gateway in gateways)


def test_a_verifier_that_stops_sends_its_sessions_to_another(fleet):
    first = fleet.verifier("v-stops", step_s=0.008)
    stream = fleet.board("t.moves").open(make_request(1, max_tokens=150))
    begun = read(stream, 20)
    second = fleet.verifier("v-takes-over", step_s=0.008)
    first.stop()
    assert begun + read(stream) == plain_decode(PROMPT, SAMPLED, 150)
    window = stream.run.window
    assert window.epoch == 1 and second.verifier.tally.committed > 0
    assert first.verifier.tally.committed + second.verifier.tally.committed <= 1.1 * 150 + 2


def test_a_verifier_that_is_shot_is_replaced(fleet):
    """Its will tells; the other goes on from what the board has."""
    with process("serve", "--port", str(fleet.broker.port), "--name", "v-shot") as victim:
        assert json.loads(victim.stdout.readline()) == {"serving": "v-shot"}
        board = fleet.board("t.witness")
        assert board.find_target(LIMIT_S).verifier == "v-shot"
        stream = board.open(make_request(1, max_tokens=400))
        begun = read(stream, 20)
        second = fleet.verifier("v-avenger")
        victim.send_signal(signal.SIGKILL)
        begun += read(stream)
    assert begun == plain_decode(PROMPT, SAMPLED, 400)
    assert stream.run.window.epoch >= 1 and second.verifier.tally.committed > 0


def test_the_owners_of_all_sessions_of_a_board_are_watched(fleet):
    """Not only that of the latest: the will is the quickest news, and here the only one."""
    names = {"v-one", "v-two"}
    for name in names:
        fleet.verifier(name, step_s=0.01)
    board = fleet.board("t.several", policy="none")
    streams = [board.open(make_request(session, max_tokens=300)) for session in range(1, 7)]
    wait_for(lambda: {stream.run.window.verifier for stream in streams} == names)
    first = streams[0].run.window.verifier
    orphans = [stream for stream in streams if stream.run.window.verifier == first]
    board.link.publish(topics.verifier_state_topic(first), encode(VerifierState(first, "gone")))
    wait_for(lambda: all(stream.run.window.epoch == 1 for stream in orphans))
    for stream in streams:
        assert read(stream) == plain_decode(PROMPT, SAMPLED, 300)
        assert stream.run.window.epoch == (stream in orphans)


def test_a_verifier_that_hangs_is_left_for_another(fleet):
    """Its connection stays up, so that neither will nor goodbye tells: the silence does."""
    hung = fleet.verifier("v-hangs", step_s=0.008)
    stream = fleet.board("t.patient").open(make_request(1, max_tokens=150))
    begun = read(stream, 20)
    gate = threading.Event()
    fleet.stack.callback(gate.set)

    def hang(plan: Plan) -> Outcome:
        gate.wait(LIMIT_S)
        return Outcome()

    hung.verifier.engine.step = hang
    fleet.verifier("v-lives")
    assert begun + read(stream) == plain_decode(PROMPT, SAMPLED, 150)
    assert stream.run.window.epoch >= 1


def test_the_broker_dies_and_comes_back(tmp_path, caplog):
    """The board keeps trying, says so, and finishes; nobody has to start anything but the broker."""
    first = Broker.start()
    port = first.port
    with ExitStack() as stack:
        stack.callback(first.stop)
        fleet = Fleet(first, stack.enter_context(WanThread((first.host, port), rtt_s=RTT_S)), tmp_path)
        stack.enter_context(fleet.stack)
        fleet.verifier("v-survivor", step_s=0.008)
        stream = fleet.board("t.survivor").open(make_request(1, max_tokens=200))
        begun = read(stream, 20)
        first.kill()
        wait_for(lambda: "connection" in stream.run.window.problem)
        time.sleep(1.0)
        assert not stream.run.window.done
        assert any("connection" in record.getMessage() for record in caplog.records if record.name == "edge.board")
        stack.enter_context(Broker.start(port))
        assert begun + read(stream) == plain_decode(PROMPT, SAMPLED, 200)
        assert stream.run.window.problem == ""
        fleet.stack.close()


def test_the_link_freezes_and_thaws(fleet):
    fleet.verifier("v-thaw", step_s=0.008)
    stream = fleet.board("t.thaw").open(make_request(1, max_tokens=150))
    begun = read(stream, 20)
    fleet.wan.set_outage("freeze")
    time.sleep(0.8)
    fleet.wan.set_outage(None)
    assert begun + read(stream) == plain_decode(PROMPT, SAMPLED, 150)


def test_nobody_serves_the_target_until_somebody_does(fleet):
    board = fleet.board("t.early")
    stream = board.open(make_request(1, max_tokens=30))
    if fleet.broker.kind == "mosquitto":
        wait_for(lambda: stream.run.window.problem == f"no verifier serves {TARGET} at this broker")
    else:
        wait_for(lambda: TARGET in stream.run.window.problem)
    fleet.verifier("v-late")
    assert read(stream) == plain_decode(PROMPT, SAMPLED, 30)
    assert stream.run.window.problem == ""


def test_an_open_that_expired_on_its_way_out_is_no_refusal(fleet, caplog):
    """The session's own timer opens again; nothing says that nobody serves the target."""
    board = fleet.board("t.expired")
    stream = board.open(make_request(1, max_tokens=30))
    run = stream.run
    run.link_down("the network has gone")
    board._on_puback(topics.open_topic("t.expired", TARGET), EXPIRED)
    assert run.window.problem == "the network has gone" and "refused" not in caplog.text
    run.cancel()


def test_a_board_that_starts_before_its_broker(tmp_path):
    probe = Broker.start()
    port = probe.port
    probe.stop()
    with ExitStack() as stack:
        board = make_board(port, "t.first", tmp_path).start()
        stack.callback(board.close)
        stream = board.open(make_request(1, max_tokens=30))
        wait_for(lambda: "refused" in stream.run.window.problem)
        broker = stack.enter_context(Broker.start(port))
        with WanThread((broker.host, port)) as wan:
            fleet = Fleet(broker, wan, tmp_path)
            with fleet.stack:
                fleet.verifier("v-second")
                assert read(stream) == plain_decode(PROMPT, SAMPLED, 30)


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


def test_a_board_that_is_shot_goes_on_from_its_journal_in_a_new_process(fleet):
    """SIGKILL in mid-text: the same text in the end, and hardly a token drawn twice."""
    gateway = fleet.verifier("v-loyal", step_s=0.006)
    state = fleet.folder / "shot"
    arguments = ["chat", "--port", str(fleet.wan.port), "--name", "t.shot", "--state", str(state)]
    arguments += ["--session", "77", "--max-tokens", "400"]
    with process(*arguments) as first:
        begun: list[int] = []
        while len(begun) < 120:
            begun += json.loads(first.stdout.readline())
        os.kill(first.pid, signal.SIGKILL)
        begun += [id for line in first.stdout.read().splitlines() if line.endswith("]") for id in json.loads(line)]
        assert first.wait(LIMIT_S) == -signal.SIGKILL
    with process(*arguments) as second:
        rest = [id for line in second.stdout.read().splitlines() for id in json.loads(line)]
        assert second.wait(LIMIT_S) == 0
    expected = plain_decode(PROMPT, SAMPLED, 400)
    # What the journal had and the reader had not yet seen is not given again.
    assert expected[: len(begun)] == begun and rest and expected[-len(rest) :] == rest
    board = make_board(fleet.wan.port, "t.shot", state)
    (entry,) = board.journal.entries()
    assert entry.committed == expected and entry.end == "length" and entry.epoch == 1
    again = gateway.verifier.tally.committed - len(expected)
    assert again <= 0.1 * len(expected) + 2, f"{again} tokens were drawn twice"


def test_an_engine_that_fails_in_a_step_costs_time_and_no_text(fleet):
    """Every 25th step raises; the sessions are sent to open again, and do."""
    gateway = fleet.verifier("v-weak", step_s=0.002)
    whole_step, count = gateway.verifier.engine.step, 0

    def step(plan: Plan) -> Outcome:
        nonlocal count
        count += 1
        if count % 25 == 0:
            raise RuntimeError("the accelerator has left the bus")
        return whole_step(plan)

    gateway.verifier.engine.step = step
    streams = [fleet.board(f"t.weak-{i}").open(make_request(i + 1, max_tokens=60)) for i in range(2)]
    for stream in streams:
        assert read(stream) == plain_decode(PROMPT, SAMPLED, 60)
    assert gateway.verifier.tally.errors["engine"] >= 2


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


def test_a_prompt_that_cannot_be_served_is_refused_in_words(fleet):
    fleet.verifier("v-refuses")
    board = fleet.board("t.long")
    request = Request(1, TARGET, tuple([5] * 600), Sampling(), 10)
    with pytest.raises(SessionError, match="600 tokens does not fit the context of 512"):
        read(board.open(request))


def test_what_is_known_of_verifiers_and_boards_is_retained(fleet):
    """A client that comes later sees who serves and who drafts, and after a goodbye that they are gone."""
    gateway = fleet.verifier("v-seen")
    board = fleet.board("t.seen")
    seen: dict[str, DeviceState | VerifierState] = {}
    topics_seen = [topics.verifier_state_topic("v-seen"), topics.device_state_topic("t.seen")]
    late = MqttLink(
        broker_at(fleet.broker.port),
        "late",
        on_message=lambda topic, payload: seen.update({topic: decode(payload)}),
        subscriptions=[(topic, 0) for topic in topics_seen],
    ).start()
    fleet.stack.callback(late.close)
    wait_for(lambda: len(seen) == 2)
    assert [seen[topic].status for topic in topics_seen] == ["up", "online"]
    assert seen[topics_seen[0]].target == TARGET and seen[topics_seen[1]].tokenizer_digest == "1" * 64
    board.close()
    gateway.stop()
    wait_for(lambda: [seen[topic].status for topic in topics_seen] == ["gone", "offline"])
