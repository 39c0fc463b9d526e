"""What the board's drafts hold, and whom a session asks first after a restart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cloud.ledger import Ledger
from edge.guesses import spanning
from protocol import topics
from protocol.messages import (
    Commit,
    Draft,
    Limits,
    Open,
)
from protocol.sampling import Sampling
from protocol.text import Ids
from protocol.tree import DraftTree
from tests.edge.windows import PROMPT, SESSION, TIMING, commit, owned, said, window

# -- what a draft holds -----------------------------------------------------------------------------------------------


def test_spanning_names_the_smallest_subtree():
    tree = DraftTree(13, 3, 0)
    a = tree.add(tree.root, 1)
    b = tree.add(a, 2)
    c = tree.add(b, 3)
    d = tree.add(b, 4)
    e = tree.add(d, 5)
    assert spanning(tree, {c}) == (b, [c])
    assert spanning(tree, {c, d}) == (b, [c, d])
    assert spanning(tree, {c, e}) == (b, [c, d, e])
    assert spanning(tree, {a, b, c, d, e}) == (tree.root, [a, b, c, d, e])


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("guess"), st.integers(0, 30), st.integers(0, 4)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 5), st.integers(0, 4)),
        st.tuples(st.just("hear"), st.integers(1, 3), st.just(0)),
    ),
    max_size=60,
)


def ids_of(tree: DraftTree) -> set[tuple[int, int, int]]:
    assert tree.root.hash
    return {(node.position, node.hash, node.id) for node in tree}


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.booleans())
def test_drafts_give_the_verifier_exactly_the_windows_tree(operations, trees):
    """Guess, flush and step in any order, commits arriving late in order: once all has arrived, both trees are one."""
    limits = Limits(12, 1000, 4000, 100, trees)
    session = owned(limits=limits, max_tokens=3000)
    request = Open(SESSION, 0, "t", 3, Ids(PROMPT), Sampling(), 3000)
    ledger = Ledger("a.b", request, verifier="v", handle=7, key=1, limits=limits, now=0.0)
    under_way: list[Commit] = []
    told = ledger.frontier

    def hear(number: int) -> None:
        for message in under_way[:number]:
            session.receive(message, 0.0)
        del under_way[:number]

    def flush() -> None:
        session.flush(0.0)
        for message in said(session):
            assert isinstance(message, Draft)
            ledger.graft(message, 0.0)

    for what, number, id in operations:
        if what == "guess":
            places = [session.tree.root, *session.tree]
            parent = places[number % len(places)]
            if session.can_guess(parent) and (trees or not parent.children):
                session.guess(parent, id, 0.5)
        elif what == "flush":
            flush()
        elif what == "hear":
            hear(number)
        else:  # the target goes down the verifier's tree for a while, then its own way
            accepted, at = [], ledger.tree.root
            for _ in range(number):
                if not at.children:
                    break
                at = list(at.children.values())[id % len(at.children)]
                accepted.append(at.id)
            ledger.commit([*accepted, id], 0.0)
            under_way.append(ledger.news(told, 0.0))
            told = ledger.frontier
    hear(len(under_way))
    flush()
    assert session.text == ledger.text
    assert ids_of(session.tree) == ids_of(ledger.tree)
    assert session.unsent == []


def test_after_a_restart_the_former_owner_is_asked_first_and_the_share_where_it_is_gone():
    """> open to v; the broker: nobody subscribes. > open to the target, in the same epoch."""
    session = window(committed=[1, 2], epoch=1, former="v")
    session.tick(0.0)
    (first,) = session.take()
    assert first.topic == topics.open_topic("a.b", "v") and first.message.epoch == 1
    session.unserved(0.1)
    session.tick(0.1)
    (second,) = session.take()
    assert second.topic == topics.open_topic("a.b", "t") and second.message.epoch == 1


def test_a_former_owner_that_does_not_answer_is_not_waited_for_long():
    """> open to v; silence. > open to the target, in the next epoch."""
    session = window(committed=[1, 2], epoch=1, former="v")
    session.tick(0.0)
    session.take()
    assert session.wake_at() < TIMING.open_s
    session.tick(session.wake_at())
    (second,) = session.take()
    assert second.topic == topics.open_topic("a.b", "t") and second.message.epoch == 2


def test_a_long_chain_that_nobody_believed_in_can_come_true():
    """Its probability is too small for a float: the window goes on all the same."""
    session = owned(limits=Limits(200, 200, 1000, 100), max_tokens=500)
    nodes = [session.tree.root]
    for i in range(80):
        nodes.append(session.guess(nodes[-1], i % 7, 0.0))
    text = [node.id for node in nodes[1:71]]
    session.receive(commit(PROMPT, text), 0.1)
    assert session.committed == text and len(session.tree) == 10
    assert all(0.0 < node.note.path <= 1.0 for node in session.tree)
