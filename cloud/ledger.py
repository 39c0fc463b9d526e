"""One session as the verifier knows it: facts, guesses and what the device has. Pure: time is an argument."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cloud.acceptance import Rates
from cloud.advice import Advice
from cloud.tenants import Contract
from cloud.usage import Usage
from protocol import topics
from protocol.messages import Commit, Draft, FinishReason, Limits, Open, Opened
from protocol.text import Ids, extend_hash, owner_hash, prefix_hashes
from protocol.tree import DraftTree, Node, parents_of

SESSION_FADE = 0.97  # of what was seen of a session's guesses, a guess


FIRST_AGES, AGES_APART = 8, 4


class LedgerError(ValueError):
    """A draft or a claim that cannot be: the session is quarantined."""


@dataclass(slots=True)
class Grafted:
    """What became of a draft's guesses. held: the draft waits for its predecessor."""

    new: int = 0
    stale: int = 0
    known: int = 0
    held: bool = False


class Ledger:
    """Append-only text of one session in the hands of one owner, with the tree of guesses behind it.

    text: [length] ids, prompt first; hashes: [length - prompt_len + 1], of the text at each length from prompt_len on.
    """

    def __init__(
        self,
        device: str,
        opened: Open,
        *,
        verifier: str,
        handle: int,
        key: int,
        limits: Limits,
        now: float,
        quiet_s: float = inf,
        contract: Contract | None = None,
        fleet: Rates | None = None,
    ) -> None:
        """contract: the tenant's; fleet: how its guesses fare, where this session is known too little."""
        self.device, self.session = device, opened.session
        self.tenant, self.verdict_topic = topics.tenant_of(device), topics.verdict_topic(device)
        self.verifier, self.handle, self.key, self.limits = verifier, handle, key, limits
        self.prompt_len, self.sampling, self.max_tokens = opened.prompt_len, opened.sampling, opened.max_tokens
        self.quiet_s = quiet_s
        self.contract = contract or Contract()
        self.acceptance = Rates(fleet or Rates(), SESSION_FADE)
        self.usage = Usage()
        self.waiting_since = self.resident_since = now
        self._worked_before = (0.0, 0)
        self._was_evicted = False
        self._to_rebuild = 0
        self.stop_ids = frozenset(opened.stop_ids)
        self.text = list(opened.ids)
        self.steps = 0
        self.renew(opened, now)
        self.end = min(self.prompt_len + opened.max_tokens, limits.context, self.contract.context or limits.context)
        self._end_reason = (
            FinishReason.CONTEXT if self.end < self.prompt_len + opened.max_tokens else FinishReason.LENGTH
        )
        self.finish = self._finish_at(len(self.text) - 1) if len(self.text) > self.prompt_len else ""
        if not self.finish and len(self.text) >= self.end:
            self.finish = self._end_reason

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def frontier(self) -> int:
        return len(self.text)

    @property
    def last_position(self) -> int:
        """The last position that this session may ever fill."""
        return self.end - 1

    def may_run(self) -> bool:
        """Whether the text may grow: it is not complete, and the device is not too far behind."""
        return not self.finish and self.frontier - self.device_has < self.limits.ahead

    @property
    def is_new(self) -> bool:
        """Whether the prompt is still to be read for the first time."""
        return not self.steps and not self._was_evicted

    @property
    def turn(self) -> tuple[float, int]:
        """(engine seconds, tokens) since the session was let into the KV cache."""
        worked_s, committed = self._worked_before
        return self.usage.engine_s - worked_s, self.usage.committed - committed

    def due_at(self, crowded: bool = False) -> float:
        """When the session wants a root row: at once with drafts, else when its patience is over, which is at least
        the tenant's in a crowd.

        The last token cannot be drafted to any use, so nobody waits for a draft of it. Never, while the device has not
        been heard of since long before the last commit: it may be gone, and another verifier may have its session.
        """
        if self.idle_since - self.heard_at >= self.quiet_s:
            return inf
        if len(self.tree) or self.frontier == self.last_position:
            return self.idle_since
        return self.idle_since + (self.crowded_patience_s if crowded else self.patience_s)

    def due_since(self, crowded: bool = False) -> float:
        """Since when a session that is due has been so."""
        return max(self.due_at(crowded), self._armed_at) if len(self.tree) else self.due_at(crowded)

    @property
    def deepest(self) -> int:
        """The last position whose guess is worth a row.

        The step draws one token behind the deepest accepted guess, so one for the last position buys nothing.
        """
        return min(self.last_position - 1, self.device_has + self.limits.ahead - 1)

    def guesses_behind(self, node: Node) -> list[tuple[float, Node]]:
        """The guesses for the position after `node` that are worth a row, with their chances if `node` is right."""
        if not node.children or node.position >= self.deepest:
            return []
        return self.acceptance.of_children(node.position - self.tree.root.position, node.children)

    def hash_at(self, length: int) -> int | None:
        """The hash of the text's first `length` ids, where that is at least the prompt."""
        at = length - self.prompt_len
        return self.hashes[at] if 0 <= at < len(self.hashes) else None

    def continues(self, opened: Open) -> bool:
        """Whether this is the text that the open asks for, as far as the device has it, or further."""
        return (
            (self.prompt_len, self.sampling, self.max_tokens) == (opened.prompt_len, opened.sampling, opened.max_tokens)
            and self.stop_ids == frozenset(opened.stop_ids)
            and self.text[: len(opened.ids)] == list(opened.ids)
        )

    # -- events ---------------------------------------------------------------------------------------------------

    def renew(self, opened: Open, now: float) -> None:
        """The device owns the text under this epoch: facts stay, guesses and what it was told go."""
        self.epoch = opened.epoch
        self._hold(inf if opened.patience_ms is None else opened.patience_ms / 1000)
        before = prefix_hashes(owner_hash(self.session, self.verifier, self.epoch), self.text)
        self.hashes = before[self.prompt_len :]
        self.tree = DraftTree(self.text[-1], len(self.text), self.hashes[-1])
        self._decided: tuple[Node, Sequence[int]] | None = None
        self.device_has = len(opened.ids)
        self.seq = 0
        self.spoke = False
        self._drafted_at: float | None = None
        self._armed_at = now
        self._ages = 0
        self.heard_at = self.idle_since = self.told_at = now
        self._early: list[tuple[Draft, int]] = []
        self._advice = Advice()
        self._told_advice: int | None = None
        self._told_step_us = 0

    def heard(self, have: int, hash: int | None, now: float) -> None:
        """The device says what it has. Raises LedgerError for a text that is not this one."""
        self.spoke = True
        self.heard_at = now
        if have > self.frontier or have < self.prompt_len:
            raise LedgerError(f"the device says it has {have} tokens of a text of {self.frontier}")
        if hash is not None and hash != self.hash_at(have):
            raise LedgerError(f"the device's text differs within its first {have} tokens")
        self.device_has = max(self.device_has, have)

    def left_alone(self) -> None:
        """The device drafts no more for this text: nobody waits for it."""
        self.patience_s = self.crowded_patience_s = 0.0

    def enter_cache(self, now: float) -> None:
        """The session has room in the KV cache from now on."""
        self.resident_since = now
        self._worked_before = self.usage.engine_s, self.usage.committed

    def lose_cache(self, now: float) -> None:
        """What was evaluated is lost and has to be evaluated again."""
        self.waiting_since = now
        self._was_evicted = True
        self._to_rebuild = self.frontier - 1

    def charge(self, rows: int, draft_rows: int, drew: bool, engine_s: float) -> None:
        """Account for a session's part of a step. rows: of its text; drew: whether the last of them drew a token."""
        usage = self.usage
        prefill = rows - drew
        rebuilt = min(prefill, self._to_rebuild)
        self._to_rebuild -= rebuilt
        usage.root_rows += drew
        usage.draft_rows += draft_rows
        usage.prefill_rows += prefill - rebuilt
        usage.rebuilt_rows += rebuilt
        usage.engine_s += engine_s

    def graft(self, draft: Draft, now: float) -> Grafted:
        """Add a draft's guesses to the tree. Raises LedgerError for one that breaks the announced limits."""
        parents = self._check(draft)
        self.heard(draft.have, None, now)
        self.seq, self._drafted_at = draft.seq, now
        if not len(self.tree):
            self._armed_at = now
        result = self._place(draft, parents)
        if result.held:
            self._early = [*self._early[-3:], (draft, self.steps)]
        elif result.new:
            self._retry_early()
        return result

    def commit(self, accepted: Sequence[int], now: float) -> tuple[int, int]:
        """Append what a step drew, up to a stop id or the end. Returns (base, how many ids had been guessed).

        To be followed by `learn` before the next event: apart, since its news need not wait for that.
        """
        text, hashes = self.text, self.hashes
        base = len(text)
        ids: list[int] = []
        for id in accepted:
            ids.append(id)
            text.append(id)
            hashes.append(extend_hash(hashes[-1], id))
            if id in self.stop_ids or len(text) >= self.end:
                self.finish = self._finish_at(len(text) - 1)
                break
        self._decided = self.tree.root, ids
        guessed = len(self.tree.advance(ids))
        self.usage.committed += len(ids)
        self.usage.accepted += len(ids) - 1
        self.steps += 1
        self.idle_since = now
        self._retry_early()
        return base, guessed

    def learn(self) -> None:
        """Judge the guesses that the latest commit has decided, also those that had no row in the step; once."""
        if self._decided is None:
            return
        (node, ids), self._decided = self._decided, None
        if not node.children:
            self.acceptance.age()
        for depth, id in enumerate(ids):
            if not node.children:
                break
            self.acceptance.judge(depth, node.children, id)
            if id not in node.children:
                break
            node = node.children[id]

    def opened(self, now: float, step_us: int) -> Opened:
        """The answer to the session's open, as often as it is asked."""
        self.told_at = now
        held_s = self.crowded_patience_s
        patience = None if held_s == inf else round(held_s * 1000)
        return Opened(
            self.session, self.epoch, self.verifier, self.handle, self.frontier, self.limits, step_us, patience
        )

    def news(self, base: int, now: float, step_us: int = 0, price: float | None = None) -> Commit:
        """Everything committed from `base` on, with what is held, and time and advice where they have changed.

        step_us: 0 where nothing is to be said of it; price: the chance that a row needs to be welcome.
        """
        if price is not None:
            if self._advice.is_due:
                self.learn()
            self._advice.update(self.acceptance, price, self.limits.draft_rows)
        hash = self.hash_at(base)
        assert hash is not None
        self.told_at = now
        moved = step_us > 0 and abs(step_us - self._told_step_us) > self._told_step_us * 0.25
        if moved:
            self._told_step_us = step_us
        advice = self._advice.rows
        advised = advice if advice != self._told_advice else None
        self._told_advice = advice
        return Commit(
            self.handle,
            self.epoch,
            base,
            hash,
            Ids(self.text[base:]),
            self.seq,
            len(self.tree),
            self.finish,
            step_us if moved else None,
            advised,
            self._age_ms(now),
        )

    # -- details --------------------------------------------------------------------------------------------------

    def _age_ms(self, now: float) -> int | None:
        """How long ago the latest draft came: told of the first few, then of some, since a link seldom changes."""
        drafted_at, self._drafted_at = self._drafted_at, None
        if drafted_at is None:
            return None
        self._ages += 1
        if self._ages > FIRST_AGES and self._ages % AGES_APART:
            return None
        return round(1000 * (now - drafted_at))

    def _hold(self, wish_s: float) -> None:
        self.patience_s = min(wish_s, self.contract.patience_most_s)
        self.crowded_patience_s = min(max(wish_s, self.contract.patience_least_s), self.contract.patience_most_s)

    def _finish_at(self, position: int) -> str:
        if self.text[position] in self.stop_ids:
            return FinishReason.STOP
        return self._end_reason if position + 1 >= self.end else ""

    def _check(self, draft: Draft) -> list[int]:
        parents = parents_of(len(draft.ids), draft.deltas)
        if parents is None:
            raise LedgerError("the draft's deltas do not describe a tree")
        if draft.base < self.prompt_len:
            raise LedgerError(f"the draft's base {draft.base} lies within the prompt of {self.prompt_len}")
        if len(draft.ids) > self.limits.draft_rows:
            raise LedgerError(f"a draft of {len(draft.ids)} rows is over the limit of {self.limits.draft_rows}")
        if not self.limits.trees and draft.deltas:
            raise LedgerError("this verifier takes chains only")
        outside = next((id for id in draft.ids if id >= self.limits.vocab_size), None)
        if outside is not None:
            raise LedgerError(f"draft id {outside} is outside the vocabulary of {self.limits.vocab_size}")
        return parents

    def _place(self, draft: Draft, parents: list[int]) -> Grafted:
        """Walk the draft down the committed text, then down the tree.

        A place is a length of committed text, or a node; None once the draft has left the text's path.
        """
        result = Grafted()
        start: int | Node | None
        if draft.base <= self.frontier:
            start = draft.base if self.hash_at(draft.base) == draft.hash else None
        else:
            start = self.tree.find(draft.base, draft.hash)
            result.held = start is None
        places: list[int | Node | None] = []
        for id, parent in zip(draft.ids, parents, strict=True):
            at = start if parent < 0 else places[parent]
            if isinstance(at, int) and at == self.frontier:
                at = self.tree.root
            if at is None:
                result.stale += 1
                places.append(None)
            elif isinstance(at, int):
                result.stale += 1
                places.append(at + 1 if self.text[at] == id else None)
            elif id in at.children:
                result.known += 1
                places.append(at.children[id])
            elif len(self.tree) >= self.limits.draft_rows or (at.children and not self.limits.trees):
                result.stale += 1
                places.append(None)
            else:
                result.new += 1
                places.append(self.tree.add(at, id))
        return result

    def _retry_early(self) -> None:
        """Graft drafts that came before their predecessor; one that has waited a whole step is dropped."""
        waiting, self._early = self._early, []
        for draft, step in waiting:
            parents = parents_of(len(draft.ids), draft.deltas)
            assert parents is not None
            if self._place(draft, parents).held and self.steps <= step + 1:
                self._early.append((draft, step))
