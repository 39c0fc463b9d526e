"""One session as the board knows it: the certified text, the guesses behind it, and who certifies. Pure: events in,
actions out, time as an argument. The window believes nobody but the owner it has chosen, repairs what was lost by its
own timers, and opens again elsewhere when the owner falls silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf

from edge.cadence import Cadence
from edge.drafters.base import Candidate
from edge.guesses import path_of, spanning
from edge.session import Guess, Request, Send, Tally, Timing
from protocol import topics
from protocol.errors import SessionError
from protocol.messages import (
    AnyMessage,
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
)
from protocol.text import Ids, extend_hash, owner_hash, prefix_hashes
from protocol.tree import DraftTree, Node, deltas_of

MAX_FRUITLESS_OPENS = 8


class Window:
    """The session's state. Actions gather in an outbox (`take`); moves of the text gather for the drafter (`moves`).

    text: [frontier] ids, prompt first. tree: guesses behind it, each with a `Guess` in its note; unsent: those that no
    draft has carried yet; revised: those whose candidates have become others since guesses were made of them. outcomes:
    (candidates, depth, id) of positions that were guessed and are now decided, for whoever learns from them.
    """

    def __init__(
        self,
        device: str,
        request: Request,
        *,
        timing: Timing,
        now: float,
        committed: Sequence[int] = (),
        epoch: int = 0,
        former: str = "",
        prefix: tuple[int, int] | None = None,
    ) -> None:
        """former: the verifier that had the session before a restart, or the text that it goes on from: asked first,
        since it may still have the KV; prefix: (session, length) of that text, which the verifier is not sent again.
        """
        self.device, self.request, self.timing, self.epoch = device, request, timing, epoch
        self.text = [*request.prompt, *committed]
        self.prompt_len = len(request.prompt)
        self.tree = DraftTree(self.text[-1], len(self.text), 0)
        self.tree.root.note = Guess()
        self.tally = Tally()
        self.finish = ""
        self.failure: SessionError | None = None
        self.problem = ""
        self.verifier = ""
        self.limits: Limits | None = None
        self.cadence = Cadence()
        self.advice: int | None = None
        self.alone = False
        self._hashes: list[int] = []
        self._former, self._prefix = former, prefix
        self._handle = -1
        self._link_up = True
        self._opened_sent = False
        self._open_at = now
        self._fruitless = 0
        self._heard_at = self._asked_at = self._told_at = now
        self._told = 0
        self._unanswered = False
        self._seq = 0
        self._outbox: list[Send] = []
        self.moves: list[tuple[list[int], list[Node]]] = []
        self.outcomes: list[tuple[list[Candidate], int, int]] = []
        self.unsent: list[Node] = []
        self.revised: list[Node] = []

    # -- questions ------------------------------------------------------------------------------------------------

    @property
    def frontier(self) -> int:
        return len(self.text)

    @property
    def committed(self) -> list[int]:
        return self.text[self.prompt_len :]

    @property
    def owned(self) -> bool:
        return self._handle >= 0

    @property
    def done(self) -> bool:
        return bool(self.finish) or self.failure is not None

    @property
    def may_send(self) -> bool:
        """Whether there is somebody to send drafts to."""
        return self._handle >= 0 and self._link_up and not self.finish and self.failure is None

    @property
    def num_rows(self) -> int:
        """How many guesses the owner takes; a cautious number before one is known."""
        return self.limits.draft_rows if self.limits else 16

    @property
    def branches(self) -> bool:
        """Whether the owner takes trees."""
        return self.limits is not None and self.limits.trees

    def can_guess(self, parent: Node) -> bool:
        """Whether a child of `parent` may still be guessed: within the owner's limits and before the text's end."""
        return len(self.tree) < self.num_rows and self.goes_on_behind(parent)

    def goes_on_behind(self, node: Node) -> bool:
        """Whether the text has a position behind a node whose guess is of use: the last token needs none."""
        return node.position + 1 < self.prompt_len + self.request.max_tokens - 1

    @property
    def in_flight(self) -> int:
        """Guesses that were sent and are not decided yet."""
        return len(self.tree) - len(self.unsent)

    def holds(self, node: Node) -> bool:
        """Whether the node is still the root or a guess behind it."""
        return node is self.tree.root or self.tree.find(node.position + 1, node.hash) is node

    # -- drafting -------------------------------------------------------------------------------------------------

    def guess(self, parent: Node, id: int, probability: float, *, main: bool = False) -> Node:
        """Add a guess behind a node of the tree. main: it and all before it are first candidates."""
        node = self.tree.add(parent, id)
        if node.note is None:
            node.note = Guess(path=path_of(parent, probability), main=main)
            self.unsent.append(node)
        return node

    def drop(self, leaf: Node) -> None:
        """Forget a guess that was not sent and that nothing is behind."""
        self.tree.drop(leaf)
        self.unsent.remove(leaf)

    def reconsider(self, found: Sequence[tuple[object, list[Candidate]]]) -> None:
        """What is known anew of rows that were evaluated before: (row, candidates) of each."""
        by_row = {node.note.row: node for node in (self.tree.root, *self.tree)}
        for row, candidates in found:
            if (node := by_row.get(row)) is not None:
                node.note.candidates, node.note.unread = candidates, False
                self.revised.append(node)

    def flush(self, now: float) -> None:
        """Send the guesses that were not sent yet, as one draft."""
        if not self.unsent or not self.may_send:
            return
        fresh = set(self.unsent)
        self.unsent = []
        graft, nodes = spanning(self.tree, fresh)
        index = {node: i for i, node in enumerate(nodes)}
        self._seq += 1
        for node in nodes:
            node.note.seq = self._seq
        draft = Draft(
            self._handle,
            self.epoch,
            self._seq % 256,
            graft.position + 1,
            graft.hash,
            Ids(node.id for node in nodes),
            graft.position + 1 - self.frontier,
            Ids(deltas_of([index.get(node.parent, -1) for node in nodes])),  # type: ignore[arg-type]
        )
        self._say(draft, now)
        self.cadence.sent(self._seq, now)
        self.tally.drafts += 1
        self.tally.drafted += len(fresh)

    def give_up_drafting(self, now: float) -> None:
        """The drafter can go no further with this text: the verifier is told not to wait for drafts."""
        if not self.alone:
            self.alone = True
            if self.owned:
                self._resync(now, ask=False)

    # -- events ---------------------------------------------------------------------------------------------------

    def receive(self, message: AnyMessage, now: float) -> None:
        """Take one message of the verdict topic, or a verifier's state."""
        match message:
            case Opened():
                self._on_opened(message, now)
            case Commit():
                self._on_commit(message, now)
            case Error():
                self._on_error(message, now)
            case VerifierState() if self.owned and message.verifier == self.verifier and not self.done:
                self._on_state(message, now)
            case _:
                self.tally.ignored["other"] += 1

    def link_up(self, now: float) -> None:
        """The broker is reached again; what was said in between may be lost."""
        self._link_up = True
        self.problem = ""
        self._heard_at = now
        if self.owned and not self.done:
            self._ask(now)
        elif not self.done:
            self._open_at = now

    def link_down(self, reason: str) -> None:
        self._link_up = False
        self.problem = reason

    def unserved(self, now: float) -> None:
        """The broker found no verifier for our open."""
        if self._former:
            self._former = ""
            self._opened_sent = False
            self._open_at = now
        elif not self.owned and not self.done:
            self.problem = f"no verifier serves {self.request.target} at this broker"
            self._opened_sent = False  # nobody has it, so the epoch is still unused
            self._open_at = now + self.timing.unserved_s

    def tick(self, now: float) -> None:
        """Open, ask, acknowledge or leave, where it is time."""
        if self.done or not self._link_up:
            return
        if not self.owned:
            if now >= self._open_at:
                if self._opened_sent:
                    self._former = ""
                    self.epoch += 1
                    self.problem = self.problem or f"no verifier of {self.request.target} has answered"
                self._open(now)
            return
        if now - self._heard_at >= self.timing.silence_s:
            self._reopen(now, f"verifier {self.verifier} has been silent for {self.timing.silence_s:g} s")
        elif now - max(self._heard_at, self._asked_at) >= self.timing.repair_s:
            self._ask(now)
        elif self._must_acknowledge(now):
            self._resync(now, ask=False)

    def wake_at(self) -> float:
        """When `tick` may next have something to do."""
        if self.done or not self._link_up:
            return inf
        if not self.owned:
            return self._open_at
        times = [
            self._heard_at + self.timing.silence_s,
            max(self._heard_at, self._asked_at) + self.timing.repair_s,
        ]
        if self.frontier > self._told:
            times.append(self._told_at + self.timing.acknowledge_s)
        return min(times)

    def cancel(self) -> None:
        """The application no longer wants the text."""
        if not self.done:
            self.failure = SessionError("cancelled by the application", where=f"session {self.request.session:016x}")
            self._close_owner("cancelled")

    def leave(self) -> None:
        """The process ends. The owner is not told: it keeps the text for a while, for whoever opens it again."""
        if not self.done:
            self.failure = SessionError(
                "the board is closing",
                where=f"session {self.request.session:016x}",
                remedy="The text can be resumed from its journal",
            )
            self._handle, self.verifier, self._former = -1, "", ""

    def take(self) -> list[Send]:
        """The messages to publish since the last call."""
        sends, self._outbox = self._outbox, []
        return sends

    # -- the owner's messages -------------------------------------------------------------------------------------

    def _on_opened(self, message: Opened, now: float) -> None:
        if message.session != self.request.session:
            self.tally.ignored["session"] += 1
            return
        if self.owned and (message.verifier, message.epoch) == (self.verifier, self.epoch):
            self._heard_at, self._unanswered = now, False
            return
        if self.owned or self.done or message.epoch != self.epoch:
            self.tally.ignored["opened"] += 1
            leave = Close(message.session, message.epoch, "another verifier owns this session")
            self._outbox.append(Send(topics.draft_topic(self.device, message.verifier), leave, qos=1))
            return
        self.verifier, self._handle, self.limits = message.verifier, message.handle, message.limits
        self.cadence.step_s = message.step_us / 1e6
        self.problem = ""
        hashes = prefix_hashes(owner_hash(self.request.session, self.verifier, self.epoch), self.text)
        self._hashes = hashes[self.prompt_len :]
        self.tree.rehash(self._hashes[-1])
        self._prune()
        self._heard_at = self._asked_at = self._told_at = now
        self._told, self._unanswered = self.frontier, False
        if message.length != self.frontier:
            self._ask(now)
        elif self.alone:
            self._resync(now, ask=False)

    def _on_commit(self, message: Commit, now: float) -> None:
        if not self.owned or (message.handle, message.epoch) != (self._handle, self.epoch):
            self.tally.ignored["owner"] += 1
            return
        if self.done:
            self._close_owner("")
            return
        if message.base > self.frontier:
            # Not a sign of life: only a hash that can be compared tells the owner from another with the same handle.
            self.tally.ignored["gap"] += 1
            if now - self._asked_at >= self.timing.repair_s / 4:
                self._ask(now)
            return
        at = message.base - self.prompt_len
        if at < 0 or message.hash != self._hashes[at]:
            self.tally.ignored["hash"] += 1
            return
        known = self.frontier - message.base
        ids = list(message.ids)
        overlap = ids[:known]
        if overlap != self.text[message.base : message.base + len(overlap)] or not self._in_vocabulary(ids):
            self._reopen(now, f"verifier {self.verifier} contradicted itself at {message.base}")
            return
        self._heard_at, self._unanswered = now, False
        if message.step_us is not None:
            self.cadence.step_s = message.step_us / 1e6
        if message.advice is not None:
            self.advice = message.advice
        fresh = ids[known:]
        if fresh:
            self._append(fresh)
            self.cadence.beat(self._latest_seen(message), message.age_ms, now)
            self.tally.commits += 1
        if message.finish and message.base + len(ids) == self.frontier:
            self.finish = message.finish
            self._close_owner("")
        elif message.base + len(ids) == self.frontier:
            self._compare(message)

    def _on_state(self, message: VerifierState, now: float) -> None:
        if message.status != "up":
            self._reopen(now, f"verifier {self.verifier} is {message.status}")
        elif self._unanswered and now - self._asked_at >= self.timing.repair_s / 4:
            self._ask(now)  # it may have come back to the broker after us, and what we asked in between reached nobody

    def _append(self, ids: list[int]) -> None:
        self.text.extend(ids)
        for id in ids:
            self._hashes.append(extend_hash(self._hashes[-1], id))
        before = self.tree.root
        kept = self.tree.advance(ids)
        for node, id in zip([before, *kept], ids, strict=False):
            if node.note.candidates:
                self.outcomes.append((node.note.candidates, node.note.depth, id))
        stopped_at = kept[-1] if kept else before
        self.tally.missed += len(kept) < len(ids) and bool(stopped_at.children)
        if self.tree.root.note is None:
            self.tree.root.note = Guess()
        self.unsent = [node for node in self.unsent if node is not self.tree.root and self.holds(node)]
        self.revised = [node for node in self.revised if self.holds(node)]
        scale = self.tree.root.note.path
        for node in self.tree:
            node.note.path /= scale
        self.tree.root.note.path = 1.0
        self.moves.append((ids, kept))
        self.tally.committed += len(ids)
        self.tally.guessed += len(kept)
        self.tally.used += sum(node.note.seq is not None for node in kept)
        self._fruitless = 0

    def _latest_seen(self, message: Commit) -> int:
        """The draft that a commit's seq, modulo 256, means."""
        return self._seq - (self._seq - message.seq) % 256

    def _compare(self, message: Commit) -> None:
        """Send again what the owner should hold of our drafts and does not."""
        latest = self._latest_seen(message)
        seen = [node for node in self.tree if node.note.seq is not None and node.note.seq <= latest]
        if message.held < len(seen):
            self.tally.ignored["lost drafts"] += 1
            for node in seen:
                node.note.seq = None
            self._list_unsent()

    def _on_error(self, message: Error, now: float) -> None:
        ours = message.session == self.request.session or (self.owned and message.handle == self._handle)
        if self.done or not ours or message.epoch != self.epoch:
            self.tally.ignored["error"] += 1
            return
        what = f"{message.code}: {message.what}" if message.what else message.code
        self._fruitless += 1
        retry_s = None if message.retry_ms is None else message.retry_ms / 1000
        again = message.code in ErrorCode.REOPEN or retry_s is not None
        if again and self._fruitless <= MAX_FRUITLESS_OPENS and (retry_s or 0.0) <= self.timing.refused_s:
            self._reopen(now, what, retry_s)
        else:
            self._fail(what, message.code, retry_s)

    # -- what the window says -------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        request = self.request
        prefix = self._prefix if self._former else None
        message = Open(
            request.session,
            self.epoch,
            request.target,
            self.prompt_len,
            Ids(self.text[prefix[1] if prefix else 0 :]),
            request.sampling,
            request.max_tokens,
            request.stop_ids,
            None if request.patience_s == inf else round(request.patience_s * 1000),
            prefix,
        )
        topic = topics.open_topic(self.device, self._former or request.target)
        wait_s = self.timing.open_s / 2 if self._former else self.timing.open_s
        self._outbox.append(Send(topic, message, qos=1, expiry_s=ceil(wait_s)))
        self._opened_sent = True
        self._open_at = now + wait_s
        self.tally.opens += 1

    def _reopen(self, now: float, why: str, retry_s: float | None = None) -> None:
        self.problem = why
        if self.owned:
            self._close_owner(why[:200])
        self._handle, self.verifier, self._former = -1, "", ""
        self._opened_sent = False
        self.epoch += 1
        self._open_at = now + (retry_s if retry_s is not None else self._back_off() if self._fruitless > 1 else 0.0)
        self._forget_sent()

    def _back_off(self) -> float:
        return min(0.25 * 2**self._fruitless, self.timing.retry_most_s)

    def _ask(self, now: float) -> None:
        """Ask for everything from our own length on, and say all our guesses again."""
        self._resync(now, ask=True)
        self._asked_at, self._unanswered = now, True
        self._forget_sent()

    def _resync(self, now: float, *, ask: bool) -> None:
        self._say(Resync(self._handle, self.epoch, self.frontier, self._hashes[-1], ask, self.alone), now)

    def _say(self, message: Draft | Resync, now: float) -> None:
        topic = topics.draft_topic(self.device, self.verifier)
        self._outbox.append(Send(topic, message, expiry_s=self.timing.draft_expiry_s))
        self._told, self._told_at = self.frontier, now

    def _close_owner(self, reason: str) -> None:
        if self.owned:
            close = Close(self.request.session, self.epoch, reason)
            self._outbox.append(Send(topics.draft_topic(self.device, self.verifier), close, qos=1))

    def _fail(self, what: str, code: str, retry_s: float | None = None) -> None:
        self.failure = SessionError(what, code=code, where=f"session {self.request.session:016x}", retry_s=retry_s)

    # -- details --------------------------------------------------------------------------------------------------

    def _must_acknowledge(self, now: float) -> bool:
        ahead = self.limits.ahead if self.limits else 64
        behind = self.frontier - self._told
        return behind >= max(1, ahead // 4) or (behind > 0 and now - self._told_at >= self.timing.acknowledge_s)

    def _in_vocabulary(self, ids: Sequence[int]) -> bool:
        return self.limits is not None and all(id < self.limits.vocab_size for id in ids)

    def _forget_sent(self) -> None:
        for node in self.tree:
            node.note.seq = None
        self._list_unsent()

    def _list_unsent(self) -> None:
        self.unsent = [node for node in self.tree if node.note.seq is None]

    def _prune(self) -> None:
        """Drop the latest guesses that are over a new owner's limits."""
        assert self.limits is not None
        while len(self.tree) > self.limits.draft_rows:
            self.tree.drop(list(self.tree)[-1])
        if not self.limits.trees:
            for node in list(self.tree):
                if self.holds(node) and node.parent is not None and len(node.parent.children) > 1:
                    first = next(iter(node.parent.children.values()))
                    if node is not first:
                        self.tree.drop(node)
        self._list_unsent()
