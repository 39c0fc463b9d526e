"""A short run before anybody is served: that the parts of vLLM which are replaced do what they are relied on for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cloud.engines.base import Plan, Work
from cloud.engines.walk import walk
from protocol.errors import NumericsError
from protocol.sampling import Sampling, choose

if TYPE_CHECKING:
    from cloud.engines.vllm.engine import VllmEngine

KEY = -1
PROMPT, NEW, DRAFT, CHUNK = 20, 9, 3, 7  # ids
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=1))
CLOSE = {"float32": 1e-2, "bfloat16": 1.0}
"""Of logits: other batches have other bits. Behind another text they are off by whole units."""


def try_out(engine: VllmEngine) -> None:
    """Decode a text plainly, and again in chunks with drafts that are wrong and right in turn.

    Raises NumericsError where a token is not the one that its logits and noise give, where a draft is not certified by
    equality, or where the logits behind drafts are not close to the plain ones.
    """
    for sampling in SAMPLINGS:
        plain, expected = _decode(engine, sampling, None)
        drafted, found = _decode(engine, sampling, plain)
        for i in range(NEW):
            position = PROMPT + i
            off = float((found[position] - expected[position]).abs().max())
            if not off <= CLOSE[engine.info.numerics.rpartition("-")[2]]:
                raise _refusal(f"logits at position {position} are off by {off:.3g} when drafts were verified before")
            if drafted[i] != plain[i]:
                break  # so close a race that other bits decide it; what follows is another text


def _decode(engine: VllmEngine, sampling: Sampling, known: list[int] | None) -> tuple[list[int], dict[int, Tensor]]:
    """NEW ids or more, and the logits of their positions. known: what a plain run gave, to make drafts of."""
    vocab = engine.info.vocab_size
    logits: dict[int, Tensor] = {}

    def keep(name: str, position: int, row: Tensor) -> None:
        logits[position] = row.float().cpu().clone()

    ids: list[int] = []
    engine.sampler.observe = keep
    engine.open(KEY, [i * 97 % vocab for i in range(PROMPT)], sampling, PROMPT + NEW)
    try:
        turn = 0
        while len(ids) < NEW:
            left = engine.pending(KEY)
            draft: list[int] = []
            if known is not None and left == 1:
                draft = known[len(ids) : len(ids) + DRAFT]
                if turn % 2 == 0:
                    draft = [(id + 1) % vocab for id in draft]
                turn += 1
            rows = left if known is None or left == 1 else min(CHUNK, left - 1)
            outcome = engine.step(Plan([Work(KEY, rows, draft, range(-1, len(draft) - 1))]))
            accepted = outcome.accepted.get(KEY, [])
            if outcome.failed or outcome.rows != rows + len(draft):
                raise _refusal(
                    f"a step of {rows} + {len(draft)} rows ran {outcome.rows}, {outcome.failed or 'unasked'}"
                )
            if bool(accepted) != (rows == left):
                raise _refusal(f"{len(accepted)} tokens were drawn behind {rows} of {left} pending ids")
            if accepted:
                first = PROMPT + len(ids)
                drawn = [choose(logits[first + i].numpy(), first + i, sampling) for i in range(1 + len(draft))]
                if accepted != walk(drawn, draft, range(-1, len(draft) - 1))[0]:
                    raise _refusal(f"{accepted} were committed behind a draft of {draft}, where {drawn} are drawn")
            ids += accepted
    finally:
        engine.close(KEY)
        engine.sampler.observe = None
    return ids, logits


def _refusal(what: str) -> NumericsError:
    return NumericsError(
        what,
        where="the trial of vLLM",
        remedy='This vLLM was built or changed in a way that is not known here: install it anew, or use kind = "torch"',
    )
