"""One session at work: the drafting loop. It plans, drafts and sends, and never waits for the network.

Two threads meet here. The link's thread brings messages (`receive`) and sees verified text off at once; the thread that
calls `run` drafts. The window is only touched under the lock, the drafter only by `run`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from edge.drafters.base import Candidate, Drafter, Foresees, Row
from edge.journal import SessionJournal
from edge.policy import Policy
from edge.session import Send
from edge.window import Window
from protocol.errors import ModelError
from protocol.messages import AnyMessage
from protocol.tree import Node

log = logging.getLogger(__name__)

IDLE_S = 0.5
LONGEST_READING = 3.0  # passes of one row: a verdict may come meanwhile and ask for another pass
CANCELLED = "cancelled"  # the journal's word for a text that nobody waits for
LOOK_S = 0.05  # how often a board that drafts without pause looks at its timers, which are coarser


class Listener(Protocol):
    """Who reads a session's text. Called on the link's or the drafting thread, so it must be quick."""

    def verified(self, ids: Sequence[int]) -> None:
        """These ids are certified; they follow all that came before."""

    def ended(self) -> None:
        """The window is done: complete, failed or cancelled."""


@dataclass(slots=True)
class Pass:
    """One pass of the drafter. nodes: of the window's tree, parents first; rows: (id, parent row) as `Drafter.extend`
    takes them, none where the one node was evaluated without a model that shall now read it; num_rows: how many a model
    has to evaluate for it, 0 where the drafter knows them all; reads: the rows are text that was not read yet, and
    `nodes` is the root alone; again: what the pass found of rows that were evaluated before.
    """

    nodes: list[Node]
    rows: list[tuple[int, Any]]
    num_rows: int
    reads: bool = False
    again: list[tuple[Row, list[Candidate]]] = field(default_factory=list)


class SessionRun:
    """Drives one window with one drafter until the text is complete.

    turned_at: when the drafting loop last got on, by the clock.
    """

    def __init__(
        self,
        window: Window,
        drafter: Drafter | None,
        policy: Policy,
        *,
        publish: Callable[[Send], None],
        listener: Listener,
        journal: SessionJournal | None = None,
        clock: Callable[[], float] = time.monotonic,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """share: of its time that the drafter may work now, in (0, 1]: after a pass of t it rests t (1/share - 1)."""
        self.window, self.drafter, self.policy = window, drafter, policy
        self._foresees = drafter if isinstance(drafter, Foresees) else None
        self._publish, self._listener, self._journal, self._clock = publish, listener, journal, clock
        self._share, self._rest_until = share, -inf
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._unread: list[int] = []
        self._text_row: object = None
        self._delivered = len(window.committed)
        self._term = (-1, "")
        self._over = self._unrecorded = False
        self.passes = 0
        self.turned_at = clock()
        self.wake_at = self._look_at = -inf

    # -- from the link's thread -----------------------------------------------------------------------------------

    def receive(self, message: AnyMessage) -> None:
        self._do(lambda now: self.window.receive(message, now))

    def link_up(self) -> None:
        self._do(self.window.link_up)

    def link_down(self, reason: str) -> None:
        self._do(lambda now: self.window.link_down(reason))

    def unserved(self) -> None:
        self._do(self.window.unserved)

    def cancel(self) -> None:
        """The application wants no more of it, after a restart neither."""
        with self._lock:
            if not self.window.done:
                self._record(lambda journal: journal.end(CANCELLED))
            self._do(lambda now: self.window.cancel())

    def leave(self) -> None:
        self._do(lambda now: self.window.leave())

    def draft_tail(self) -> list[int]:
        """The likeliest unverified ids behind the text, for whoever wants to show them."""
        with self._lock:
            tail: list[int] = []
            node = self.window.tree.root
            while node.children:
                node = max(node.children.values(), key=lambda child: child.note.path)
                tail.append(node.id)
            return tail

    def _do(self, event: Callable[[float], None]) -> None:
        with self._lock:
            event(self._clock())
            self._act()
        self._changed.set()

    def _act(self) -> None:
        """Carry out what the window decided: journal before the application sees it, then the messages."""
        window = self.window
        if (window.epoch, window.verifier) != self._term:
            self._term = (window.epoch, window.verifier)
            self._record(lambda journal: journal.epoch(*self._term))
        if fresh := window.text[window.prompt_len + self._delivered :]:
            self._delivered += len(fresh)
            self._record(lambda journal: journal.commit(fresh))
            self._listener.verified(fresh)
        for send in window.take():
            self._publish(send)
        if window.done and not self._over:
            self._over = True
            if window.finish:
                self._record(lambda journal: journal.end(window.finish))
                if self._journal is not None and self._unrecorded:
                    self._journal.remove()  # else the next start would write this text again
            self._listener.ended()

    def _record(self, line: Callable[[SessionJournal], None]) -> None:
        """A journal that cannot be written costs the way back after a crash, never the text."""
        if self._journal is None or self._unrecorded:
            return
        try:
            line(self._journal)
        except OSError as error:
            log.error("%s: %s; this text cannot be resumed from here on", self._journal.path, error)
            self._unrecorded = True

    # -- the drafting loop ----------------------------------------------------------------------------------------

    def run(self) -> None:
        """Draft until the text is complete. Raises nothing of its own; the window tells how it ended."""
        self.begin()
        while not self._over:
            self._changed.clear()
            wake_at = self.turn()
            if wake_at > self._clock() and not self._over:
                self._changed.wait(min(wake_at - self._clock(), IDLE_S))

    def open(self) -> None:
        """Open the session and keep it alive, also while a long prefill runs."""
        self.turned_at = self._clock()
        self._do(self.window.tick)

    def begin(self) -> None:
        """Open the session, and let the drafter read the text meanwhile."""
        self.open()
        self.read(*self.opening_text())

    def opening_text(self) -> tuple[list[int], Node]:
        """The text that the drafter has to read before it can guess, and the root that stands for its end."""
        with self._lock:
            self.window.moves = []
            return list(self.window.text), self.window.tree.root

    def read(self, text: Sequence[int], root: Node) -> None:
        """Let the drafter read the opening text; what is committed meanwhile is still to be read afterwards."""
        if self.drafter is None:
            self._stop_drafting()
            return
        try:
            row = self._text_row = self.drafter.prefill(text, progress=lambda done, total: self.open())
            found = self.drafter.candidates(row, self.window.request.sampling, self.policy.candidates)
        except ModelError as error:
            self._stop_drafting(error)
        else:
            with self._lock:
                root.note.row, root.note.candidates = row, found

    def turn(self) -> float:
        """Send what is due, then draft one pass. Returns when to come back: now after a pass, later when idle."""
        work = self.next_pass()
        if work is None:
            return self.wake_at
        started = self._clock()
        found = self.evaluate(work)
        self.learn(work, found, self._clock() - started)
        return started

    def next_pass(self) -> Pass | None:
        """Send what is due and name the next pass of the drafter. None: nothing to evaluate before `wake_at`."""
        with self._lock:
            now = self.turned_at = self._clock()
            window = self.window
            if window.moves:
                self._follow()
            if self._foresees is not None:
                self._foresees.price(*window.cadence.prices())
            work: Pass | None = None
            rests = now < self._rest_until
            while self.drafter is not None and not window.done and not rests:
                if self._unread:
                    work = self._reading()
                else:
                    nodes = self.policy.grow(window, now)
                    work = self._guessing(nodes) if nodes else None
                if work is None or work.num_rows:
                    break
                self.learn(work, self.evaluate(work), 0.0)
                work = None
            pass_s = window.cadence.cost.of(work.num_rows) if work else 0.0
            send_at = self.policy.send_at(window, now, pass_s) if window.may_send else inf
            sends, looks = send_at <= now, work is None or now >= self._look_at
            if sends:
                window.flush(now)
                send_at = inf
            if looks:
                window.tick(now)
                self._look_at = now + LOOK_S
            if sends or looks:
                self._act()
            if work is None:
                self.wake_at = min(window.wake_at(), send_at, self._rest_until if rests else inf)
            return work

    def evaluate(self, work: Pass) -> list[tuple[Row, list[Candidate]]]:
        """Run the pass: each node's row and what may come after it. Nothing where the drafter can do no more."""
        drafter = self.drafter
        assert drafter is not None
        self.passes += work.num_rows > 0
        try:
            if drafter.room() < len(work.rows):
                raise ModelError("the text has filled the drafter's context")
            rows = drafter.extend(work.rows) if work.rows else []
            if work.reads:
                drafter.keep(rows)
                self._unread, self._text_row = [], rows[-1]
                rows = rows[-1:]
            sampling, num = self.window.request.sampling, self.policy.candidates
            if self._foresees is not None:
                if not work.rows:
                    self._foresees.read(work.nodes[0].note.row)
                work.again = [(row, drafter.candidates(row, sampling, num)) for row in self._foresees.read_late()]
            return [(row, drafter.candidates(row, sampling, num)) for row in rows]
        except ModelError as error:
            self._stop_drafting(error)
            return []

    def learn(self, work: Pass, found: Sequence[tuple[Row, list[Candidate]]], seconds: float) -> None:
        """Take over what a pass of so many seconds found."""
        with self._lock:
            if work.num_rows:
                self._rest_until = self._clock() + seconds * (1 / self._share() - 1)
                self.window.cadence.cost.passed(work.num_rows, seconds)
            for node, (row, candidates) in zip(work.nodes, found, strict=bool(found)):
                node.note.row, node.note.candidates = row, candidates
            if self._foresees is not None:
                for node in work.nodes:
                    node.note.unread = node.note.row is not None and self._foresees.unread(node.note.row) > 0
                if work.again:
                    self.window.reconsider(work.again)

    def _stop_drafting(self, why: ModelError | None = None) -> None:
        """The text goes on without us, as plain streaming."""
        if why is not None:
            log.warning("drafting stops for this text: %s", why)
        self.drafter = None
        self._unread = []
        self._do(self.window.give_up_drafting)

    def _reading(self) -> Pass:
        rows = [(id, i - 1 if i else self._text_row) for i, id in enumerate(self._unread)]
        return Pass([self.window.tree.root], rows, self._pass_rows(rows), reads=True)

    def _pass_rows(self, rows: list[tuple[int, Any]]) -> int:
        return len(rows) if self._foresees is None else self._foresees.pass_rows(rows)

    def _guessing(self, nodes: list[Node]) -> Pass:
        """The pass that a policy asks for, or where that would take long since much is unread, the first part of it."""
        first = nodes[0]
        if first.note.row is not None:
            return self._second_thoughts(first)
        index: dict[Node | None, int] = {node: i for i, node in enumerate(nodes)}
        rows = [(node.id, index.get(node.parent, node.parent.note.row)) for node in nodes if node.parent is not None]
        num_rows = self._pass_rows(rows)
        if num_rows > self.window.cadence.cost.rows_within(LONGEST_READING):
            for node in nodes:
                if node.parent is not None and node.parent.note.unread:
                    return self._second_thoughts(node.parent)
        return Pass(nodes, rows, num_rows)

    def _second_thoughts(self, node: Node) -> Pass:
        """A pass over what the model has not read of the guesses up to this one; where it is much, its first part."""
        assert self._foresees is not None
        most = self.window.cadence.cost.rows_within(LONGEST_READING)
        while (num_rows := self._foresees.unread(node.note.row)) > most and node.parent is not None:
            if not node.parent.note.unread:
                break
            node = node.parent
        return Pass([node], [], num_rows)

    def _follow(self) -> None:
        """Let the drafter's text follow what was committed: rows that guessed it stay, the rest is still to be read."""
        moves, self.window.moves = self.window.moves, []
        if self.drafter is None:
            return
        for ids, kept in moves:
            rows = []
            for i, id in enumerate(ids):
                row = kept[i].note.row if i < len(kept) else None
                if self._unread or row is None:
                    self._unread.append(id)
                else:
                    rows.append(row)
            if rows:
                self.drafter.keep(rows)
                self._text_row = rows[-1]
