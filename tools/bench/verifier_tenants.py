"""Two tenants at one verifier, of which one sends ten times the rows; and how equal equal tenants are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from statistics import median

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load
from cloud.probe import probe
from tools.bench.engine import passages
from tools.bench.loop import Board, Loop, many, no_guesses, right_so_often, write_scripts
from tools.models import prepare

FEW, MANY = 4, 40
EQUAL, EACH = 4, 4
TOKENS, PROMPT = 48, 32
DRAFT_ROWS = 6
ACCEPTANCE = 0.85
FIRST = "the few"


def jain(rates: Sequence[float]) -> float:
    """Jain's fairness index: 1 where all are equal, 1/n where one has everything."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """Committed tokens a second of each tenant, alone and together."""
    _, target = prepare("smollm2")
    engine = load(target, Numerics(mode="fast"), threads=threads, max_draft=48)
    scripts = write_scripts(engine, passages(target, 8, PROMPT), TOKENS)
    cost = probe(engine, 6.0, 48)
    rounds, seconds = (1, 3.0) if quick else (5, 4.0)
    good, rubbish = right_so_often(ACCEPTANCE, DRAFT_ROWS), right_so_often(0.0, 10 * DRAFT_ROWS - 12)

    def small() -> list[Board]:
        return many("small", FEW, scripts, good)

    scenes: dict[str, Callable[[], list[Board]]] = {
        "alone": small,
        "ten times the sessions": lambda: [*small(), *many("big", MANY, scripts, good)],
        "ten times the sessions, plain": lambda: [*small(), *many("big", MANY, scripts, no_guesses)],
        "ten times the draft rows, all wrong": lambda: [*small(), *many("big", FEW, scripts, rubbish)],
        "equal tenants": lambda: [board for i in range(EQUAL) for board in many(f"t{i}", EACH, scripts, good)],
        "one tenant": lambda: [*many("all", FEW, scripts, good), *many("all", MANY, scripts, good, first=FEW)],
    }

    def rates(boards: list[Board]) -> dict[str, float]:
        """Tokens a second by tenant, and of the first few boards."""
        loop = Loop(engine, boards, cost=deepcopy(cost))
        loop.run(seconds / 2)
        before = {**loop.tokens(), FIRST: sum(board.tokens for board in boards[:FEW])}
        took = loop.run(seconds)
        after = {**loop.tokens(), FIRST: sum(board.tokens for board in boards[:FEW])}
        loop.verifier.drain()
        return {name: (after[name] - before[name]) / took for name in after}

    turns = [{name: rates(make()) for name, make in scenes.items()} for _ in range(rounds)]

    def over_fair_share(scene: str) -> float:
        """Of the few sessions: half of what they get alone is their share by weight."""
        return round(median(turn[scene][FIRST] / (turn["alone"][FIRST] / 2) for turn in turns), 3)

    return {
        "model": engine.info.model,
        "numerics": engine.info.numerics,
        "threads": threads,
        "sessions": {"small": FEW, "big": MANY},
        "prompt_tokens": PROMPT,
        "tokens": TOKENS,
        "drafts": {"rows": DRAFT_ROWS, "acceptance": ACCEPTANCE},
        "seconds": seconds,
        "rounds": rounds,
        "tokens_per_s": {
            scene: {name: round(median(turn[scene][name] for turn in turns), 1) for name in turns[0][scene]}
            for scene in scenes
        },
        "small_over_fair_share": {scene: over_fair_share(scene) for scene in scenes if "times" in scene},
        "without_tenants": over_fair_share("one tenant"),
        "jain": round(median(jain([r for t, r in turn["equal tenants"].items() if t != FIRST]) for turn in turns), 4),
    }
