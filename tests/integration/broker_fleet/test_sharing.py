"""Boards share verifiers, and verifiers boards: every text is the target's."""

from __future__ import annotations

import pytest

from edge.policy import NoDraftPolicy
from link.mqtt import MqttLink
from protocol import topics
from protocol.messages import DeviceState, VerifierState, decode
from protocol.sampling import Sampling
from tests.boards import PROMPT, SAMPLED, broker_at, make_request
from tests.integration.broker_fleet.conftest import read, wait_for
from tests.toys import TARGET, plain_decode

pytestmark = pytest.mark.usefixtures("broker_kinds")


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
