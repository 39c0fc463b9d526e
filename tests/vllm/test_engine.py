"""The vLLM engine against vLLM's own plain decoding: whatever comes in between, the same text."""

from __future__ import annotations

import gc

import pytest

from cloud.engines.base import Plan, Work
from cloud.probe import probe
from protocol.errors import ModelError
from protocol.sampling import Sampling
from tools.vllm import ABSENT

pytest.importorskip("vllm", reason=ABSENT)

from vllm.v1.request import Request

from tests.vllm.fleet import NEW, Fleet, chain, prompts
from tests.vllm.models import CONTEXT, MAX_DRAFT, POISON, VOCAB
from tests.vllm.reference import assert_agree

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@SAMPLINGS
def test_plain_steps_give_what_vllm_gives(engine, plain, sampling) -> None:
    [expected] = plain.decode(prompts(40), sampling, NEW)
    fleet = Fleet(engine, [expected], sampling, only=lambda: [Work(0, engine.pending(0))])
    assert_agree(fleet.run()[0], expected, sampling)
    assert fleet.accepted == 0


def test_greedy_draws_are_vllms_own(plain) -> None:
    texts = prompts(3, 40, 77)
    for ours, theirs in zip(plain.decode(texts, GREEDY, NEW), plain.decode_greedily(texts, NEW), strict=True):
        assert ours.ids == theirs.ids


@SAMPLINGS
@pytest.mark.parametrize("seed", [1, 2])
def test_a_fleet_with_drafts_of_all_kinds_writes_what_vllm_writes(engine, plain, sampling, seed) -> None:
    expected = plain.decode(prompts(1, 2, 31, 32, 33, 64, 100, 9, 150, 200, seed=seed), sampling, NEW)
    fleet = Fleet(engine, expected, sampling, seed=seed, evictions=0.1)
    parted = [assert_agree(a, b, sampling) for a, b in zip(fleet.run(), expected, strict=True)]
    assert fleet.accepted > 40
    assert sum(position is not None for position in parted) <= 2
    assert engine.free_blocks == engine.num_blocks


@SAMPLINGS
def test_a_cache_too_small_for_all_changes_nothing(small_engine, plain, sampling) -> None:
    expected = plain.decode(prompts(30, 60, 90, 120, 200, 150, seed=9), sampling, NEW)
    fleet = Fleet(small_engine, expected, sampling, seed=3)
    for a, b in zip(fleet.run(), expected, strict=True):
        assert_agree(a, b, sampling)
    assert fleet.evicted > 5
    assert small_engine.free_blocks == small_engine.num_blocks


def test_a_step_runs_just_what_is_planned(engine) -> None:
    a, b = prompts(50, 70)
    engine.open(0, a, SAMPLED, 90, "one")
    engine.open(1, b, SAMPLED, 100, "one")
    outcome = engine.step(Plan([Work(0, 20)]))
    assert (outcome.rows, outcome.accepted) == (20, {})
    assert (engine.pending(0), engine.pending(1)) == (30, 70)
    outcome = engine.step(Plan([Work(1, 69), Work(0, 29)]))
    assert (outcome.rows, outcome.accepted) == (98, {})  # all but the root rows, which nobody asked for
    held = engine.blocks(0), engine.blocks(1)
    outcome = engine.step(Plan([Work(1, 1, *chain([1, 2, 3]))]))
    assert outcome.rows == 4 and list(outcome.accepted) == [1]
    for _ in range(3):
        assert engine.step(Plan([])).rows == 0
    assert engine.pending(0) == 1 and engine.blocks(0) == held[0] == 2
    assert list(engine.step(Plan([Work(0, 1)])).accepted) == [0]
    engine.close(0)
    engine.close(1)


def test_nothing_is_kept_of_sessions_that_were_closed(engine) -> None:
    def alive() -> int:
        gc.collect()
        return sum(isinstance(one, Request) for one in gc.get_objects())

    before = alive()
    for key in range(40):
        engine.open(key, prompts(30, seed=key)[0], SAMPLED, 60, f"t{key}")
        engine.step(Plan([Work(key, 30)]))
        if key % 3 == 0:
            engine.evict(key)
        engine.close(key)
    engine.open(99, [1, 2, 3], GREEDY, 9)
    engine.step(Plan([Work(99, 3)]))
    engine.close(99)
    assert alive() <= before + 1
    assert len(engine._runner.requests) <= 1  # vLLM's worker hears of an end with the next step


def test_steps_are_measured_before_anybody_is_served(engine) -> None:
    cost = probe(engine, 5.0, MAX_DRAFT)
    assert 0 < cost.seconds(1) < 5
    assert engine.free_blocks == engine.num_blocks and engine.retained_blocks > 0


def test_the_next_turn_and_a_shared_prompt_cost_only_new_tokens_within_a_tenant(engine) -> None:
    [prompt] = prompts(100, seed=77)
    engine.open(0, prompt, GREEDY, 140, "one")
    engine.step(Plan([Work(0, 100)]))
    engine.open(1, [*prompt, 1, 2, 3], GREEDY, 140, "one")
    engine.open(2, [*prompt, 1, 2, 3], GREEDY, 140, "other")
    assert engine.pending(1) == 103 - 96 and engine.pending(2) == 103
    free, takes = engine.free_blocks, engine.blocks(1, 103) - engine.blocks(1)
    engine.step(Plan([Work(1, 7)]))
    assert engine.free_blocks == free - takes == free - 1 and engine.blocks(1) == 1  # three are shared
    assert engine.blocks(1, 140) == 2 and engine.blocks(2, 140) == 5
    text = [*prompt, *range(60)]
    engine.close(0)
    engine.close(1)
    assert engine.retained_blocks >= 3
    assert engine.blocks(2, 140) == 5
    engine.open(3, text, GREEDY, 200, "one")
    assert engine.pending(3) == 160 - 96 and engine.blocks(3, 160) == 6  # nobody holds what it will take over
    for key in (2, 3):
        engine.close(key)


def test_bad_work_fails_alone(engine) -> None:
    [text] = prompts(30, seed=8)
    for key in range(9):
        engine.open(key, text, GREEDY, 40, f"t{key}")
    engine.open(11, [*text[:5], POISON, 3], GREEDY, 31)
    plan = [
        Work(0, 30),
        Work(1, 31),
        Work(2, 0),
        Work(3, 12, [5], [-1]),
        Work(4, 30, [5, VOCAB], [-1, 0]),
        Work(5, 30, [-1], [-1]),
        Work(6, 30, [5, 6], [-1, 1]),
        Work(7, 30, [5, 6], [-1]),
        Work(8, 30, [5] * 9, range(-1, 8)),
        Work(11, 7),
        Work(77, 1),
        Work(0, 30),
    ]
    outcome = engine.step(Plan(plan))
    assert set(outcome.failed) == {0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 77}
    expected = outcome.accepted.get(0)
    for key in range(1, 9):
        assert engine.pending(key) == 30
        assert engine.step(Plan([Work(key, 30)])).accepted == {key: expected}
    assert engine.pending(11) == 7
    for key in [*range(9), 11]:
        engine.close(key)


@SAMPLINGS
def test_logits_that_are_not_numbers_fail_their_session_alone(small_engine, plain, sampling) -> None:
    engine = small_engine
    text, long = prompts(30, 330, seed=8)
    expected, follower = plain.decode([text, long], sampling, 4)
    engine.open(0, text, sampling, 40)
    engine.open(1, [*text[:7], POISON], sampling, 40)
    outcome = engine.step(Plan([Work(1, 8), Work(0, 30)]))
    assert list(outcome.failed) == [1] and outcome.accepted == {0: expected.ids[:1]}
    assert engine.pending(1) == 8
    outcome = engine.step(Plan([Work(0, 1, [POISON], [-1])]))
    assert list(outcome.failed) == [0] and engine.pending(0) == 31
    assert engine.step(Plan([Work(0, 31)])).accepted == {0: expected.ids[1:2]}
    engine.close(0)
    engine.close(1)
    engine.open(2, long, sampling, 340)  # it takes the blocks that they leave
    engine.step(Plan([Work(2, 200)]))
    for id in follower.ids:
        assert engine.step(Plan([Work(2, engine.pending(2))])).accepted == {2: [id]}
    engine.close(2)


@pytest.mark.parametrize(
    ("ids", "length", "names"),
    [([], 9, "0 ids"), ([1, VOCAB], 9, "499"), ([1, -1], 9, "499"), ([1], 385, "384"), ([1, 2, 3], 2, "3 ids")],
)
def test_a_text_that_cannot_be_held_is_refused(engine, ids, length, names) -> None:
    with pytest.raises(ModelError, match=names):
        engine.open(0, ids, GREEDY, length)
    assert engine.step(Plan([])).rows == 0


def test_a_text_fills_the_context_and_no_more(engine) -> None:
    [text] = prompts(CONTEXT - 3, seed=4)
    engine.open(0, text, GREEDY, CONTEXT)
    grown = len(text)
    while grown < CONTEXT:
        outcome = engine.step(Plan([Work(0, engine.pending(0), *(chain([1, 2, 3, 4]) if grown > len(text) else ()))]))
        assert not outcome.failed
        grown += len(outcome.accepted.get(0, ()))
    assert grown == CONTEXT
    assert "384" in engine.step(Plan([Work(0, 1)])).failed[0]
    engine.close(0)


def test_a_text_that_does_not_fit_the_cache_even_alone_is_refused(small_engine) -> None:
    with pytest.raises(ModelError, match=r"384 tokens need 13 blocks of the KV cache's 12.*kv_gib"):
        small_engine.open(0, [1], GREEDY, CONTEXT)
    small_engine.open(0, [1], GREEDY, small_engine.num_blocks * 32 - MAX_DRAFT)
    small_engine.close(0)
