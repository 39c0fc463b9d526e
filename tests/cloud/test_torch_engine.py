"""The torch engine against transformers itself, on tiny random models and on a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from cloud.engines import torch_engine  # noqa: E402
from cloud.engines.base import Outcome, Plan, Work  # noqa: E402
from cloud.engines.model import load_model  # noqa: E402
from cloud.engines.numerics import Numerics  # noqa: E402
from cloud.engines.ragged import Span  # noqa: E402
from cloud.engines.torch_engine import TorchEngine, load  # noqa: E402
from cloud.engines.walk import walk  # noqa: E402
from protocol.errors import ModelError  # noqa: E402
from protocol.sampling import Sampling  # noqa: E402
from tests.cloud.tiny_target import (  # noqa: E402
    GREEDY,
    POISON,
    SAMPLED,
    VOCAB,
    Drafter,
    decode,
    drafters,
    no_draft,
    prefill,
    prompts,
    reference_logits,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_ragged_pass_gives_the_logits_of_plain_passes(targets: dict[str, Path], architecture: str, mode: str) -> None:
    forward = load_model(targets[architecture], "float32", Numerics(mode=mode))
    texts = prompts(3, 70, 1, 130)
    spans, ids = [], []
    for text in texts:
        spans.append(Span(forward.new_slab(len(text), 0), len(ids), 0, len(text), ()))
        ids += text
    logits = forward(spans, ids, range(len(ids)))
    for span, text in zip(spans, texts, strict=True):
        found = logits[span.start : span.start + span.rows]
        torch.testing.assert_close(found, reference_logits(targets[architecture], text), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_greedy_decoding_equals_generate(targets: dict[str, Path], architecture: str, mode: str) -> None:
    engine = load(targets[architecture], Numerics(mode=mode))
    texts = prompts(5, 61, 17)
    found = decode(engine, texts, GREEDY, 12, no_draft)
    model = transformers.AutoModelForCausalLM.from_pretrained(targets[architecture], dtype=torch.float32).eval()
    for text, ids in zip(texts, found, strict=True):
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([text]), max_new_tokens=12, do_sample=False, suppress_tokens=list(range(VOCAB, VOCAB + 12))
            )
        assert ids == whole[0, len(text) :].tolist()


@pytest.mark.parametrize("numerics", [Numerics(), Numerics(mode="exact"), Numerics(mode="exact", dtype="bfloat16")])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_change_the_number_of_steps_and_nothing_else(
    targets: dict[str, Path], numerics: Numerics, sampling: Sampling
) -> None:
    engine = load(targets["llama"], numerics)
    texts = prompts(9, 58, 30)
    truth = [decode(engine, [text], sampling, 20, no_draft)[0] for text in texts]
    for name, drafter in drafters(truth, texts).items():
        assert decode(engine, texts, sampling, 20, drafter) == truth, name


def test_a_good_draft_is_accepted_whole_and_a_tree_by_its_branch(targets: dict[str, Path]) -> None:
    engine = load(targets["llama"])
    [text] = prompts(20)
    truth = decode(engine, [text], SAMPLED, 12, no_draft)[0]
    known = drafters([truth], [text])
    for name, accepted in (("good", 4), ("half", 2), ("tree", 4), ("bad", 0)):
        engine.open(0, text, SAMPLED, 40)
        prefill(engine, 0)
        outcome = engine.step(Plan([Work(0, 1, *known[name]([0], text))]))
        assert outcome.accepted == {0: truth[: accepted + 1]}, name
        engine.close(0)


class Recorder:
    """Keeps the logits from which each session's tokens were drawn; a session is known by its seed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[int, int], list[Any]] = {}
        choose = torch_engine.choose_rows

        def record(logits: Any, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
            for row, position, sampling in zip(logits, positions, samplings, strict=True):
                self.rows.setdefault((sampling.seed, position), []).append(row.clone())
            return choose(logits, positions, samplings)

        monkeypatch.setattr(torch_engine, "choose_rows", record)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_exact_logits_are_equal_to_the_bit(
    targets: dict[str, Path], architecture: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and row by row, against company, chunks, chains, trees, another order, another thread count, a restart."""
    numerics = Numerics(mode="exact", dtype=dtype)
    engine = load(targets[architecture], numerics)
    text, *others = prompts(50, 3, 90, 64, 21)
    sampling = Sampling(temperature=0.8, seed=99)
    recorder = Recorder(monkeypatch)
    truth = decode(engine, [text], sampling, 20, no_draft)[0]
    plain = {key: rows[0] for key, rows in recorder.rows.items()}
    assert len(plain) == 20

    def check(how: str, engine: TorchEngine, drafter: Drafter, first: bool, company: int) -> None:
        recorder.rows.clear()
        busy = [(1 + i, other) for i, other in enumerate(others[:company])]
        for key, ids in busy:
            engine.open(key, ids, Sampling(temperature=1.0, seed=key), 300, how)
        engine.open(0, text, sampling, len(text) + 20, how)
        prefill(engine, 0, chunk=7 if company else 1000)
        grown = list(text)
        while len(grown) < len(text) + 20:
            mine = Work(0, 1, *drafter([0], grown))
            theirs = [Work(key, min(9, engine.pending(key))) for key, _ in busy]
            outcome = engine.step(Plan([mine, *theirs] if first else [*theirs, mine]))
            grown += outcome.accepted[0]
        for key in (0, *(key for key, _ in busy)):
            engine.close(key)
        assert grown[len(text) :][:20] == truth, how
        for key, row in plain.items():
            assert any(torch.equal(row, other) for other in recorder.rows[key]), (how, key)

    kinds = drafters([truth], [text])
    check("in company", engine, no_draft, True, 4)
    for name in ("good", "half", "tree", "random_tree"):
        check(name, engine, kinds[name], False, 0)
    check("random_tree in company", engine, kinds["random_tree"], False, 3)
    restarted = load(targets[architecture], numerics, threads=2)
    assert restarted.info == engine.info
    check("restarted on two threads", restarted, kinds["tree"], True, 2)
    torch.set_num_threads(1)


def test_bad_work_fails_alone(targets: dict[str, Path]) -> None:
    engine = load(targets["llama"], max_draft=6)
    [text] = prompts(30)
    expected = decode(engine, [text], GREEDY, 1, no_draft)[0]
    for key in range(10):
        engine.open(key, text, GREEDY, 31)
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
        Work(8, 30, [5] * 7, range(-1, 6)),
        Work(11, 7),
        Work(77, 1),
        Work(0, 30),
        Work(9, 30, expected, [-1]),
    ]
    outcome = engine.step(Plan(plan))
    assert set(outcome.failed) == {0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 77}
    assert outcome.accepted[9][:1] == expected and len(outcome.accepted[9]) == 2
    for key in (1, 2, 3, 4, 5, 6, 7, 8):
        assert engine.pending(key) == 30
        assert engine.step(Plan([Work(key, 30)])).accepted == {key: expected}


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_logits_that_are_not_numbers_fail_their_session_alone(targets: dict[str, Path], mode: str) -> None:
    engine = load(targets["llama"], Numerics(mode=mode))
    [text] = prompts(30)
    expected = decode(engine, [text], SAMPLED, 3, no_draft)[0]
    engine.open(0, text, SAMPLED, 40)
    engine.open(1, [*text[:7], POISON], SAMPLED, 40)
    outcome = engine.step(Plan([Work(1, 8), Work(0, 30)]))
    assert list(outcome.failed) == [1] and outcome.accepted == {0: expected[:1]}
    assert engine.pending(1) == 8
    poisoned_draft = engine.step(Plan([Work(0, 1, [POISON], [-1]), Work(1, 8)]))
    assert set(poisoned_draft.failed) == {0, 1}
    assert engine.step(Plan([Work(0, 1)])).accepted == {0: expected[1:2]}
    assert engine.step(Plan([Work(0, 1)])).accepted == {0: expected[2:3]}


@pytest.mark.parametrize(
    ("ids", "length", "names"),
    [([], 9, "0 ids"), ([1, VOCAB], 9, "499"), ([1, -1], 9, "499"), ([1], 401, "400"), ([1, 2, 3], 2, "3 ids")],
)
def test_a_text_that_cannot_be_held_is_refused(
    targets: dict[str, Path], ids: list[int], length: int, names: str
) -> None:
    engine = load(targets["llama"])
    with pytest.raises(ModelError, match=names):
        engine.open(0, ids, GREEDY, length)
    assert engine.step(Plan([])) == Outcome(seconds=pytest.approx(0, abs=1))


def test_walk_takes_the_branch_that_was_drawn() -> None:
    draft, parents = [5, 6, 7, 8, 9], [-1, -1, 1, 2, 0]
    assert walk([6, 1, 7, 3, 4, 2], draft, parents) == ([6, 7, 3], [1, 2])
    assert walk([4, 1, 7, 3, 4, 2], draft, parents) == ([4], [])
    assert walk([3], [], []) == ([3], [])


def test_real_model_greedy_equals_generate(real_target: Path) -> None:
    engine = load(real_target, Numerics(dtype="float32"))
    texts = prompts(40, 120, 7, vocab=engine.info.vocab_size)
    truth = decode(engine, texts, GREEDY, 16, no_draft)
    model = transformers.AutoModelForCausalLM.from_pretrained(real_target, dtype=torch.float32).eval()
    for text, ids in zip(texts, truth, strict=True):
        with torch.inference_mode():
            whole = model.generate(torch.tensor([text]), max_new_tokens=16, do_sample=False)[0, len(text) :].tolist()
        assert ids[: len(whole)] == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_model_exact_with_drafts_equals_alone(
    real_target: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(real_target, Numerics(mode="exact", dtype=dtype))
    texts = prompts(60, 124, 9, vocab=engine.info.vocab_size)
    recorder = Recorder(monkeypatch)
    truth = []
    plain: dict[tuple[int, int], list[Any]] = {}
    for text in texts:
        truth.append(decode(engine, [text], SAMPLED, 16, no_draft)[0])
        for (_, position), logits in recorder.rows.items():
            plain[len(text), position] = logits
        recorder.rows.clear()
    assert decode(engine, texts, SAMPLED, 16, drafters(truth, texts)["tree"]) == truth
    seen = [row for found in recorder.rows.values() for row in found]
    assert all(any(torch.equal(row, other) for other in seen) for [row] in plain.values())
