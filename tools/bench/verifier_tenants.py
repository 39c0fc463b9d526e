"""Two tenants at one verifier, of which one sends ten times the rows; and how equal equal tenants are."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import TorchEngine, load
from cloud.probe import probe
from tools.bench.engine import passages
from tools.bench.loop import Board, Guesser, Loop, Script, many, no_guesses, right_so_often, write_scripts
from tools.models import prepare

FEW, MANY = 4, 40
EQUAL, EACH = 4, 4
TOKENS, PROMPT = 48, 32
DRAFT_ROWS = 6
ACCEPTANCE = 0.85


def jain(rates: Sequence[float]) -> float:
    """Jain's fairness index: 1 where all are equal, 1/n where one has everything."""
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """Committed tokens a second of each tenant, alone and together."""
    _, target = prepare("smollm2")
    engine = load(target, Numerics(mode="fast"), threads=threads, max_draft=48)
    scripts = write_scripts(engine, passages(target, 8, PROMPT), TOKENS)
    cost = probe(engine, 6.0, 48)
    seconds = 5.0 if quick else 20.0
    good, rubbish = right_so_often(ACCEPTANCE, DRAFT_ROWS), right_so_often(0.0, 10 * DRAFT_ROWS - 12)

    def rates(boards: list[Board]) -> dict[str, float]:
        loop = Loop(engine, boards, cost=deepcopy(cost))
        loop.run(seconds / 4)
        before = loop.tokens()
        took = loop.run(seconds)
        found = {tenant: (tokens - before[tenant]) / took for tenant, tokens in loop.tokens().items()}
        loop.verifier.drain()
        return found

    def pair(num: int, guess: Guesser) -> list[Board]:
        return [*many("small", FEW, scripts, good), *many("big", num, scripts, guess)]

    alone = rates(many("small", FEW, scripts, good))["small"]
    scenes = {
        "ten times the sessions": pair(MANY, good),
        "ten times the sessions, plain": pair(MANY, no_guesses),
        "as many sessions, ten times the draft rows, all wrong": pair(FEW, rubbish),
        "as many sessions, the same drafts": pair(FEW, good),
    }
    together = {name: rates(boards) for name, boards in scenes.items()}
    unprotected = _unprotected(engine, scripts, good, cost, seconds)
    equal = rates([board for i in range(EQUAL) for board in many(f"t{i}", EACH, scripts, good)])
    fair = alone / 2
    return {
        "model": engine.info.model,
        "numerics": engine.info.numerics,
        "threads": threads,
        "sessions": {"small": FEW, "big": MANY},
        "prompt_tokens": PROMPT,
        "tokens": TOKENS,
        "drafts": {"rows": DRAFT_ROWS, "acceptance": ACCEPTANCE},
        "seconds": seconds,
        "small_alone_tokens_per_s": round(alone, 1),
        "fair_share_tokens_per_s": round(fair, 1),
        "tokens_per_s": {name: {t: round(r, 1) for t, r in found.items()} for name, found in together.items()},
        "small_over_fair_share": {name: round(found["small"] / fair, 3) for name, found in together.items()},
        "small_over_fair_share_without_tenants": round(unprotected / fair, 3),
        "equal_tenants_tokens_per_s": {tenant: round(rate, 1) for tenant, rate in equal.items()},
        "jain": round(jain(list(equal.values())), 4),
    }


def _unprotected(engine: TorchEngine, scripts: Sequence[Script], guess: Guesser, cost, seconds: float) -> float:
    """The few sessions' tokens a second among the many, where all are one tenant's."""
    boards = many("all", FEW + MANY, scripts, guess)
    loop = Loop(engine, boards, cost=deepcopy(cost))
    loop.run(seconds / 4)
    before = sum(board.tokens for board in boards[:FEW])
    took = loop.run(seconds)
    found = (sum(board.tokens for board in boards[:FEW]) - before) / took
    loop.verifier.drain()
    return found
