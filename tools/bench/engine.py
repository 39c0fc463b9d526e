"""What the engine costs beside a plain transformers forward of as many rows, and what exactness and sampling cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from cloud.engines import torch_engine
from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine
from protocol.sampling import Sampling
from tools.bench.record import ms, round_robin

CONTEXT = 128
LENGTH = 512
SHAPES = ((1, 1), (1, 5), (2, 5), (4, 5), (8, 1), (8, 5))
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


def prompts(num: int, vocab: int, length: int = CONTEXT) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(num)]


def stepper(engine: TorchEngine, sessions: int, rows: int, sampling: Sampling) -> Callable[[], object]:
    """A step of `rows` rows for each of `sessions`, with CONTEXT tokens behind each. Drafts are never right, so that a
    session's text grows by a token a step for every rival alike.
    """
    info = engine.info
    keys = [sampling.seed << 20 | sessions << 8 | rows << 4 | i for i in range(sessions)]
    for key, text in zip(keys, prompts(sessions, info.vocab_size), strict=True):
        engine.open(key, text, sampling, LENGTH)
        while engine.pending(key) > 1:
            engine.step(Plan([Work(key, min(64, engine.pending(key) - 1))]))
    rng = random.Random(2)

    def step() -> object:
        drafts = [[rng.randrange(info.vocab_size) for _ in range(rows - 1)] for _ in keys]
        return engine.step(
            Plan([Work(key, 1, draft, range(-1, rows - 2)) for key, draft in zip(keys, drafts, strict=True)])
        )

    return step


def plain_forward(target: Path, dtype: torch.dtype, sessions: int, rows: int) -> Callable[[], object]:
    """transformers' own forward of the same rows over its own cache, cropped back after each call."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    text = torch.tensor(prompts(sessions, model.config.vocab_size))
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(text, past_key_values=cache, use_cache=True, logits_to_keep=1)
    new = torch.randint(0, model.config.vocab_size, (sessions, rows))

    def forward() -> object:
        with torch.inference_mode():
            out = model(new, past_key_values=cache, use_cache=True)
        cache.crop(-rows)
        return out

    return forward


def sampling_seconds(engine: TorchEngine, rows: int) -> Callable[[], object]:
    """Drawing alone: `rows` rows of logits with the spread of a real step's."""
    from cloud.sampling import choose_rows

    logits = torch.randn(rows, engine.info.vocab_size) * 3.0
    return lambda: choose_rows(logits, range(rows), [SAMPLED] * rows)


def measure(target: Path, *, threads: int, rounds: int) -> dict[str, object]:
    """Ratios against the bars: step over plain forward (1.3), exact over fast (2.3), sampling over step (0.15)."""
    fast = torch_engine.load(target, Numerics(mode="fast"), threads=threads)
    exact = torch_engine.load(target, Numerics(mode="exact"), threads=threads)
    rivals: dict[str, Callable[[], object]] = {}
    for sessions, rows in SHAPES:
        rivals[f"fast {sessions}x{rows}"] = stepper(fast, sessions, rows, GREEDY)
        rivals[f"exact {sessions}x{rows}"] = stepper(exact, sessions, rows, GREEDY)
    rivals["sampled 8x5"] = stepper(fast, 8, 5, SAMPLED)
    rivals["draw 40 rows"] = sampling_seconds(fast, 40)
    rivals["transformers 8x5"] = plain_forward(target, torch.float32, 8, 5)
    started = time.perf_counter()
    times = round_robin(rivals, rounds=rounds)
    ratios = {
        f"exact over fast {sessions}x{rows}": times[f"exact {sessions}x{rows}"] / times[f"fast {sessions}x{rows}"]
        for sessions, rows in SHAPES
    }
    ratios["step over transformers 8x5"] = times["fast 8x5"] / times["transformers 8x5"]
    ratios["sampling over step 8x5"] = times["draw 40 rows"] / times["sampled 8x5"]
    return {
        "model": fast.info.model,
        "dtype": "float32",
        "numerics": exact.info.numerics,
        "threads": threads,
        "prompt_tokens": CONTEXT,
        "rounds": rounds,
        "ms": {name: ms(taken) for name, taken in times.items()},
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
