"""The torch engine's KV cache: what is held, what is shared, what is gone on from, what is given back."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cloud.engines import torch_engine  # noqa: E402
from cloud.engines.base import Plan, Work  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.torch_engine import TorchEngine, load  # noqa: E402
from protocol.errors import ModelError  # noqa: E402
from protocol.sampling import Sampling  # noqa: E402
from tests.cloud.tiny_target import (  # noqa: E402
    BLOCK,
    BLOCK_BYTES,
    GREEDY,
    POISON,
    SAMPLED,
    VOCAB,
    decode,
    no_draft,
    prefill,
    prompts,
)

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = Numerics(mode="exact")


def small(target: Path, num_blocks: int, numerics: Numerics = EXACT, max_draft: int = 8) -> TorchEngine:
    return load(target, numerics, kv_bytes=num_blocks * BLOCK_BYTES, max_draft=max_draft)


def read(engine: TorchEngine, key: int) -> int:
    """Evaluate a prompt up to its root row; returns the rows that it took."""
    rows = 0
    while engine.pending(key) > 1:
        outcome = engine.step(Plan([Work(key, min(64, engine.pending(key) - 1))]))
        assert not outcome.failed and not outcome.evicted
        rows += outcome.rows
    return rows


def write(engine: TorchEngine, key: int, num: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < num:
        ids += engine.step(Plan([Work(key, 1)])).accepted[key]
    return ids


def held_bytes() -> int:
    """Memory of this process that is not a file's, by the system's own account."""
    status = Path("/proc/self/status").read_text()
    return sum(int(size) for size in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)) * 1024


def test_a_session_takes_blocks_as_it_grows_and_gives_them_all_back(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 8, Numerics())
    [text] = prompts(70)
    assert engine.free_blocks == 8
    engine.open(0, text, GREEDY, 200)
    assert engine.free_blocks == 8 and engine.blocks(0) == 0
    assert engine.blocks(0, 56) == 2 and engine.blocks(0, 57) == 3, "a whole draft of 8 lies behind the text"
    engine.step(Plan([Work(0, 32)]))
    assert engine.blocks(0) == 1 and engine.free_blocks == 7
    engine.step(Plan([Work(0, 33)]))
    assert engine.blocks(0) == 3 and engine.free_blocks == 5
    engine.evict(0)
    assert engine.blocks(0) == 0 and engine.free_blocks == 8 and engine.pending(0) == 70
    read(engine, 0)
    assert engine.free_blocks == 5 and engine.retained_blocks == 0
    engine.close(0)
    assert engine.free_blocks == 8 and engine.retained_blocks == 3, "for a text that goes on from it"


def test_a_text_that_does_not_fit_even_alone_is_refused(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 4, Numerics())
    engine.open(0, [1, 2], GREEDY, 4 * BLOCK - 8)
    with pytest.raises(ModelError, match=r"121 tokens need 5 blocks of the KV cache's 4.*kv_gib"):
        engine.open(1, [1, 2], GREEDY, 4 * BLOCK - 7)


def test_memory_follows_the_blocks(targets: dict[str, Path]) -> None:
    """And comes back: what a session held is the system's again once it is evicted."""
    engine = small(targets["llama"], 1000, Numerics())
    texts = prompts(*[390] * 24)
    for key, text in enumerate(texts):  # so that what the passes themselves need is there
        engine.open(key, text, GREEDY, 400, f"first{key}")
        read(engine, key)
        engine.evict(key)
        engine.close(key)
    before = held_bytes()
    for key, text in enumerate(texts):
        engine.open(key, text, GREEDY, 400, f"tenant{key}")
        read(engine, key)
    blocks = engine.num_blocks - engine.free_blocks
    assert blocks == 24 * 13
    assert held_bytes() - before == pytest.approx(blocks * BLOCK_BYTES, rel=0.15)
    for key in range(12):
        engine.evict(key)
    assert held_bytes() - before == pytest.approx(blocks * BLOCK_BYTES / 2, rel=0.15)


def test_a_tenants_common_beginning_is_read_and_stored_once(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 40)
    fleet, *own = prompts(100, 30, 20, 10)
    for key, tail in enumerate(own):
        engine.open(key, fleet + tail, GREEDY, 180, "acme")
        assert engine.pending(key) == (130 if key == 0 else len(tail) + 100 - 3 * BLOCK)
        read(engine, key)
    assert [engine.blocks(key) for key in range(3)] == [2, 1, 1]
    assert engine.free_blocks == 40 - 3 - 4
    engine.open(3, fleet + own[0], GREEDY, 180, "other")
    assert engine.pending(3) == 130, "another tenant would see by the time that somebody has asked this"
    engine.close(0)
    engine.close(1)
    assert engine.free_blocks == 40 - 3 - 1
    engine.close(2)
    assert engine.free_blocks == 40


def test_prompts_that_come_at_once_are_read_once(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 40)
    fleet, *own = prompts(200, 9, 9, 9, 9)
    truth = decode(engine, [fleet + tail for tail in own], GREEDY, 4, no_draft)
    for key, tail in enumerate(own):
        engine.open(key, fleet + tail, GREEDY, 220, "acme")
    rows = 0
    while any(engine.pending(key) > 1 for key in range(4)):
        work = [Work(key, min(50, n - 1)) for key in range(4) if (n := engine.pending(key)) > 1]
        rows += engine.step(Plan(work)).rows
    assert rows < 200 + 4 * (9 + 2 * BLOCK)
    assert [write(engine, key, 4) for key in range(4)] == truth


def test_beginnings_fork_where_the_texts_do(targets: dict[str, Path]) -> None:
    """Three levels: all have the first 2 blocks, some the next 2, two of them another one."""
    engine = small(targets["llama"], 60)
    a, b, c, *ends = prompts(64, 64, 40, 7, 8, 9, 10, 11)
    texts = [a + ends[0], a + b + ends[1], a + b + c + ends[2], a + ends[3], a + b + c + ends[4], a + b + ends[0]]
    truth = decode(engine, texts, SAMPLED, 5, no_draft)
    pending = []
    for key, text in enumerate(texts):
        engine.open(key, text, SAMPLED, 250, "acme")
        pending.append(engine.pending(key))
        read(engine, key)
    assert pending == [71, 72, 49, 10, 51 - BLOCK, 7]
    assert [write(engine, key, 5) for key in range(6)] == truth
    engine.evict(2)
    engine.close(1)
    read(engine, 2)
    engine.open(1, texts[1], SAMPLED, 250, "acme")
    assert [write(engine, key, 5 - 5 * (key != 1)) for key in range(6)] == [[], truth[1], [], [], [], []]


class Rows:
    """The logits that tokens are drawn from, by seed and position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}
        choose = torch_engine.choose_rows

        def record(logits: torch.Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
            for row, position, sampling in zip(logits, positions, samplings, strict=True):
                self.seen.setdefault((sampling.seed, position), []).append(row.clone())
            return choose(logits, positions, samplings)

        monkeypatch.setattr(torch_engine, "choose_rows", record)


@pytest.mark.parametrize("kind", ["tiny", "real"])
def test_shared_and_taken_over_keys_give_the_same_bits(
    kind: str, request: pytest.FixtureRequest, targets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = targets["llama"] if kind == "tiny" else request.getfixturevalue("real_target")
    engine = load(target, Numerics(mode="exact", dtype="float32"), kv_bytes=1 << 28, max_draft=8)
    rows = Rows(monkeypatch)
    fleet, *own = prompts(75, 9, 14, 21)
    texts = [fleet + tail for tail in own]

    def run(*tenants: str) -> list[list[int]]:
        for key, (text, tenant) in enumerate(zip(texts, tenants, strict=True)):
            engine.open(key, text, Sampling(temperature=0.8, seed=key), 140, tenant)
            read(engine, key)
        found = [write(engine, key, 6) for key in range(3)]
        for key in range(3):
            engine.close(key)
        return found

    alone = run("a", "b", "c")
    plain, rows.seen = rows.seen, {}
    assert run("d", "d", "d") == alone
    assert run("d", "d", "d") == alone, "taken over"
    assert len(plain) == 18
    for key, [row] in plain.items():
        assert len(rows.seen[key]) == 2 and all(torch.equal(row, other) for other in rows.seen[key]), key


def test_the_next_turn_costs_only_the_new_tokens(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 20)
    text, more, other = prompts(70, 13, 40)
    engine.open(0, text, SAMPLED, 100, "acme")
    read(engine, 0)
    text = text + write(engine, 0, 9)
    engine.close(0)
    assert engine.free_blocks == 20
    turn = text + more
    [truth] = decode(engine, [turn], SAMPLED, 6, no_draft)
    engine.open(1, turn, SAMPLED, 300, "acme")
    assert engine.pending(1) == 1 + 13, "the last token that was drawn was never evaluated"
    engine.open(2, text + other, SAMPLED, 300, "acme")  # the same beginning again, which the first has taken over
    assert engine.pending(2) == 79 + 40 - 2 * BLOCK
    assert read(engine, 1) == 13
    assert write(engine, 1, 6) == truth
    read(engine, 2)
    [truth] = decode(engine, [text + other], SAMPLED, 6, no_draft)
    assert write(engine, 2, 6) == truth


def test_the_next_turn_may_write_the_end_of_the_last_one_anew(targets: dict[str, Path]) -> None:
    """A chat template cuts and encodes an answer in its own way."""
    engine = small(targets["llama"], 20)
    text, answer = prompts(50, 30)
    engine.open(0, text, GREEDY, 100)
    read(engine, 0)
    text = text + write(engine, 0, 20)
    engine.close(0)
    turn = text[:60] + answer
    [truth] = decode(engine, [turn], GREEDY, 6, no_draft)
    engine.open(0, turn, GREEDY, 100)
    assert engine.pending(0) == 30
    read(engine, 0)
    assert write(engine, 0, 6) == truth


def test_another_conversation_does_not_take_the_first_one_away(targets: dict[str, Path]) -> None:
    """With the same system prompt it shares that; the first one's next turn still finds all of its text."""
    engine = small(targets["llama"], 20)
    fleet, one, two, more = prompts(70, 40, 40, 5)
    engine.open(0, fleet + one, GREEDY, 150)
    read(engine, 0)
    text = fleet + one + write(engine, 0, 5)
    engine.close(0)
    engine.open(1, fleet + two, GREEDY, 150)
    assert engine.pending(1) == 110 - 2 * BLOCK
    engine.open(2, text + more, GREEDY, 150)
    assert engine.pending(2) == 6


def test_closed_texts_are_forgotten_the_oldest_first(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 10)
    texts = prompts(90, 90, 90, 200)
    for text in texts[:3]:
        engine.open(0, text, GREEDY, 100)
        read(engine, 0)
        engine.close(0)
    engine.open(0, texts[0], GREEDY, 100)  # used again
    assert engine.pending(0) == 1
    write(engine, 0, 1)
    engine.close(0)
    engine.open(3, texts[3], GREEDY, 210)
    engine.step(Plan([Work(3, 128)]))
    assert engine.free_blocks == 10 - 4
    engine.open(1, texts[1], GREEDY, 100)
    engine.open(2, texts[2], GREEDY, 100)
    engine.open(0, texts[0], GREEDY, 100)
    assert [engine.pending(key) for key in (0, 1, 2)] == [1, 90, 1]


def test_what_is_not_a_number_harms_nobody_who_begins_alike(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 20)
    [text] = prompts(90)
    [truth] = decode(engine, [text], GREEDY, 5, no_draft)
    engine.open(0, [*text[:80], POISON], GREEDY, 130)
    engine.step(Plan([Work(0, 70)]))
    assert engine.step(Plan([Work(0, 11)])).failed
    engine.close(0)
    engine.open(1, text, GREEDY, 130)
    read(engine, 1)
    assert write(engine, 1, 5) == truth


def test_nobody_waits_for_a_session_that_fails(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 20)
    [text] = prompts(90)
    engine.open(0, [*text, POISON], GREEDY, 130)
    engine.open(1, text, GREEDY, 130)
    both = Plan([Work(0, 91), Work(1, 90)])
    assert set(engine.step(both).failed) == {0}
    assert set(engine.step(both).accepted) == {1}


def test_who_counts_on_too_many_blocks_is_told_who_lost_theirs(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 6, Numerics())
    texts = prompts(90, 90, 90)
    truth = decode(engine, texts[:1], GREEDY, 3, no_draft)
    for key, text in enumerate(texts):
        engine.open(key, text, GREEDY, 120)
    read(engine, 1)
    read(engine, 0)
    outcome = engine.step(Plan([Work(2, 89)]))
    assert outcome.evicted == [1] and not outcome.failed and outcome.rows == 89
    assert engine.pending(1) == 90 and engine.free_blocks == 0
    outcome = engine.step(Plan([Work(1, 89), Work(2, 1), Work(0, 1)]))
    assert outcome.evicted == [1] and set(outcome.accepted) == {0, 2}
    assert outcome.accepted[0] == truth[0][:1]


def test_texts_of_random_beginnings_decode_as_alone(targets: dict[str, Path]) -> None:
    """Many short forks of few texts, so that runs are cut in all ways."""
    engine = small(targets["qwen2"], 64)
    generator = random.Random(3)
    stems = prompts(130, 130)
    texts = []
    for _ in range(14):
        stem = generator.choice(stems)[: generator.randrange(1, 130)]
        texts.append(stem + [generator.randrange(VOCAB - 1) for _ in range(generator.randrange(1, 20))])
    truth = [decode(engine, [text], GREEDY, 3, no_draft)[0] for text in texts]
    for key, text in enumerate(texts):
        engine.open(key, text, GREEDY, len(text) + 5, "acme")
        prefill(engine, key, chunk=generator.randrange(5, 90))
        assert write(engine, key, 3) == truth[key]
        if generator.random() < 0.4:
            engine.close(key)


def test_who_shares_with_nobody_any_more_holds_it_alone(targets: dict[str, Path]) -> None:
    engine = small(targets["llama"], 20)
    [text] = prompts(110)
    for key in range(2):
        engine.open(key, text, GREEDY, 150)
        read(engine, key)
    assert engine.free_blocks == 20 - 3 - 2
    grows = engine.blocks(1, 140) - engine.blocks(1)
    engine.close(0)
    assert engine.blocks(1) == 4 and engine.blocks(1, 140) - engine.blocks(1) == grows
    engine.evict(1)
    assert engine.free_blocks == 20
