"""Plain decoding of eight sessions: the verifier over the torch engine, vLLM, and transformers' `generate`.

The same prompts of unequal lengths, model, dtype, threads and number of tokens for all. Rivals take turns. What counts
is decoding: from the last session's first token to all sessions' last.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine, load
from tools.bench.engine import passages
from tools.bench.loop import Loop, Script, many, no_guesses
from tools.models import ROOT, prepare
from tools.vllm import ABSENT, python

LENGTHS = (48, 56, 64, 72, 80, 88, 96, 104)  # tokens of the prompts
TOKENS = 64  # that each session decodes while the clock runs
PAD = 0

Ids = list[list[int]]
Rival = Callable[[], tuple[float, Ids]]
"""Tokens a second, and what was written."""


def through_verifier(engine: TorchEngine, prompts: Ids, tokens: int) -> tuple[float, Ids]:
    """All that serves a fleet but the network: messages in, steps, messages out."""
    scripts = [Script(tuple(prompt), (PAD,) * (tokens + 2)) for prompt in prompts]
    loop = Loop(engine, many("bench", len(scripts), scripts, no_guesses))
    boards = loop.boards.values()

    def have(each: int) -> Callable[[], bool]:
        return lambda: all(board.tokens >= each for board in boards)

    loop.run(until=have(1))
    before = sum(board.tokens for board in boards)
    seconds = loop.run(until=lambda: sum(board.tokens for board in boards) >= before + tokens * len(scripts))
    made = sum(board.tokens for board in boards) - before
    written = [board.text[len(prompt) :] for board, prompt in zip(boards, prompts, strict=True)]
    loop.verifier.drain()
    return made / seconds, written


class Stamps(StoppingCriteria):
    """Notes when `generate` has drawn a token for each row, and stops nothing."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.at.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def by_generate(target: Path, prompts: Ids, tokens: int, cache: str) -> Rival:
    """transformers, with padding on the left and its weights out of the file's memory map, which slows it down."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="sdpa").eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])

    def run() -> tuple[float, Ids]:
        stamps = Stamps()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens + 1,
                do_sample=False,
                pad_token_id=PAD,
                cache_implementation=cache,
                stopping_criteria=[stamps],
            )
        return tokens * len(prompts) / (stamps.at[-1] - stamps.at[0]), out[:, longest:].tolist()

    return run


class Vllm:
    """A process of vLLM's own interpreter."""

    def __init__(self, interpreter: Path, target: Path, prompts: Ids, tokens: int, threads: int, eager: bool) -> None:
        cores = sorted(os.sched_getaffinity(0))[:threads]
        asked = {"model": str(target), "prompts": prompts, "tokens": tokens, "eager": eager}
        self.process = subprocess.Popen(
            [str(interpreter), "-m", "tools.bench.plain_vllm", json.dumps(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            cwd=ROOT,
            env=os.environ
            | {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # with the engine in the caller's process: the quicker way here
                "HF_HUB_OFFLINE": "1",
            },
        )
        self._read()

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self._stdin.close()
        self.process.wait()

    def __call__(self) -> tuple[float, Ids]:
        print("again", file=self._stdin)
        answer = self._read()
        return answer["tokens_per_s"], answer["ids"]

    @property
    def _stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    def _read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with exit code {self.process.wait()}")
        return json.loads(line)


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """Tokens a second of each rival, and ours over each peer at its best setting."""
    _, target = prepare("smollm2")
    tokens, rounds = (16, 1) if quick else (TOKENS, 5)
    prompts = [text[:length] for text, length in zip(passages(target, len(LENGTHS), 104), LENGTHS, strict=True)]
    engines = {mode: load(target, Numerics(mode=mode), threads=threads) for mode in ("fast", "exact")}
    rivals: dict[str, Rival] = {
        f"outrider {mode}": partial(through_verifier, engine, prompts, tokens) for mode, engine in engines.items()
    }
    for cache in ("dynamic", "static"):
        rivals[f"transformers {cache}"] = by_generate(target, prompts, tokens, cache)
    interpreter = python()
    with ExitStack() as stack:
        if interpreter is not None:
            for name, eager in (("vllm eager", True), *(() if quick else (("vllm compiled", False),))):
                rivals[name] = stack.enter_context(Vllm(interpreter, target, prompts, tokens, threads, eager))
        for rival in rivals.values():
            rival()
        turns = [{name: rival() for name, rival in rivals.items()} for _ in range(rounds)]
    rates = {name: statistics.median(turn[name][0] for turn in turns) for name in rivals}
    ours = rates["outrider fast"]
    ratios = {}
    for peer in ("vllm", "transformers"):
        best = max((rate for name, rate in rates.items() if name.startswith(peer)), default=None)
        ratios[f"over_{peer}"] = round(ours / best, 3) if best else ABSENT
    return {
        "model": engines["fast"].info.model,
        "dtype": "float32",
        "threads": threads,
        "sessions": len(prompts),
        "prompt_tokens": list(LENGTHS),
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        **ratios,
        "texts_as_ours": {name: _same(turns[0][name][1], turns[0]["outrider fast"][1], tokens) for name in rivals},
    }


def _same(found: Sequence[Sequence[int]], ours: Sequence[Sequence[int]], tokens: int) -> int:
    """Texts that agree; where two ids are as good as equal, libraries may differ in float32."""
    return sum(list(a[:tokens]) == list(b[:tokens]) for a, b in zip(found, ours, strict=True))
