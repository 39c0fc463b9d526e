"""What the engine costs beside a plain transformers forward of as many rows, and what exactness and sampling cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache

from cloud.engines import torch_engine
from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine
from protocol.sampling import Sampling
from tools.bench.record import ms, round_robin
from tools.models import ROOT

CONTEXT = 128
LENGTH = 512
SHAPES = ((1, 1), (1, 5), (2, 5), (4, 5), (8, 1), (8, 5))
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)


def passages(target: Path, num: int, length: int = CONTEXT) -> list[list[int]]:
    """Real text, since the distributions behind random ids are flatter than any text's: [num][length] ids."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prose = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(prose, add_special_tokens=False).ids
    return [ids[i * length : (i + 1) * length] for i in range(num)]


def stepper(
    engine: TorchEngine, texts: list[list[int]], sessions: int, rows: int, sampling: Sampling
) -> Callable[[], object]:
    """A step of `rows` rows for each of `sessions`, behind CONTEXT tokens. The drafts are what the passage says next;
    some are accepted, so that texts grow a little from step to step, for every rival alike.
    """
    keys = [hash((sampling, sessions, rows, i)) for i in range(sessions)]
    for key, text in zip(keys, texts, strict=False):
        engine.open(key, text[:CONTEXT], sampling, LENGTH)
        while engine.pending(key) > 1:
            engine.step(Plan([Work(key, min(64, engine.pending(key) - 1))]))
    drafts = [text[CONTEXT : CONTEXT + rows - 1] for text in texts[:sessions]]
    plan = Plan([Work(key, 1, draft, range(-1, rows - 2)) for key, draft in zip(keys, drafts, strict=True)])
    return lambda: engine.step(plan)


def plain_forward(target: Path, texts: list[list[int]], sessions: int, rows: int) -> Callable[[], object]:
    """transformers' own forward of the same rows over its own cache, cropped back after each call."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    text = torch.tensor([text[:CONTEXT] for text in texts[:sessions]])
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(text, past_key_values=cache, use_cache=True, logits_to_keep=1)
    new = torch.tensor([text[CONTEXT - 1 : CONTEXT - 1 + rows] for text in texts[:sessions]])

    def forward() -> object:
        with torch.inference_mode():
            out = model(new, past_key_values=cache, use_cache=True)
        cache.crop(-rows)
        return out

    return forward


class Stopwatch:
    """Stands before a function and adds up its seconds."""

    def __init__(self, function: Callable) -> None:
        self._function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments: object) -> object:
        started = time.perf_counter()
        result = self._function(*arguments)
        self.seconds += time.perf_counter() - started
        self.calls += 1
        return result


def sampling_share(engine: TorchEngine, texts: list[list[int]], rounds: int) -> dict[str, float]:
    """Of steps of 8 sessions x 5 rows at T = 0.8, top-p 0.95: time spent drawing, and the whole step's."""
    step = stepper(engine, texts, 8, 5, SAMPLED)
    draw = Stopwatch(torch_engine.choose_rows)
    torch_engine.choose_rows = draw  # type: ignore[assignment]
    try:
        started = time.perf_counter()
        for _ in range(rounds):
            step()
        whole = time.perf_counter() - started
    finally:
        torch_engine.choose_rows = draw._function
    return {
        "draw_ms": ms(draw.seconds / rounds),
        "step_ms": ms(whole / rounds),
        "share": round(draw.seconds / whole, 3),
    }


def measure(target: Path, *, threads: int, rounds: int) -> dict[str, object]:
    """Ratios against the bars: step over plain forward (1.3), exact over fast (2.3), sampling over step (0.15)."""
    fast = torch_engine.load(target, Numerics(mode="fast"), threads=threads)
    exact = torch_engine.load(target, Numerics(mode="exact"), threads=threads)
    texts = passages(target, 8, CONTEXT + 8)
    rivals: dict[str, Callable[[], object]] = {}
    for sessions, rows in SHAPES:
        rivals[f"fast {sessions}x{rows}"] = stepper(fast, texts, sessions, rows, GREEDY)
        rivals[f"exact {sessions}x{rows}"] = stepper(exact, texts, sessions, rows, GREEDY)
    rivals["transformers 8x5"] = plain_forward(target, texts, 8, 5)
    started = time.perf_counter()
    times = round_robin(rivals, rounds=rounds)
    ratios = {
        f"exact over fast {sessions}x{rows}": times[f"exact {sessions}x{rows}"] / times[f"fast {sessions}x{rows}"]
        for sessions, rows in SHAPES
    }
    ratios["step over transformers 8x5"] = times["fast 8x5"] / times["transformers 8x5"]
    sampling = sampling_share(fast, texts, rounds)
    ratios["sampling over step 8x5"] = sampling["share"]
    return {
        "model": fast.info.model,
        "dtype": "float32",
        "numerics": exact.info.numerics,
        "threads": threads,
        "prompt_tokens": CONTEXT,
        "rounds": rounds,
        "sampling": sampling,
        "ms": {name: ms(taken) for name, taken in times.items()},
        "ratios": {name: round(ratio, 3) for name, ratio in ratios.items()},
        "seconds": round(time.perf_counter() - started, 1),
    }
