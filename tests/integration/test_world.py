"""Both pure cores against each other on a virtual clock: whatever the network does, the text is the target's."""

from __future__ import annotations

from math import inf

import pytest

from edge.auto import AutoPolicy
from edge.calibration import Calibration
from edge.policy import ChainPolicy, NoDraftPolicy, SyncPolicy, TreePolicy
from protocol.messages import Close, Commit, Draft, Open, Opened
from protocol.sampling import Sampling
from tests.simulation import World
from tests.toys import STOP, ToyDrafter, plain_decode

SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7)]
PATIENCES = [0.0, 0.15, inf]
PROMPT = list(range(3, 25))


def drafter(kind: str) -> ToyDrafter:
    return ToyDrafter({"good": lambda p: p % 7 == 3, "bad": lambda p: p % 3 != 0, "adversarial": lambda p: True}[kind])


def policy(kind: str):
    if kind == "auto":
        return AutoPolicy(Calibration())
    return {"chain": ChainPolicy(), "tree": TreePolicy(), "sync": SyncPolicy()}[kind]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("patience_s", PATIENCES)
@pytest.mark.parametrize("quality", ["good", "bad", "adversarial"])
@pytest.mark.parametrize("shape", ["auto", "chain", "tree", "sync"])
def test_text_is_the_targets(sampling, patience_s, quality, shape):
    world = World()
    world.verifier("v1")
    board = world.board(
        1, PROMPT, sampling=sampling, patience_s=patience_s, drafter=drafter(quality), policy=policy(shape)
    )
    world.run(lambda: board.done)
    assert board.text == plain_decode(PROMPT, sampling, 40)
    assert board.run.window.finish == "length"


def test_good_drafts_save_steps_and_time():
    def play(**options):
        world = World()
        world.verifier("v1")
        board = world.board(1, PROMPT, max_tokens=80, **options)
        world.run(lambda: board.done)
        return world.now, board.run.window.tally

    plain_s, plain = play(policy=NoDraftPolicy())
    learned = Calibration()
    play(drafter=drafter("good"), policy=AutoPolicy(learned))  # the toy is never sure of a guess: verdicts tell
    quick_s, quick = play(drafter=drafter("good"), policy=AutoPolicy(learned))
    assert plain.commits == 80
    assert quick.commits < 0.75 * plain.commits and quick_s < 0.75 * plain_s
    assert quick.guessed > 40


def test_stop_id_ends_the_text():
    world = World()
    world.verifier("v1")
    sampling = Sampling(temperature=1.5, seed=3)
    board = world.board(1, PROMPT, sampling=sampling, max_tokens=300, stop_ids=(STOP, 5))
    world.run(lambda: board.done)
    assert board.text == plain_decode(PROMPT, sampling, 300, (STOP, 5))
    assert board.run.window.finish == "stop" and len(board.text) < 300


@pytest.mark.parametrize("patience_s", PATIENCES)
@pytest.mark.parametrize("shape", ["auto", "chain", "tree"])
def test_any_single_message_may_be_lost(patience_s, shape):
    """Open, opened, each draft, each commit, the last one too: drop the n-th message, for every n."""

    def play(lost: int) -> World:
        world = World(fault=lambda topic, message, count: () if count == lost else (0.0,))
        world.verifier("v1")
        board = world.board(
            1, PROMPT[:6], max_tokens=16, patience_s=patience_s, drafter=drafter("good"), policy=policy(shape)
        )
        world.run(lambda: board.done and not world.verifiers["v1"].num_sessions, limit_s=120)
        assert board.text == expected
        return world

    expected = plain_decode(PROMPT[:6], Sampling(), 16)
    undisturbed = play(-1)
    for lost in range(len(undisturbed.sent)):
        # A lost close is only noticed by the verifier's idle timer.
        play(lost)


@pytest.mark.parametrize("kind", [Draft, Commit, Opened, Open, Close])
@pytest.mark.parametrize("patience_s", [0.0, inf])
def test_doubled_messages(kind, patience_s):
    world = World(fault=lambda topic, message, count: (0.0, 0.03) if isinstance(message, kind) else (0.0,))
    world.verifier("v1")
    board = world.board(1, PROMPT, patience_s=patience_s, drafter=drafter("good"))
    world.run(lambda: board.done)
    assert board.text == plain_decode(PROMPT, Sampling(), 40)


@pytest.mark.parametrize("kind", [Draft, Commit])
@pytest.mark.parametrize("patience_s", [0.0, inf])
def test_late_and_reordered_messages(kind, patience_s):
    def fault(topic, message, count):
        return (0.25 * (count % 3 == 1),) if isinstance(message, kind) else (0.0,)

    world = World(fault=fault)
    world.verifier("v1")
    board = world.board(1, PROMPT, patience_s=patience_s, drafter=drafter("good"))
    world.run(lambda: board.done)
    assert board.text == plain_decode(PROMPT, Sampling(), 40)


@pytest.mark.parametrize("patience_s", [0.0, inf])
def test_a_very_bad_link(patience_s):
    """One message in five lost, one in ten doubled, all of them late by up to 200 ms."""

    def fault(topic, message, count):
        mixed = (count * 2654435761) % 1000
        if mixed < 200:
            return ()
        late = (mixed % 200) / 1000
        return (late, late + 0.1) if mixed > 900 else (late,)

    for seed in range(4):
        world = World(fault=fault)
        world.verifier("v1")
        sampling = Sampling(temperature=0.8, top_p=0.95, seed=seed)
        board = world.board(
            seed + 1, PROMPT, sampling=sampling, patience_s=patience_s, drafter=drafter("good"), policy=TreePolicy()
        )
        world.run(lambda board=board: board.done)
        assert board.text == plain_decode(PROMPT, sampling, 40)


@pytest.mark.parametrize("announced", [True, False], ids=["last will", "silent"])
def test_a_verifier_dies_and_another_takes_over(announced):
    expected = plain_decode(PROMPT, Sampling(), 60)
    world = World()
    world.verifier("v1")
    board = world.board(1, PROMPT, max_tokens=60, drafter=drafter("good"))
    world.run(lambda: len(board.text) > 20)
    world.verifier("v2")
    if announced:
        world.kill("v1")
    else:
        world.verifiers.pop("v1").stopped = True
    world.run(lambda: board.done)
    assert board.text == expected
    assert board.run.window.epoch >= 1 and board.run.window.verifier == "v2"


def test_a_board_dies_and_goes_on_from_what_it_has():
    expected = plain_decode(PROMPT, SAMPLINGS[1], 60)
    world = World()
    world.verifier("v1")
    board = world.board(1, PROMPT, sampling=SAMPLINGS[1], max_tokens=60, drafter=drafter("good"))
    world.run(lambda: len(board.text) > 20)
    board.stopped = True
    steps = board.run.window.tally.commits
    again = world.board(
        1, PROMPT, sampling=SAMPLINGS[1], max_tokens=60, drafter=drafter("good"), committed=board.text, epoch=1
    )
    world.run(lambda: again.done)
    assert again.text == expected
    whole = World()
    whole.verifier("v1")
    one = whole.board(1, PROMPT, sampling=SAMPLINGS[1], max_tokens=60, drafter=drafter("good"))
    whole.run(lambda: one.done)
    assert steps + again.run.window.tally.commits <= 1.1 * one.run.window.tally.commits + 2


def test_two_verifiers_that_both_believe_they_own_a_session():
    """The open reaches both: the device listens to the first that answers, and sends the other away."""
    world = World()
    world.verifier("v1")
    second = world.verifier("v2")
    first_deliver = world._deliver

    def deliver(topic, payload):
        first_deliver(topic, payload)
        if "/open/" in topic:
            world.verifiers["v1"].receive_payload(topic, payload)
            second.receive_payload(topic, payload)

    world._deliver = deliver
    board = world.board(1, PROMPT, drafter=drafter("good"))
    world.run(lambda: board.done)
    assert board.text == plain_decode(PROMPT, Sampling(), 40)
    world.run(lambda: second.num_sessions == 0 and world.verifiers["v1"].num_sessions == 0)


def test_sixteen_sessions_of_unequal_length_share_a_verifier():
    world = World()
    world.verifier("v1", rows=24)
    boards = []
    for i in range(16):
        prompt = [(7 * i + j) % 60 + 1 for j in range(1 + 5 * i)]
        sampling = SAMPLINGS[i % 2]
        shape = policy(["chain", "tree"][i % 2])
        boards.append(
            world.board(i + 1, prompt, sampling=sampling, drafter=drafter("good"), policy=shape, max_tokens=10 + 3 * i)
        )
    world.run(lambda: all(board.done for board in boards))
    for i, board in enumerate(boards):
        request = board.run.window.request
        assert board.text == plain_decode(request.prompt, request.sampling, 10 + 3 * i)


def test_a_drafter_whose_context_is_full_does_not_stall_a_patient_verifier():
    world = World()
    world.verifier("v1")
    board = world.board(1, PROMPT, patience_s=inf, drafter=ToyDrafter(context=len(PROMPT) + 12), max_tokens=60)
    world.run(lambda: board.done)
    assert board.text == plain_decode(PROMPT, Sampling(), 60)
