"""What recorded drafts bring: committed tokens a second through the verifier, beside the same engine decoding plainly.

The drafts are what a board's drafter proposed for these very texts ("recorded"), and the same with some of the wrong
guesses set right, up to an acceptance of 0.85 ("mended"). Behind a wrong guess, of which the record knows nothing,
stand guesses that are wrong too. Rivals take turns, each round with a verifier of its own that knows no more than the
probe at a start tells.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import chain
from pathlib import Path

from cloud.cost import StepCost
from cloud.engines.base import Plan, Work
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine, load
from cloud.probe import probe
from edge.drafters.manifest import read as read_manifest
from edge.text import Text
from protocol.sampling import Sampling
from tools import traces
from tools.bench.loop import Board, Guesser, Loop, Script, many, no_guesses
from tools.models import prepare
from tools.traces import Trace

SESSIONS = (1, 2, 4, 8, 16, 32)
CHAIN_SESSIONS, CHAINS = 4, (3, 5, 7)
DEPTH = 10  # guesses that a board has there whenever it hears
PROBE_S = 3.0
MAX_DRAFT = 48
ACCEPTANCE = 0.85  # to which recorded guesses are mended, for the bar that asks for it


def scripts_of(drafter: Path, recorded: Sequence[Trace]) -> list[Script]:
    """The traces' prompts as a board sends them, each with what the target wrote."""
    text = Text.load(drafter, read_manifest(drafter, "drafter"))
    return [Script(tuple(text.chat([{"role": "user", "content": trace.prompt}])), trace.target) for trace in recorded]


def first_guesses(trace: Trace) -> list[int]:
    """What the drafter thought likeliest at each position."""
    return [ids[0] for ids in trace.draft_ids]


def mended_guesses(trace: Trace, acceptance: float = ACCEPTANCE) -> list[int]:
    """The same, with as many of the wrong ones set right, evenly spread, as `acceptance` asks for."""
    guesses = first_guesses(trace)
    wrong = [i for i, (guess, id) in enumerate(zip(guesses, trace.target, strict=True)) if guess != id]
    num = max(0, round(acceptance * len(guesses)) - (len(guesses) - len(wrong)))
    for i in range(num):
        at = wrong[i * len(wrong) // num]
        guesses[at] = trace.target[at]
    return guesses


def chains_of(recorded: Sequence[Trace], guesses_of: Callable[[Trace], list[int]], depth: int) -> Guesser:
    """Chains of `depth` out of a drafter's guesses; behind a wrong one only wrong ones."""
    by_text = [(trace.target, guesses_of(trace)) for trace in recorded]

    @cache
    def of(target: tuple[int, ...]) -> list[int]:
        return next(guesses for text, guesses in by_text if text[: len(target)] == target)

    def guess(target: Sequence[int], done: int) -> Sequence[int]:
        guesses, made, right = of(tuple(target)), list[int](), True
        for at in range(done, min(done + depth, len(target))):
            made.append(guesses[at] if right else target[at] ^ 1)
            right = right and made[-1] == target[at]
        return made

    return guess


def staggered(boards: list[Board]) -> list[Board]:
    """Boards in mid-text: the first text of each ends at a place of its own, or all would read prompts at once."""
    for i, board in enumerate(boards):
        first = next(board.scripts)
        length = max(1, len(first.target) * (i + 1) // len(boards))
        board.scripts = chain([Script(first.prompt, first.target[:length])], board.scripts)
    return boards


class Arena:
    """One engine, the texts, and rivals that take turns."""

    def __init__(self, engine: TorchEngine, scripts: Sequence[Script], cost: StepCost, seconds: float) -> None:
        self.engine, self.scripts, self.cost, self.seconds = engine, scripts, cost, seconds
        self.texts = self.other = 0

    def through_verifier(self, num: int, guess: Guesser) -> tuple[float, float]:
        """Committed tokens a second of so many sessions, and the rows that a token took."""
        loop = Loop(
            self.engine,
            staggered(many("bench", num, self.scripts, guess, heeds_advice=True)),
            cost=deepcopy(self.cost),
            draft_rows=MAX_DRAFT,
        )
        boards = loop.boards.values()
        loop.run(until=lambda: all(board.tokens > 1 for board in boards))
        loop.run(self.seconds / 5)
        tally = loop.verifier.tally
        tokens, rows = tally.committed, tally.rows
        took = loop.run(self.seconds)
        tokens, rows = tally.committed - tokens, tally.rows - rows
        for board in boards:
            self.texts += len(board.texts) + 1
            self.other += sum(
                tuple(ids) != ids_alone for ids, ids_alone in zip(board.texts, board.expected, strict=True)
            )
            if board.script is not None:
                begun = board.text[len(board.script.prompt) :]
                self.other += tuple(begun) != board.script.target[: len(begun)]
        loop.verifier.drain()
        return tokens / took, rows / tokens

    def chains(self, num: int, guess: Guesser) -> float:
        """Committed tokens a second of the bare engine with all guesses of each session in every step."""
        texts = {-1 - i: self.scripts[i % len(self.scripts)] for i in range(num)}
        written: dict[int, list[int]] = {key: [] for key in texts}
        for key, script in texts.items():
            self.engine.open(key, script.prompt, Sampling(), len(script.prompt) + len(script.target))
        self.engine.step(Plan([Work(key, rows) for key in texts if (rows := self.engine.pending(key) - 1)]))
        tokens, started = 0, time.perf_counter()
        while (took := time.perf_counter() - started) < self.seconds:
            work = []
            for key, script in texts.items():
                draft = guess(script.target, len(written[key]))[: len(script.target) - len(written[key]) - 1]
                work.append(Work(key, 1, draft, range(-1, len(draft) - 1)))
            for key, ids in self.engine.step(Plan(work)).accepted.items():
                written[key] += ids
                tokens += len(ids)
            if any(len(written[key]) == len(script.target) for key, script in texts.items()):
                took = time.perf_counter() - started
                break
        for key in texts:
            self.engine.close(key)
        return tokens / took


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """Tokens a second by number of sessions, with drafts and without, and the ratio of the medians."""
    drafter, target = prepare("smollm2")
    recorded = traces.load(traces.RECORDED_SMOLLM2)
    engine = load(target, Numerics(mode="fast"), threads=threads, max_draft=MAX_DRAFT)
    cost = probe(engine, PROBE_S, MAX_DRAFT)
    arena = Arena(engine, scripts_of(drafter, recorded), cost, 2.0 if quick else 5.0)
    rounds = 1 if quick else 5
    rivals = {
        "plain": no_guesses,
        "recorded": chains_of(recorded, first_guesses, DEPTH),
        "mended": chains_of(recorded, mended_guesses, DEPTH),
    }
    by_sessions: dict[int, dict[str, object]] = {}
    for num in SESSIONS:
        turns = [{name: arena.through_verifier(num, guess) for name, guess in rivals.items()} for _ in range(rounds)]
        rates = {name: statistics.median(turn[name][0] for turn in turns) for name in rivals}
        by_sessions[num] = {
            "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
            "rows_per_token": {name: round(statistics.median(turn[name][1] for turn in turns), 2) for name in rivals},
            "gain": {name: round(rate / rates["plain"], 3) for name, rate in rates.items() if name != "plain"},
        }
    bare = {f"chain of {rows}": chains_of(recorded, mended_guesses, rows) for rows in (0, *CHAINS)}
    laps = [{name: arena.chains(CHAIN_SESSIONS, guess) for name, guess in bare.items()} for _ in range(rounds)]
    return {
        "model": engine.info.model,
        "numerics": engine.info.numerics,
        "threads": threads,
        "traces": traces.RECORDED_SMOLLM2.name,
        "acceptance": {
            "recorded": round(_acceptance(recorded, first_guesses), 3),
            "mended": round(_acceptance(recorded, mended_guesses), 3),
        },
        "texts": len(recorded),
        "depth": DEPTH,
        "seconds": arena.seconds,
        "rounds": rounds,
        "sessions": by_sessions,
        "bare_engine_4_sessions_mended_tokens_per_s": {
            name: round(statistics.median(lap[name] for lap in laps), 1) for name in bare
        },
        "texts_compared": arena.texts,
        "texts_that_differ": arena.other,
    }


def _acceptance(recorded: Sequence[Trace], guesses_of: Callable[[Trace], list[int]]) -> float:
    right = sum(guess == id for trace in recorded for guess, id in zip(guesses_of(trace), trace.target, strict=True))
    return right / sum(len(trace.target) for trace in recorded)
