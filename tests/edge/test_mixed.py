"""A model and what was written before in one drafter: the model's rows stay what they are, what is known is free."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from math import inf
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.config import DraftingConfig
from edge.drafters import mixed
from edge.drafters.base import Candidate
from edge.drafters.cached import CachedDrafter
from edge.drafters.manifest import Manifest
from edge.drafters.mixed import FEW, MixedDrafter, MixedOdds
from edge.runtime import SessionRun
from protocol.errors import ModelError
from protocol.sampling import Sampling
from tools.boards import BOARDS
from tools.traces import Trace
from tools.twin.fleet import Scene, simulate
from tools.twin.replay import Script, StepTime
from tools.twin.report import figures

VOCAB = 600
GREEDY = Sampling()
FACTS = Manifest(
    kind="drafter",
    name="toy",
    architecture="toy",
    source={},
    weights_digest="2" * 64,
    tokenizer_digest="1" * 64,
    vocab_size=VOCAB,
    context=400,
    dtype="float32",
    stop_ids=(),
    chat_template="",
)


def logits_of(text) -> np.ndarray:
    """What the toy model says behind a text: float32 [VOCAB], others behind any other text or another order."""
    seed = zlib.crc32(repr([int(id) for id in text]).encode())
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32)


class ToyForward:
    """A `Forward` whose logits are a function of exactly what a row sees, so a row that sees anything else is found."""

    provider = "toy"

    def __init__(self, capacity: int) -> None:
        self.capacity, self.rows = capacity, 0
        self._ids = np.zeros(capacity, np.int64)  # [capacity]
        self._positions = np.zeros(capacity, np.int64)  # [capacity]

    def run(self, ids, positions, start, wanted, tree):
        end = start + len(ids)
        self.rows += len(ids)
        self._ids[start:end], self._positions[start:end] = ids, positions
        return np.array([logits_of(self._seen(start, i, tree)) for i in wanted], np.float32).reshape(-1, VOCAB)

    def move(self, slots, first):
        for array in (self._ids, self._positions):
            array[first : first + len(slots)] = array[list(slots)]

    def _seen(self, start, i, tree):
        slots = np.arange(start + i + 1)
        if tree is not None:
            length = start + tree.shape[0] - tree.shape[1]
            slots = np.concatenate([np.arange(length), length + np.flatnonzero(tree[i])])
        order = slots[np.argsort(self._positions[slots], kind="stable")]
        assert self._positions[order].tolist() == list(range(len(order))), "a token twice, or one left out"
        return self._ids[order]


def make(context: int = FACTS.context, odds: MixedOdds | None = None) -> tuple[MixedDrafter, ToyForward]:
    forward = ToyForward(context)
    return MixedDrafter(CachedDrafter(forward, FACTS), odds), forward


# -- the model's rows are what they would be without it ----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.2, 0.6, 0.9, 1.1]))
def test_whatever_is_known_or_kept_the_model_sees_each_row_behind_its_own_text(seed, free):
    rng = random.Random(seed)
    ids = [1, 2, 3, 4]
    text = rng.choices(ids, k=rng.randrange(1, 30))
    with mock.patch.object(mixed, "FREE", free):
        drafter, forward = make()
        root = drafter.prefill(text)
        alive: list[tuple[object, list]] = [(root, [])]  # each row with the rows that lead to it

        def look_again() -> None:
            paths = dict(alive)
            for row in drafter.read_late():
                if row in paths:
                    behind = [*text, *(above.id for above in paths[row]), *([] if row is root else [row.id])]
                    np.testing.assert_array_equal(drafter.model.logits(row.inner), logits_of(behind))
                    assert drafter.unread(row) == 0 and drafter.candidates(row, GREEDY, 3)

        def grow(parents: list[tuple[int, object]], paths: list[list]) -> list:
            counted, before = drafter.pass_rows(parents), forward.rows
            rows = drafter.extend(parents)
            look_again()
            # What the model has read as a guess of its own it may have no need to read again as text.
            assert 0 < forward.rows - before <= counted or forward.rows - before == counted == 0
            for row, path in zip(rows, paths, strict=True):
                behind = [*text, *(above.id for above in path), row.id]
                assert row.position == len(behind) - 1
                found = drafter.candidates(row, GREEDY, 3)
                if row.inner is not None:
                    np.testing.assert_array_equal(drafter.model.logits(row.inner), logits_of(behind))
                else:
                    assert {one.id for one in found} <= set(text)
            return rows

        for _ in range(25):
            kind = rng.random()
            if kind < 0.2:
                row, path = rng.choice(alive)
                counted, before = drafter.unread(row), forward.rows
                drafter.read(row)
                assert forward.rows - before <= counted and drafter.unread(row) == 0 and row.inner is not None
                look_again()
            elif kind < 0.6:
                row, path = rng.choice(alive)
                chain = rng.choices(ids, k=rng.choice([1, 1, 2, 5]))
                items = [(id, i - 1 if i else row) for i, id in enumerate(chain)]
                rows: list = []
                paths = [path if row is root else [*path, row]]
                for i in range(1, len(chain)):
                    paths.append([*paths[0], *(mock.Mock(id=id) for id in chain[:i])])
                rows = grow(items, paths)
                for i, made in enumerate(rows):
                    alive.append((made, [*paths[0], *rows[:i]]))
            elif kind < 0.85:
                row, path = rng.choice(alive)
                if row is not root:
                    path = [*path, row]
                    drafter.keep(path)
                    text += [above.id for above in path]
                    alive = [(other, below[len(path) :]) for other, below in alive if below[: len(path)] == path] + [
                        (row, [])
                    ]
                    root = row
            else:
                fresh = rng.choices(ids, k=rng.randrange(1, 4))
                items = [(id, i - 1 if i else root) for i, id in enumerate(fresh)]
                rows = grow(items, [[mock.Mock(id=id) for id in fresh[:i]] for i in range(len(fresh))])
                drafter.keep(rows)
                text += fresh
                root = rows[-1]
                alive = [(root, [])]
        assert drafter.room() <= FACTS.context - len(text)
        longer = [*text, 4, 4]
        np.testing.assert_array_equal(drafter.model.logits(drafter.prefill(longer).inner), logits_of(longer))


def test_a_long_copy_is_read_only_when_the_model_has_to_go_on_and_then_as_a_text_is():
    drafter, forward = make()
    passage = list(range(10, 10 + 40))
    row = drafter.prefill([*passage, 5, *passage[:20]])
    read = forward.rows
    for id in passage[20:]:
        (row,) = drafter.extend([(id, row)])
        assert drafter.candidates(row, GREEDY, 1)[0].id == (id + 1 if id < 49 else 5)
        drafter.keep([row])
    assert forward.rows == read and len(passage[20:]) > FEW
    assert drafter.room() == FACTS.context - 81
    assert drafter.pass_rows([(7, row)]) == 21
    (row,) = drafter.extend([(7, row)])
    assert forward.rows == read + 21
    np.testing.assert_array_equal(drafter.model.logits(row.inner), logits_of([*passage, 5, *passage, 7]))


def test_a_run_that_was_guessed_without_the_model_can_be_read_in_one_pass_and_then_says_what_the_model_thinks():
    drafter, forward = make()
    root = drafter.prefill([*range(10, 40), 5, *range(10, 25)])
    run = [root]
    for id in range(25, 29):
        run += drafter.extend([(id, run[-1])])
    read = forward.rows
    assert [drafter.unread(row) for row in run] == [0, 1, 2, 3, 4]
    before = [drafter.candidates(row, GREEDY, 4) for row in run[1:]]
    drafter.read(run[3])
    assert forward.rows == read + 3 and drafter.read_late() == run[1:4]
    after = [drafter.candidates(row, GREEDY, 4) for row in run[1:4]]
    assert [len(found) for found in before] == [1] * 4 and [len(found) for found in after] == [4] * 3
    assert drafter.unread(run[4]) == 1


def test_a_guess_is_free_where_a_pass_costs_more_than_the_misses_that_it_saves():
    drafter, _ = make()
    row = drafter.prefill([*range(10, 30), 5, *range(10, 18)])
    counted = []
    for pass_s, miss_s in ((0.033, 0.1), (0.008, 0.3), (0.033, 0.1), (0.0, 0.0)):
        drafter.price(pass_s, miss_s)
        counted.append(drafter.pass_rows([(18, row)]))
    assert counted == [0, 1, 0, 1]


def test_a_text_that_fills_the_context_says_so_and_stays():
    drafter, _ = make(context=20)
    drafter.price(1.0, 1.0)
    row = drafter.prefill([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8])
    made = [row]
    for id in (9, 1, 2, 3, 4):
        (row,) = drafter.extend([(id, row)])
        made.append(row)
    with pytest.raises(ModelError, match="do not fit the context of 20"):
        drafter.extend([(99, made[-1])])
    drafter.keep(made[1:3])
    assert drafter.room() == 1


def test_a_path_that_does_not_follow_the_text_is_refused():
    drafter, _ = make()
    root = drafter.prefill([1, 2, 3])
    a, b = drafter.extend([(4, root), (5, 0)])
    with pytest.raises(ValueError, match="does not follow"):
        drafter.keep([b])
    drafter.keep([a])
    with pytest.raises(ValueError, match="does not follow"):
        drafter.keep([a])


# -- which guess counts -----------------------------------------------------------------------------------------------


def test_where_nothing_repeats_the_guesses_are_the_models_own():
    drafter, _ = make()
    plain = CachedDrafter(ToyForward(FACTS.context), FACTS)
    text = list(range(50))
    ours, theirs = drafter.prefill(text), plain.prefill(text)
    for id in range(50, 80):
        for sampling in (GREEDY, Sampling(temperature=0.8, seed=3)):
            assert drafter.candidates(ours, sampling, 6) == plain.candidates(theirs, sampling, 6)
        assert drafter.pass_rows([(id, ours)]) == 1
        (ours,), (theirs,) = drafter.extend([(id, ours)]), plain.extend([(id, theirs)])
        drafter.keep([ours])
        plain.keep([theirs])


MODELLED = [Candidate(1, 0.6), Candidate(2, 0.2), Candidate(3, 0.1)]


def test_the_likelier_of_two_guesses_comes_first_as_texts_have_shown_it():
    odds = MixedOdds()
    again = Candidate(9, 0.7)
    assert odds.merge(MODELLED, again, 4)[0].id == 1, "before anything was seen the model is believed"
    for _ in range(60):
        odds.saw(MODELLED[0], again, 9)
    found = odds.merge(MODELLED, again, 4)
    assert [one.id for one in found] == [9, 1, 2, 3] and found[0].probability > 0.8
    for _ in range(400):
        odds.saw(MODELLED[0], again, 1)
    found = odds.merge(MODELLED, again, 2)
    assert found[0] == MODELLED[0] and len(found) == 2


def test_what_both_guess_is_named_once_and_likelier_than_either_says():
    odds = MixedOdds()
    for _ in range(100):
        odds.saw(MODELLED[0], Candidate(1, 0.7), 1)
    first, *others = odds.merge(MODELLED, Candidate(1, 0.7), 3)
    assert first.id == 1 and first.probability > 0.9 and others == MODELLED[1:]


def test_it_learns_from_what_the_text_becomes():
    """A text whose passage always goes on otherwise than before: the model's guess, the truth, stays first."""
    odds = MixedOdds()
    seen = []
    for _ in range(8):
        drafter, _ = make(odds=odds)
        row = drafter.prefill([1, 2, 3, 4, 5, 6])
        for turn in range(20):
            for id in (1, 2, 3, 4, 100 + turn):
                (row,) = drafter.extend([(id, row)])
                found = drafter.candidates(row, GREEDY, 1)
                seen.append((id, row.inner is None or found[0].probability))
                drafter.keep([row])
    assert all(known is not True for id, known in seen[-100:] if id == 4), "what never came true is not free"


# -- a board with it --------------------------------------------------------------------------------------------------


def script(target, prompt, right: float = 0.85) -> Script:
    rng = random.Random(1)
    hits = [rng.random() < right for _ in target]
    ids = tuple((id, 7) if ok else (7, id) for id, ok in zip(target, hits, strict=True))
    return Script.recorded(Trace("", tuple(target), ids, ((0.7, 0.2),) * len(ids), (0.7,) * len(ids), tuple(prompt)))


COPY = script(list(range(100, 160)), [*range(100, 160), 5])
NOVEL = script(list(range(200, 260)), [*range(100, 160), 5])


def scene(text: Script, *, board: str = "pi5", patience_s: float = 0.0, **changes) -> Scene:
    made = Scene([text], BOARDS[board], StepTime(0.06), DraftingConfig(), patience_s=patience_s)
    return replace(made, **changes)


@pytest.mark.parametrize("policy", ["auto", "chain", "tree"])
@pytest.mark.parametrize("patience_s", [0.0, inf])
def test_a_copied_text_takes_fewer_passes_and_fewer_steps(policy, patience_s):
    asked = scene(COPY, patience_s=patience_s, drafting=DraftingConfig(policy=policy))
    off, on = (figures(simulate(replace(asked, suffix=how))) for how in ("off", "mixed"))
    assert on["cloud_steps_per_token"] < 0.6 * off["cloud_steps_per_token"]
    assert on["itl_ms_mean"] < 0.8 * off["itl_ms_mean"]
    read = 0.85 if policy == "auto" else 0.5  # auto reads what it copies where it has the time
    assert on["board_rows_per_token"] < read * off["board_rows_per_token"]
    assert on["drafts_per_token"] < 2.2 * on["cloud_steps_per_token"], "guesses leave together"


def test_what_was_not_read_is_read_in_parts_so_that_no_pass_keeps_a_verdict_waiting():
    passes = []

    def evaluate(run, work):
        if not work.reads:
            most = run.window.cadence.cost.rows_within(3.0)
            passes.append((work.num_rows - len(run.drafter._unread)) / most)
        return kept(run, work)

    kept = SessionRun.evaluate
    leaves = script([*range(100, 150), *range(300, 320)], [*range(100, 160), 5], right=1.0)
    with mock.patch.object(SessionRun, "evaluate", evaluate):
        simulate(scene(leaves, suffix="mixed", patience_s=inf))
    assert 0.5 < max(passes) <= 1


@pytest.mark.parametrize("patience_s", [0.0, inf])
def test_a_text_that_repeats_nothing_is_written_as_without_it(patience_s):
    off, on = (simulate(scene(NOVEL, patience_s=patience_s, suffix=how)).stories[0][0] for how in ("off", "mixed"))
    assert off.arrivals == on.arrivals and off.traffic == on.traffic


def test_alone_a_copy_is_faster_than_the_cloud_and_anything_else_as_fast():
    copied, novel = (figures(simulate(scene(text, suffix="alone"))) for text in (COPY, NOVEL))
    assert copied["itl_ms_mean"] < 20 and copied["board_busy"] < 0.2
    assert novel["itl_ms_mean"] == pytest.approx(60.0, abs=0.5)
    waits = figures(simulate(scene(NOVEL, suffix="alone", patience_s=inf)))
    assert waits["itl_ms_mean"] < 2 * 60, "a verifier that waits is told something, or not to wait"
