"""The verifier's ledger under a device that may say anything, and steps that come in any order with it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from cloud.ledger import Ledger, LedgerError
from protocol.messages import Draft, FinishReason, Limits, Open, decode, encode
from protocol.sampling import Sampling
from protocol.text import Ids, extend_hash, owner_hash, prefix_hashes
from tests.fuzz.choices import Choices
from tests.fuzz.trees import check_tree

PROMPT = (1, 0, 2)
STOP = 3
VOCAB = 5
OUTSIDE = VOCAB  # an id that the target does not have
SESSION, VERIFIER = 5, "v"
LIMITS = (Limits(6, 8, 40, VOCAB), Limits(4, 3, 12, VOCAB, trees=False), Limits(1, 1, 6, VOCAB))
PRICES = (0.0, 0.05, 0.3, 0.9, 2.0)
MAX_EVENTS = 40


class CheckedLedger:
    """A ledger, and beside it what it must say: its facts, their hashes, and all that was ever guessed.

    After each event `check` compares the two. Nothing but LedgerError is let through, and that only where a draft or a
    claim breaks a limit.
    """

    def __init__(
        self, limits: Limits, *, have: Sequence[int] = (), max_tokens: int = 12, patience_ms: int | None = 0
    ) -> None:
        self.limits, self.now = limits, 0.0
        self.facts = [*PROMPT, *have]
        self._max_tokens = max_tokens
        opened = self.opening(0, len(self.facts), patience_ms)
        self.ledger = Ledger(
            "a.b", opened, verifier=VERIFIER, handle=0, key=1, limits=limits, now=self.now, quiet_s=2.5
        )
        self._own(0)
        self.check()

    def opening(self, epoch: int, have: int, patience_ms: int | None) -> Open:
        ids = Ids(self.facts[:have])
        return Open(SESSION, epoch, "t", len(PROMPT), ids, Sampling(), self._max_tokens, (STOP,), patience_ms)

    def _own(self, epoch: int) -> None:
        self.epoch = epoch
        self.hashes = prefix_hashes(owner_hash(SESSION, VERIFIER, epoch), self.facts)
        self.claimed: set[tuple[int, int]] = set()
        self.device_has = self.ledger.device_has

    # -- the device ---------------------------------------------------------------------------------------------------

    def draft(
        self,
        length: int,
        behind: Sequence[int],
        ids: Sequence[int],
        deltas: Sequence[int] = (),
        *,
        lead: int = 0,
        foreign: bool = False,
    ) -> None:
        """Guesses for what follows the first `length` facts and the guesses `behind`; foreign: of another text."""
        length = min(length, len(self.facts))
        hash = self.hashes[length] ^ foreign
        for id in behind:
            hash = extend_hash(hash, id)
        base = length + len(behind)
        draft = Draft(0, self.epoch, 0, base, hash, Ids(ids), min(lead, base), Ids(deltas))
        before = len(self.ledger.tree)
        refused = self._breaks_limits(draft) or self._cannot_have(draft.have)
        try:
            grafted = self.ledger.graft(draft, self.now)
        except LedgerError:
            assert refused
        else:
            assert not refused
            self._claim(draft)
            self.device_has = max(self.device_has, draft.have)
            assert grafted.new + grafted.known + grafted.stale == len(ids)
            assert len(self.ledger.tree) >= before + grafted.new
            if length == len(self.facts) and not behind and not foreign and not before:
                assert grafted.new, "a guess right behind the text was dropped, though there was room"
        self.check()

    def resync(self, have: int, *, foreign: bool = False) -> None:
        """The device says how much it has."""
        hash = self.hashes[min(have, len(self.facts))] ^ foreign
        try:
            self.ledger.heard(have, hash, self.now)
        except LedgerError:
            assert foreign or self._cannot_have(have)
        else:
            assert not foreign and not self._cannot_have(have)
            self.device_has = max(self.device_has, have)
            news = self.ledger.news(have, self.now)
            assert (list(news.ids), news.hash) == (self.facts[have:], self.hashes[have])
            assert decode(encode(news)) == news
        self.check()

    def renew(self, have: int, patience_ms: int | None) -> None:
        """The device opens again, with the part of the text that it has."""
        opened = self.opening(self.epoch + 1, min(max(have, len(PROMPT)), len(self.facts)), patience_ms)
        assert self.ledger.continues(opened)
        self.ledger.renew(opened, self.now)
        self._own(opened.epoch)
        assert self.device_has == opened.length
        answer = self.ledger.opened(self.now, 1000)
        assert answer.length == len(self.facts) and decode(encode(answer)) == answer
        self.check()

    def claims_another(self, have: int, id: int) -> None:
        """The device opens again with a text that is not this one, or longer than this one."""
        text = [*self.facts[: max(have, len(PROMPT))], id]
        opened = Open(SESSION, self.epoch + 1, "t", len(PROMPT), Ids(text), Sampling(), self._max_tokens, (STOP,))
        assert self.ledger.continues(opened) == (text == self.facts[: len(text)])
        self.check()

    def alone(self) -> None:
        self.ledger.left_alone()
        assert self.ledger.due_at() <= self.now or self.ledger.due_at() == inf
        self.check()

    # -- the verifier -------------------------------------------------------------------------------------------------

    def commit(self, ids: Sequence[int], price: float) -> None:
        """A step draws at least one token, more than the text may have left perhaps."""
        if self.ledger.finish:
            return
        base, guessed = self.ledger.commit(ids, self.now)
        assert base == len(self.facts)
        for id in ids:
            self.facts.append(id)
            self.hashes.append(extend_hash(self.hashes[-1], id))
            if id == STOP or len(self.facts) >= self._end:
                break
        assert 0 <= guessed <= len(self.facts) - base
        assert all((base + i, self.hashes[base + i + 1]) in self.claimed for i in range(guessed))
        news = self.ledger.news(base, self.now, 60_000, price)
        assert (list(news.ids), news.hash) == (self.facts[base:], self.hashes[base])
        assert news.held == len(self.ledger.tree) and decode(encode(news)) == news
        self.ledger.learn()
        self.check()

    def evict(self) -> None:
        self.ledger.lose_cache(self.now)
        self.check()

    def admit(self) -> None:
        self.ledger.enter_cache(self.now)
        self.check()

    def charge(self, rows: int, draft_rows: int, drew: bool) -> None:
        self.ledger.charge(rows + drew, draft_rows, drew, 0.01)
        usage = self.ledger.usage
        assert min(usage.root_rows, usage.draft_rows, usage.prefill_rows, usage.rebuilt_rows) >= 0
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.check()

    # -- what is true -------------------------------------------------------------------------------------------------

    @property
    def _end(self) -> int:
        return min(len(PROMPT) + self._max_tokens, self.limits.context)

    def _cannot_have(self, have: int) -> bool:
        return not len(PROMPT) <= have <= len(self.facts)

    def _breaks_limits(self, draft: Draft) -> bool:
        deltas, num_ids = draft.deltas, len(draft.ids)
        return (
            draft.base < len(PROMPT)
            or num_ids > self.limits.draft_rows
            or (bool(deltas) and not self.limits.trees)
            or (bool(deltas) and len(deltas) != num_ids)
            or any(not 1 <= delta <= i + 1 for i, delta in enumerate(deltas))
            or OUTSIDE in draft.ids
        )

    def _claim(self, draft: Draft) -> None:
        """Remember which texts a draft has named."""
        named: list[tuple[int, int]] = []  # (position, hash) of each guess
        for i, (id, delta) in enumerate(zip(draft.ids, draft.deltas or [1] * len(draft.ids), strict=True)):
            position, hash = (draft.base - 1, draft.hash) if delta > i else named[i - delta]
            named.append((position + 1, extend_hash(hash, id)))
        self.claimed.update(named)

    def check(self) -> None:
        ledger, facts = self.ledger, self.facts
        assert ledger.text == facts, "what was committed has changed"
        assert ledger.hashes == self.hashes[len(PROMPT) :]
        whole = len(facts) >= self._end
        stopped = len(facts) > len(PROMPT) and facts[-1] == STOP
        assert bool(ledger.finish) == (whole or stopped)
        assert (ledger.finish == FinishReason.STOP) == stopped
        assert ledger.device_has == self.device_has
        assert ledger.may_run() <= (len(facts) - ledger.device_has < self.limits.ahead)

        check_tree(ledger.tree, facts, self.hashes[-1])
        assert len(ledger.tree) <= self.limits.draft_rows
        for node in ledger.tree:
            assert (node.position, node.hash) in self.claimed, "nobody has guessed this behind this text"
            assert node.id < VOCAB
            assert self.limits.trees or len(node.parent.children) == 1
        assert len(ledger._early) <= 4

        worth = [ledger.tree.root]
        for node in worth:
            left = 1.0
            for chance, child in ledger.guesses_behind(node):
                assert 0.0 <= chance <= left and child.position < self._end - 1
                left -= chance
                worth.append(child)
        assert ledger.idle_since <= ledger.due_at() <= ledger.due_at(crowded=True) <= inf


def fuzz(data: bytes) -> None:
    """One story: bytes choose the session, then what happens to it."""
    choices = Choices(data)
    below = choices.below
    have = [below(STOP) for _ in range(below(4))]
    session = CheckedLedger(
        LIMITS[below(len(LIMITS))], have=have, max_tokens=1 + below(14), patience_ms=(0, 250, None)[below(3)]
    )
    events = 0
    while choices.left and events < MAX_EVENTS:
        events += 1
        match below(13):
            case 0 | 1 | 2:
                length = len(session.facts) - below(5)
                behind = choices.several(3, VOCAB)
                ids = choices.several(6, VOCAB + 1) or [below(VOCAB)]
                deltas = [1 + below(4) for _ in ids] if below(3) == 0 else ()
                session.draft(max(0, length), behind, ids, deltas, lead=below(6), foreign=below(8) == 7)
            case 3 | 4 | 5:
                session.commit([below(VOCAB) for _ in range(1 + below(4))], PRICES[below(len(PRICES))])
            case 6:  # just what was guessed
                path, node = [], session.ledger.tree.root
                while node.children:
                    node = list(node.children.values())[below(len(node.children))]
                    path.append(node.id)
                session.commit([*path, below(VOCAB)], PRICES[below(len(PRICES))])
            case 7:
                session.resync(len(session.facts) + 1 - below(8), foreign=below(8) == 7)
            case 8:
                session.renew(len(session.facts) - below(5), (0, 250, None)[below(3)])
            case 9:
                session.claims_another(len(session.facts) - below(4), below(VOCAB))
            case 10:
                session.wait((0.0, 1 / 64, 0.5, 3.0)[below(4)])
            case 11:
                session.evict() if below(2) else session.admit()
            case 12:
                session.alone() if below(4) == 0 else session.charge(below(8), below(4), bool(below(2)))
