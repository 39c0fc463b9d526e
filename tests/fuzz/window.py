"""The board's window between an owner that tells the truth, others that do not, and a link that comes and goes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from edge.drafters.base import Candidate
from edge.session import Request, Timing
from edge.window import Window
from protocol import topics
from protocol.messages import (
    Close,
    Commit,
    Draft,
    Error,
    ErrorCode,
    Limits,
    Open,
    Opened,
    Resync,
    VerifierState,
    decode,
    encode,
)
from protocol.sampling import Sampling
from protocol.text import Ids, extend_hash, owner_hash, prefix_hashes
from tests.fuzz.choices import Choices
from tests.fuzz.trees import check_tree

PROMPT = (1, 0, 2)
TRUTH = (*PROMPT, 1, 1, 0, 2, 1, 0, 0, 3, 1, 2)  # what the target writes; all of it is known to the owner
VOCAB = 5
OUTSIDE = VOCAB  # an id that the target does not have
SESSION, OTHER_SESSION = 5, 6
DEVICE, TARGET = "a.b", "t"
VERIFIERS = ("v", "w")
LIMITS = (Limits(6, 8, 40, VOCAB), Limits(4, 1, 40, VOCAB, trees=False), Limits(1, 16, 40, VOCAB))
CODES = (
    ErrorCode.UNKNOWN_SESSION,
    ErrorCode.NO_ROOM,
    ErrorCode.DRAINING,
    ErrorCode.DIVERGED,
    ErrorCode.UNKNOWN_PREFIX,
    ErrorCode.OVER_LIMIT,
    ErrorCode.BAD_MESSAGE,
    "a-code-of-later",
)
MAX_EVENTS = 40
PATIENCE_S = 60.0  # beyond the longest back-off
SOON = 4  # turns that may follow each other without time passing: leave, open, and once more


@lru_cache(maxsize=256)
def hashes_of(verifier: str, epoch: int) -> list[int]:
    """Of the beginnings of TRUTH, as that owner signs them."""
    return prefix_hashes(owner_hash(SESSION, verifier, epoch), TRUTH)


class CheckedWindow:
    """A window, and beside it what it must say: after each event `check` compares the two.

    Whoever the window has chosen commits parts of TRUTH. All others sign something else, under the same handle and
    epoch where they like. frontier: how much of TRUTH the window must have, no token more or less.
    """

    def __init__(self, have: int = 0, *, former: str = "") -> None:
        self.now = 0.0
        request = Request(SESSION, TARGET, PROMPT, Sampling(), len(TRUTH) - len(PROMPT))
        self.start = self.frontier = len(PROMPT) + have
        self.window = Window(
            DEVICE, request, timing=Timing(), now=self.now, committed=TRUTH[len(PROMPT) : self.start], former=former
        )
        self._moved = self.start
        self._epoch = 0
        self.check()

    # -- what comes ---------------------------------------------------------------------------------------------------

    def opened(
        self, verifier: int, late: int = 0, *, handle: int = 0, length: int = 0, limits: int = 0, session: int = SESSION
    ) -> None:
        """late: epochs before the window's own, negative for one that it has not reached."""
        window, epoch = self.window, max(0, self.window.epoch - late)
        takes = not window.owned and not window.done and epoch == window.epoch and session == SESSION
        owner = (window.verifier, window.epoch)
        window.receive(Opened(session, epoch, VERIFIERS[verifier], handle, length, LIMITS[limits], 60_000, 0), self.now)
        if takes:
            assert window.owned and (window.verifier, window.limits) == (VERIFIERS[verifier], LIMITS[limits])
            assert len(window.tree) <= LIMITS[limits].draft_rows
            assert len(window.unsent) == len(window.tree), "a new owner knows no guesses"
        else:
            assert (window.verifier, window.epoch) == owner, "an owner was changed without being left"
        self.check()

    def commit(
        self,
        base: int,
        num_ids: int,
        *,
        verifier: int | None = None,
        late: int = 0,
        handle: int = 0,
        wrong_hash: bool = False,
        contradicts: bool = False,
        outside: bool = False,
        seq: int = 0,
        held: int = 0,
    ) -> None:
        """verifier: who signs, the owner if None; only the owner's tokens are the truth.

        contradicts: the owner takes back what it committed; outside: it ends with an id that there is not.
        """
        window = self.window
        name = window.verifier if verifier is None else VERIFIERS[verifier]
        epoch = max(0, window.epoch - late)
        by_owner = window.owned and (name, epoch) == (window.verifier, window.epoch)
        ids = list(TRUTH[base : base + num_ids])
        hash = hashes_of(name, epoch)[min(base, len(TRUTH))] ^ wrong_hash
        contradicts = contradicts and base < window.frontier and bool(ids)
        if contradicts or not by_owner:
            ids = [(id + 1) % VOCAB for id in ids]
        if outside:
            ids.append(OUTSIDE)
        whole = base + len(ids) == len(TRUTH) and not outside
        believed = (
            by_owner
            and not window.done
            and handle == window._handle
            and not wrong_hash
            and len(PROMPT) <= base <= window.frontier
        )
        window.receive(
            Commit(handle, epoch, base, hash, Ids(ids), seq, held, "length" if whole else "", 61_000, 4, 20), self.now
        )
        if believed and (contradicts or outside):
            assert not window.owned and window.epoch == epoch + 1, "who contradicts itself is left"
        elif believed:
            self.frontier = max(self.frontier, base + len(ids))
            assert bool(window.finish) == whole
        self.check()

    def error(self, code: int, late: int = 0, *, by_handle: bool = False, retry_ms: int | None = None) -> None:
        session, handle = (0, self.window._handle) if by_handle else (SESSION, None)
        if handle == -1:
            session, handle = OTHER_SESSION, 9
        before = (self.window.epoch, self.window.failure)
        error = Error(session, max(0, self.window.epoch - late), CODES[code], "", retry_ms, handle)
        self.window.receive(error, self.now)
        if error.epoch != before[0] or session == OTHER_SESSION:
            assert (self.window.epoch, self.window.failure) == before
        self.check()

    def state(self, verifier: int, status: str) -> None:
        self.window.receive(VerifierState(VERIFIERS[verifier], status), self.now)
        self.check()

    def link(self, up: bool) -> None:
        self.window.link_up(self.now) if up else self.window.link_down("cut")
        self.check()

    def unserved(self) -> None:
        self.window.unserved(self.now)
        self.check()

    def tick(self, seconds: float) -> None:
        """Time passes; the window is called until it wants to wait."""
        self.now += seconds
        for _ in range(SOON):
            self.window.tick(self.now)
        self.check()
        assert self.window.wake_at() > self.now, "the window never comes to rest"

    # -- what the board does ------------------------------------------------------------------------------------------

    def guess(self, place: int, id: int, probability: float) -> None:
        """Behind the root or one of the guesses, where a policy may."""
        window = self.window
        nodes = [window.tree.root, *window.tree]
        parent = nodes[place % len(nodes)]
        if window.can_guess(parent) and (window.branches or not parent.children):
            parent.note.candidates = parent.note.candidates or [Candidate(id, probability)]
            window.guess(parent, id, probability)

    def flush(self) -> None:
        window = self.window
        self.check()
        unsent = set(window.unsent) if window.may_send else set()
        window.flush(self.now)
        drafts = [send.message for send in self.check() if isinstance(send.message, Draft)]
        assert len(drafts) == bool(unsent)
        for draft in drafts:
            named: list[int] = []  # the hash of each guess's text
            depths: list[int] = []
            for i, (id, delta) in enumerate(zip(draft.ids, draft.deltas or [1] * len(draft.ids), strict=True)):
                hash, depth = (draft.hash, draft.base) if delta > i else (named[i - delta], depths[i - delta])
                named.append(extend_hash(hash, id))
                depths.append(depth + 1)
                node = window.tree.find(depths[-1], named[-1])
                assert node is not None and node.note.seq is not None, "a draft of what was not guessed"
                unsent.discard(node)
            assert draft.have == self.frontier and window.tree.find(draft.base, draft.hash) is not None
            assert len(draft.ids) <= window.limits.draft_rows and (not draft.deltas or window.limits.trees)
        assert not unsent, "a guess was left out"

    def stop(self, how: str) -> None:
        {
            "cancel": self.window.cancel,
            "leave": self.window.leave,
            "give up": lambda: self.window.give_up_drafting(self.now),
        }[how]()
        self.check()

    def settle(self) -> None:
        """From now on the link is up and the owner answers: the whole text comes, unless nobody wants it any more."""
        window = self.window
        if not window._link_up:
            self.link(True)
        until = self.now + PATIENCE_S
        while not window.done and self.now < until:
            if window.owned:
                self.commit(self.frontier, 5, handle=window._handle)
            else:
                self.tick(max(0.0, window.wake_at() - self.now))
                self.opened(0, length=self.frontier)
        assert window.done, f"nothing came of a good link in {PATIENCE_S} s"

    # -- what is true -------------------------------------------------------------------------------------------------

    def check(self) -> Sequence:
        """Returns what was sent since the last call."""
        window = self.window
        assert window.text == list(TRUTH[: self.frontier]), "the text is not what the owner committed"
        for ids, kept in window.moves:
            assert [node.id for node in kept] == ids[: len(kept)]
            assert ids == window.text[self._moved : self._moved + len(ids)], "the drafter was told another text"
            self._moved += len(ids)
        window.moves.clear()
        assert all(id in window.text for _, _, id in window.outcomes)
        window.outcomes.clear()
        assert self._moved == self.frontier
        assert window.tally.committed == self.frontier - self.start >= window.tally.guessed >= window.tally.used
        assert window.epoch >= self._epoch
        self._epoch = window.epoch
        if window.finish:
            assert self.frontier == len(TRUTH)
        if window.owned:
            assert window._hashes == hashes_of(window.verifier, window.epoch)[len(PROMPT) : self.frontier + 1]
            assert len(window.tree) <= window.num_rows
        check_tree(window.tree, window.text, window.tree.root.hash)
        assert window.tree.root.note.path == 1.0
        unsent = set(window.unsent)
        for node in window.tree:
            assert (node in unsent) == (node.note.seq is None) and 0.0 < node.note.path <= 1.0
            unsent.discard(node)
        assert not unsent
        sends = window.take()
        for send in sends:
            assert decode(encode(send.message)) == send.message
            self._check_sent(send.topic, send.message)
        return sends

    def _check_sent(self, topic: str, message: object) -> None:
        window = self.window
        match message:
            case Open():
                assert topics.parse(topic).kind == "open" and list(message.ids) == window.text
                assert (message.session, message.epoch) == (SESSION, window.epoch)
            case Draft() | Resync():
                assert topic == topics.draft_topic(DEVICE, window.verifier)
                assert (message.handle, message.epoch, message.have) == (window._handle, window.epoch, self.frontier)
            case Close():
                assert topics.parse(topic).kind == "draft"
            case _:
                raise AssertionError(f"a board says no {message}")


def fuzz(data: bytes) -> None:
    """One story: bytes choose where the session begins, then what happens to it."""
    choices = Choices(data)
    below = choices.below
    session = CheckedWindow(below(4), former=VERIFIERS[0] if below(4) == 3 else "")
    session.tick(0.0)
    events = 0
    while choices.left and events < MAX_EVENTS:
        events += 1
        late = (0, 0, 0, 1, 2, -1)
        match below(16):
            case 0:
                session.opened(
                    below(2),
                    late[below(6)],
                    handle=below(2),
                    length=len(PROMPT) + below(10),
                    limits=below(len(LIMITS)),
                    session=SESSION if below(8) else OTHER_SESSION,
                )
            case 1 | 2 | 3 | 4:  # the owner goes on, or says again what it said
                handle = max(0, session.window._handle)
                back, seq = below(4), (session.window._seq - below(3)) % 256
                session.commit(session.frontier - back, back + below(4), handle=handle, seq=seq, held=below(8))
            case 5:  # somebody else, or the owner out of its mind
                session.commit(
                    max(0, session.frontier + 2 - below(6)),
                    below(6),
                    verifier=(None, 0, 1)[below(3)],
                    late=late[below(6)],
                    handle=below(2),
                    wrong_hash=below(4) == 3,
                    contradicts=below(4) == 3,
                    outside=below(8) == 7,
                    seq=below(256),
                )
            case 6:
                session.error(
                    below(len(CODES)),
                    late[below(6)],
                    by_handle=bool(below(2)),
                    retry_ms=(None, 0, 500, 60_000)[below(4)],
                )
            case 7:
                session.state(below(2), ("up", "draining", "gone")[below(3)])
            case 8:
                session.link(bool(below(2)))
            case 9:
                session.unserved()
            case 10 | 11:
                session.tick((0.0, 1 / 64, 0.25, 0.5, 1.0, 4.0, 8.0)[below(7)])
            case 12 | 13:
                for _ in range(1 + below(4)):
                    session.guess(below(8), below(VOCAB), (0.9, 0.5, 0.0)[below(3)])
                if below(2):
                    session.flush()
            case 14:
                session.flush()
            case 15:
                session.stop(("give up", "give up", "cancel", "leave")[below(4)])
    session.settle()
