"""Everything at once on a virtual clock: loss, doubles, delay, outages, verifiers and boards that die. The text is the
target's, and every session ends.
"""

from __future__ import annotations

import random
from math import inf

import pytest

from edge.auto import AutoPolicy
from edge.calibration import Calibration
from edge.policy import ChainPolicy, NoDraftPolicy, Policy, SyncPolicy, TreePolicy
from protocol.messages import Limits, Resync
from protocol.sampling import Sampling
from tests.simulation import Board, World
from tests.toys import STOP, VOCAB, ToyDrafter, plain_decode

CHAOS_S = 30.0


class Chaos:
    """One random world; `rng` decides all."""

    def __init__(self, seed: int, *, calm: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.loss = 0.0 if calm else rng.choice([0.0, 0.05, 0.3])
        self.doubles = 0.0 if calm else rng.choice([0.0, 0.1])
        self.late_s = 0.0 if calm else rng.choice([0.0, 0.05, 0.4])
        self.calm = calm
        self.world = World(
            fault=self.fault, one_way_s=rng.choice([0.005, 0.04, 0.2]), pass_s=rng.choice([0.002, 0.02, 0.1])
        )
        self.num_verifiers = 0
        for _ in range(rng.randint(1, 3)):
            self.add_verifier()
        self.boards = [self.new_board(i + 1) for i in range(rng.randint(1, 4))]

    def fault(self, topic, message, count):
        if self.rng.random() < self.loss:
            return ()
        late = self.rng.random() * self.late_s
        return (late, late + self.rng.random() / 2) if self.rng.random() < self.doubles else (late,)

    def add_verifier(self) -> None:
        rng = self.rng
        rows, ahead = rng.choice([1, 4, 16, 48]), rng.choice([1, 2, 8, 64])
        self.num_verifiers += 1
        made = self.world.verifier(
            f"v{self.num_verifiers}",
            rows=64 if self.calm else rng.choice([4, 64]),
            draft_rows=rows,
            ahead=ahead,
            idle_s=20.0,
        )
        made.engine.takes_trees = rng.random() < 0.7
        made.engine.step_s = rng.choice([0.01, 0.06])
        made.limits = Limits(rows, ahead, 512, VOCAB, made.engine.takes_trees)

    def new_board(self, session: int) -> Board:
        rng = self.rng
        prompt = [rng.randint(1, VOCAB - 1) for _ in range(rng.randint(1, 30))]
        policy, patiences = rng.choice(
            [
                (ChainPolicy(), [0.0, 0.05, 0.5, inf]),
                (AutoPolicy(Calibration()), [0.0, 0.05, 0.5, inf]),
                (TreePolicy(), [0.0, 0.05, 0.5, inf]),
                (TreePolicy(rows=4, sibling_floor=0.02), [0.0, 0.5, inf]),
                (SyncPolicy(), [inf]),
                (NoDraftPolicy(), [0.0, 0.5]),
            ]
        )
        wrong = rng.choice([1, 3, 7, 1000])
        return self.world.board(
            session,
            prompt,
            sampling=rng.choice([Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=session)]),
            max_tokens=rng.choice([1, 2, 10, 60]),
            patience_s=rng.choice(patiences),
            policy=policy,
            drafter=ToyDrafter(lambda p: p % wrong == 0, context=rng.choice([512, len(prompt) + 20])),
            stop_ids=rng.choice([(), (STOP, 5)]),
        )

    def strike(self) -> None:
        rng, world = self.rng, self.world
        at = rng.randrange(len(self.boards))
        match rng.choice(["verifier dies", "verifier vanishes", "board dies", "outage", "peace"]):
            case "verifier dies":
                world.kill(rng.choice(list(world.verifiers)))
                self.add_verifier()
            case "verifier vanishes":
                world.verifiers.pop(rng.choice(list(world.verifiers))).stopped = True
                self.add_verifier()
            case "board dies" if not self.boards[at].done:
                self.boards[at] = self.restart(self.boards[at], self.boards[at].run.policy)
            case "outage":
                self.boards[at].run.link_down("outage")
                world.at(world.now + 1.0, lambda: self.link_up(self.boards[at]))
        if world.now < CHAOS_S:
            world.at(world.now + 5 * rng.random(), self.strike)

    def restart(self, board: Board, policy: Policy) -> Board:
        board.stopped = True
        request = board.run.window.request
        return self.world.board(
            request.session,
            request.prompt,
            sampling=request.sampling,
            max_tokens=request.max_tokens,
            patience_s=request.patience_s,
            policy=policy,
            stop_ids=request.stop_ids,
            committed=board.text,
            epoch=board.run.window.epoch + 1,
        )

    def link_up(self, board: Board) -> None:
        board.run.link_up()
        board.look()

    def play(self) -> None:
        if not self.calm:
            self.world.at(0.5, self.strike)
        self.world.run(lambda: all(board.done for board in self.boards), limit_s=900)
        for board in self.boards:
            request = board.run.window.request
            assert board.run.window.failure is None
            expected = plain_decode(request.prompt, request.sampling, request.max_tokens, request.stop_ids)
            assert board.text == expected


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_text_is_the_targets(seed):
    Chaos(seed).play()


@pytest.mark.parametrize("seed", range(25))
def test_on_a_calm_link_nothing_ever_needs_repair(seed):
    """No session is asked for, opened or drafted twice: where it were, it would have stood still for a second."""
    chaos = Chaos(seed, calm=True)
    chaos.play()
    assert not [message for _, _, message in chaos.world.sent if isinstance(message, Resync) and message.ask]
    for board in chaos.boards:
        tally = board.run.window.tally
        assert tally.opens == 1 and tally.ignored["lost drafts"] == 0
