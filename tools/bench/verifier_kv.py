"""Sixty-four sessions in the KV memory of eight."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from itertools import islice

from cloud.engines.base import Outcome
from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load
from cloud.ledger import Ledger
from cloud.probe import probe
from cloud.scheduler import Step
from cloud.usage import Observer, Usage
from protocol.sampling import Sampling
from tools.bench.engine import passages
from tools.bench.loop import Board, Loop, many, right_so_often, write_scripts
from tools.models import prepare

SESSIONS, FIT = 64, 8
PROMPT, TOKENS, DRAFT_ROWS = 64, 48, 8
ACCEPTANCE = 0.85
PROBE_S = 6.0
ROOMY = 4 << 30  # bytes: all sessions fit
PAUSES_S = (0.3, 0.6, 1.2, 2.4)  # of boards that take their time


class Books(Observer):
    """What all sessions used, and how the memory was."""

    def __init__(self) -> None:
        self.total = Usage()
        self.engine_s = 0.0
        self.evictions = 0

    def stepped(self, step: Step, outcome: Outcome, queue_s: float) -> None:
        self.engine_s += outcome.seconds

    def evicted(self, ledger: Ledger) -> None:
        self.evictions += 1

    def closed(self, ledger: Ledger) -> None:
        for field in fields(Usage):
            setattr(self.total, field.name, getattr(self.total, field.name) + getattr(ledger.usage, field.name))


def measure(*, threads: int, quick: bool) -> dict[str, object]:
    """Two scenes: boards whose guesses are always there, and boards that take their time and are waited for."""
    _, target = prepare("smollm2")
    prompt = 32 if quick else PROMPT
    tokens = 24 if quick else TOKENS
    numerics = Numerics(mode="exact")
    roomy = load(target, numerics, threads=threads, max_draft=DRAFT_ROWS, kv_bytes=ROOMY)
    scripts = write_scripts(roomy, passages(target, SESSIONS, prompt), tokens)
    roomy.open(0, scripts[0].prompt, Sampling(), prompt + tokens)
    blocks = FIT * roomy.blocks(0, prompt + tokens)
    kv_bytes = blocks * -(-ROOMY // roomy.num_blocks)
    engine = load(target, numerics, threads=threads, max_draft=DRAFT_ROWS, kv_bytes=kv_bytes)
    cost = probe(engine, PROBE_S, DRAFT_ROWS)
    guess = right_so_often(ACCEPTANCE, DRAFT_ROWS)

    def play(boards: list[Board]) -> dict[str, object]:
        books = Books()
        for board in boards:
            board.scripts = islice(board.scripts, 1)
        loop = Loop(engine, boards, draft_rows=DRAFT_ROWS, observers=[books], cost=deepcopy(cost))
        took = loop.run(until=lambda: all(board.texts for board in boards))
        total = books.total
        rows = total.root_rows + total.draft_rows + total.prefill_rows + total.rebuilt_rows
        return {
            "finished": sum(len(board.texts) for board in boards),
            "identical": all(tuple(text) == board.expected[0] for board in boards for text in board.texts),
            "evictions": books.evictions,
            "rebuilt_rows": total.rebuilt_rows,
            "rebuilding_share_of_rows": round(total.rebuilt_rows / rows, 3),
            "tokens_per_s": round(total.committed / took, 1),
            "engine_s": round(books.engine_s, 1),
            "seconds": round(took, 1),
        }

    slow = many("t", SESSIONS, scripts, guess, patience_ms=None)
    for i, board in enumerate(slow):
        board.pause_s = PAUSES_S[i % len(PAUSES_S)]
    return {
        "model": engine.info.model,
        "numerics": engine.info.numerics,
        "threads": threads,
        "sessions": SESSIONS,
        "prompt_tokens": prompt,
        "tokens": tokens,
        "kv_bytes": kv_bytes,
        "blocks": engine.num_blocks,
        "always ready": play(many("t", SESSIONS, scripts, guess)),
        "take their time": play(slow),
    }
