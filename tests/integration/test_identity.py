"""Invariant 1 on a real model: whatever drafts, batches, chunks, trees and patience do, the ids are the target's own.

The reference shares no code with the ledger: one session, one row a step, and transformers' `generate` at T = 0.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from pathlib import Path

import pytest
import torch

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine, load
from edge.auto import AutoPolicy
from edge.calibration import Calibration
from edge.drafters.base import Candidate
from edge.policy import ChainPolicy, TreePolicy
from protocol.sampling import Sampling
from tests.simulation import World
from tests.toys import ToyDrafter, ToyRow
from tools.demo.reference import decode_alone

MARGIN = 1e-3
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=11)
NUM_TOKENS = 16


class KnowingDrafter(ToyDrafter):
    """Knows the target's text and guesses it, but for positions where `spoil` says so; then its second guess is right
    every other time. What it guesses off the text's path is nonsense.
    """

    def __init__(self, truth: Sequence[int], vocab: int, spoil) -> None:
        super().__init__(spoil, context=4096)
        self.truth, self.vocab = list(truth), vocab

    def candidates(self, row: ToyRow, sampling: Sampling, n: int) -> list[Candidate]:
        position = row.position + 1
        right = self.truth[position] if position < len(self.truth) else 1
        wrong = (right * 31 + position) % self.vocab
        if row.text != self.truth[: len(row.text)]:
            return [Candidate(wrong, 0.5)][:n]
        if not self.spoil(position):
            return [Candidate(right, 0.9), Candidate(wrong, 0.1)][:n]
        second = right if position % 2 else (wrong + 1) % self.vocab
        return [Candidate(wrong, 0.5), Candidate(second, 0.4)][:n]


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    """Sixteen prompts of unequal length, 5 to 110 tokens, of real text."""
    from edge.drafters import manifest
    from edge.text import Text

    text = Text.load(smollm2[0], manifest.read(smollm2[0], "drafter"))
    ids = text.encode(Path(__file__).with_name("test_world.py").read_text())
    rng = random.Random(3)
    return [ids[(at := rng.randrange(500)) : at + 5 + 7 * i] for i in range(16)]


def engine_of(target: Path, mode: str, dtype: str) -> TorchEngine:
    return load(target, Numerics(mode=mode, dtype=dtype), threads=2, max_draft=48)


@pytest.fixture(scope="module", params=[("exact", "float32"), ("fast", "float32"), ("exact", "bfloat16")], ids="-".join)
def engine(request, smollm2) -> TorchEngine:
    return engine_of(smollm2[1], *request.param)


_alone: dict[tuple, list[int]] = {}


def alone(engine: TorchEngine, prompt: list[int], sampling: Sampling) -> list[int]:
    """The reference, computed once for each numerics, prompt and sampling."""
    key = engine.info.id, tuple(prompt), sampling
    if key not in _alone:
        _alone[key] = decode_alone(engine, prompt, sampling, NUM_TOKENS, [])
    return _alone[key]


def assert_identical(target: Path, numerics: str, prompt: list[int], got: list[int], expected: list[int]) -> None:
    """Exact numerics: equal. Fast numerics: equal, or the two best logits were a near-tie, told with their margin."""
    if got == expected:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
    assert numerics.startswith("fast"), f"differs at {at}: {got[at]} is not {expected[at]}"
    margin = best_margin(target, [*prompt, *expected[:at]])
    print(f"fast numerics differ at {at}: margin between the two best logits {margin:.2e}")
    assert margin <= MARGIN


def best_margin(target: Path, text: list[int]) -> float:
    """Distance of the two best logits after `text`, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        best = model(torch.tensor([text])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def fleet(engine: TorchEngine, prompts, truths, *, sampling, patience_s, quality, shape) -> list[list[int]]:
    """All prompts at once through window, ledger and engine, on a virtual clock."""
    world = World()
    world.verifier("v1", rows=48, engine=engine)
    boards = []
    for i, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        spoil = {
            "good": lambda p: p % 6 == 2,
            "bad": lambda p: p % 4 != 0,
            "adversarial": lambda p: True,
        }[quality]
        boards.append(
            world.board(
                i + 1,
                prompt,
                target=engine.info.id,
                sampling=sampling,
                max_tokens=NUM_TOKENS,
                patience_s=patience_s,
                drafter=KnowingDrafter([*prompt, *truth], engine.info.vocab_size, spoil),
                policy={"tree": TreePolicy(), "chain": ChainPolicy()}.get(shape) or AutoPolicy(Calibration()),
            )
        )
    world.run(lambda: all(board.done for board in boards))
    return [board.text for board in boards]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("num", "quality", "shape", "patience_s"),
    [
        (1, "good", "chain", 0.0),
        (1, "adversarial", "tree", inf),
        (4, "bad", "auto", 0.2),
        (16, "good", "auto", 0.0),
        (16, "bad", "chain", inf),
    ],
)
def test_the_fleet_writes_what_the_target_writes_alone(
    engine, smollm2, prompts, sampling, num, quality, shape, patience_s
):
    chosen = prompts[-num:]
    truths = [alone(engine, prompt, sampling) for prompt in chosen]
    texts = fleet(engine, chosen, truths, sampling=sampling, patience_s=patience_s, quality=quality, shape=shape)
    for prompt, text, truth in zip(chosen, texts, truths, strict=True):
        assert_identical(smollm2[1], engine.info.numerics, prompt, text, truth)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_the_target_alone_is_transformers_generate(mode, prompts, smollm2):
    from transformers import AutoModelForCausalLM

    engine = engine_of(smollm2[1], mode, "float32")

    model = AutoModelForCausalLM.from_pretrained(smollm2[1], dtype=torch.float32).eval()
    for prompt in prompts[:16:5]:
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        expected = out[0, len(prompt) :].tolist()
        got = decode_alone(engine, prompt, GREEDY, NUM_TOKENS, [])
        # generate sums in another order than exact numerics, so the rule for fast numerics holds between the two.
        assert_identical(smollm2[1], "fast", prompt, got, expected)


def test_a_restarted_engine_writes_the_same(smollm2, prompts):
    first, second = (engine_of(smollm2[1], "exact", "bfloat16") for _ in range(2))
    whole = decode_alone(first, prompts[9], SAMPLED, NUM_TOKENS, [])
    half = decode_alone(first, prompts[9], SAMPLED, NUM_TOKENS // 2, [])
    rest = decode_alone(second, [*prompts[9], *half], SAMPLED, NUM_TOKENS - len(half), [])
    assert first.info.id == second.info.id
    assert half + rest == whole
