"""A window, its owner and what the owner says, for the tests of both."""

from __future__ import annotations

from edge.session import Request, Timing
from edge.window import Window
from protocol.messages import (
    Commit,
    Limits,
    Opened,
)
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes

PROMPT = (11, 12, 13)
LIMITS = Limits(draft_rows=8, ahead=16, context=200, vocab_size=100)
TIMING = Timing()
SESSION = 5


def window(**options) -> Window:
    request = Request(SESSION, "t", PROMPT, Sampling(), options.pop("max_tokens", 50))
    return Window("a.b", request, timing=TIMING, now=0.0, **options)


def opened(*, verifier="v", epoch=0, handle=7, length=3, limits=LIMITS) -> Opened:
    return Opened(SESSION, epoch, verifier, handle, length, limits, 60_000)


def commit(before, ids, *, verifier="v", epoch=0, handle=7, **options) -> Commit:
    """Facts behind the whole text `before`, as that owner would sign them."""
    hash = prefix_hashes(owner_hash(SESSION, verifier, epoch), before)[-1]
    return Commit(handle, epoch, len(before), hash, Ids(ids), **options)


def owned(**options) -> Window:
    """> open, < opened; nothing is waiting to be published."""
    limits = options.pop("limits", LIMITS)
    session = window(**options)
    session.tick(0.0)
    session.receive(opened(limits=limits, length=session.frontier), 0.0)
    session.take()
    return session


def said(session: Window) -> list:
    return [send.message for send in session.take()]


def grow(session: Window, ids) -> list:
    """A chain of guesses behind the likeliest tip."""
    tip = session.tree.root
    while tip.children:
        tip = next(iter(tip.children.values()))
    nodes = []
    for id in ids:
        tip = session.guess(tip, id, 0.9)
        nodes.append(tip)
    return nodes
