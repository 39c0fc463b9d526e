"""Boards with edge windows, a network that loses, doubles and delays, a verifier, and the vLLM engine under it."""

from __future__ import annotations

import random
from collections import defaultdict
from math import inf

import pytest

from edge.drafters.base import Candidate
from edge.policy import ChainPolicy, TreePolicy
from protocol.sampling import Sampling, choose
from tests.simulation import World
from tests.toys import ToyDrafter, ToyRow
from tools.vllm import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from tests.vllm.reference import CLOSE

NEW = 24
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)


class KnowingDrafter(ToyDrafter):
    """Knows what the target writes, and is wrong now and then."""

    def __init__(self, truth: list[int], wrong_every: int) -> None:
        super().__init__(context=4096)
        self.truth, self.wrong_every = truth, wrong_every

    def candidates(self, row: ToyRow, sampling: Sampling, n: int) -> list[Candidate]:
        position = row.position + 1
        right = self.truth[position] if position < len(self.truth) else 1
        wrong = (right + 1 + position % 7) % 499
        if position % self.wrong_every == 0 or row.text != self.truth[: len(row.text)]:
            right, wrong = wrong, right
        return [Candidate(right, 0.8), Candidate(wrong, 0.2)][:n]


def unreliable(seed: int):
    rng = random.Random(seed)

    def fault(topic, message, count):
        lot = rng.random()
        if lot < 0.05:
            return ()
        if lot < 0.2:
            return (0.0, rng.random() * 0.3)  # twice, and late
        return (rng.random() * 0.1 if lot < 0.4 else 0.0,)

    return fault


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("size", "patience_s"), [("roomy", inf), ("small", 0.3)])
def test_a_fleet_writes_what_vllm_writes_alone(engine, small_engine, plain, sampling, size, patience_s) -> None:
    served = engine if size == "roomy" else small_engine
    rng = random.Random(4)
    prompts = [[rng.randrange(499) for _ in range(5 + 19 * i)] for i in range(8)]
    expected = plain.decode(prompts, sampling, NEW)
    seen = defaultdict(list)
    served.sampler.observe = lambda name, position, row: seen[position].append(row.clone())
    world = World(fault=unreliable(3))
    verifier = world.verifier("v1", rows=64, engine=served, repair_s=0.5, draft_rows=8)
    boards = [
        world.board(
            i + 1,
            run.prompt,
            device=f"t{i % 2}.b{i}",
            target=served.info.id,
            sampling=sampling,
            max_tokens=NEW,
            patience_s=patience_s,
            drafter=KnowingDrafter([*run.prompt, *run.ids], 3 + i),
            policy=ChainPolicy() if i % 2 else TreePolicy(),
        )
        for i, run in enumerate(expected)
    ]
    world.run(lambda: all(board.done for board in boards))
    served.sampler.observe = None
    for board, run in zip(boards, expected, strict=True):
        assert len(board.text) == NEW
        for i, (a, b) in enumerate(zip(board.text, run.ids, strict=True)):
            if a != b:  # allowed only where the target's own logits, but for their last bits, give either
                position = len(run.prompt) + i
                close = [row for row in seen[position] if float((row - run.logits[position]).abs().max()) <= CLOSE]
                assert any(choose(row.numpy(), position, sampling) == a for row in close)
                break
    assert verifier.tally.guessed > 20
    assert (verifier.residency.evictions > 0) == (size == "small")
    world.run(lambda: verifier.num_sessions == 0)
    assert served.free_blocks == served.num_blocks
