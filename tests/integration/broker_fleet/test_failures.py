"""Verifiers, brokers, links and boards die, hang or come late: the text is the target's all the same."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from cloud.engines.base import Outcome, Plan
from protocol import topics
from protocol.messages import VerifierState, encode
from tests.boards import PROMPT, SAMPLED, make_board, make_request
from tests.integration.broker_fleet.conftest import LIMIT_S, RTT_S, Fleet, process, read, wait_for
from tests.toys import TARGET, plain_decode
from tools.broker import Broker
from tools.wan import WanThread

pytestmark = pytest.mark.usefixtures("broker_kinds")


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
