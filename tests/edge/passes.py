"""A window whose owner has answered, and passes of a drafter that a policy asks for."""

from __future__ import annotations

from edge.drafters.base import Candidate
from edge.session import Request, Timing
from edge.window import Window
from protocol.messages import Commit, Limits, Opened
from protocol.sampling import Sampling
from protocol.text import Ids, owner_hash, prefix_hashes
from protocol.tree import Node

PROMPT = (11, 12, 13)
SURE = [(1, 0.98), (2, 0.01), (3, 0.01)]
UNSURE = [(1, 0.5), (2, 0.3), (3, 0.1)]


def window(
    *, rows: int = 40, trees: bool = True, max_tokens: int = 100, step_us: int = 100_000, patience_s: float = 0.0
) -> Window:
    request = Request(5, "t", PROMPT, Sampling(), max_tokens, (), patience_s)
    session = Window("a.b", request, timing=Timing(), now=0.0)
    session.tick(0.0)
    session.receive(Opened(5, 0, "v", 7, 3, Limits(rows, 64, 200, 100, trees), step_us), 0.0)
    return session


def commit(session: Window, ids) -> None:
    hash = prefix_hashes(owner_hash(5, "v", 0), session.text)[-1]
    session.receive(Commit(7, 0, session.frontier, hash, Ids(ids), session._seq % 256, 99), 0.0)


def evaluate(policy, session: Window, nodes: list[Node], ranked=SURE) -> None:
    """What a pass of the drafter leaves behind."""
    for node in nodes:
        node.note.row = object()
        node.note.candidates = [Candidate(id, p) for id, p in ranked][: policy.candidates]


def passes(policy, session: Window, most: int = 100, ranked=SURE) -> list[list[Node]]:
    """Draft until the policy wants no more."""
    evaluate(policy, session, [session.tree.root], ranked)
    done = []
    while len(done) < most and (nodes := policy.grow(session, 0.0)):
        done.append(nodes)
        evaluate(policy, session, nodes, ranked)
    return done


def depth(session: Window) -> int:
    return max((node.position for node in session.tree), default=session.frontier - 1) - session.frontier + 1
