"""Ledgers that grow as a test wishes, without a verifier."""

from __future__ import annotations

import itertools

from cloud.ledger import Ledger
from protocol.messages import Limits, Open
from protocol.sampling import Sampling
from protocol.text import Ids
from tests.toys import TARGET

PROMPT = (3, 4, 5, 6, 7)
keys = itertools.count(1)


def make_ledger(session: int, have: tuple[int, ...] = (), device: str = "acme.a", **more) -> Ledger:
    asked = {"prompt_len": len(PROMPT), "sampling": Sampling(), "max_tokens": 5000, **more}
    opened = Open(session, 0, TARGET, ids=Ids((*PROMPT, *have)), **asked)
    return Ledger(device, opened, verifier="v", handle=0, key=next(keys), limits=Limits(8, 64, 1 << 20, 64), now=0.0)


def grow(ledger: Ledger, tokens: int) -> None:
    """Steps of which each draws one token."""
    for _ in range(tokens):
        ledger.commit([1 + ledger.frontier % 60], 0.0)
        ledger.usage.root_rows += 1
        ledger.usage.bytes_out += 20
