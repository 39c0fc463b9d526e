"""All sessions of one verifier: messages in, messages out, and steps in between. Pure: time is an argument, the engine
is handed in, and no message is ever waited for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

from cloud.admission import RETRY_MS, Refusal, out_of_tokens, over_contract, spent, unfit
from cloud.archive import Archive
from cloud.cost import StepCost
from cloud.engines.base import Engine, Outcome, Plan
from cloud.experience import Experience
from cloud.ledger import Ledger, LedgerError
from cloud.residency import Residency
from cloud.scheduler import Scheduler, Step
from cloud.tenants import Contract, Day, Tenant, Tenants
from cloud.usage import Observer, Usage
from protocol import topics
from protocol.errors import ModelError, WireError
from protocol.messages import (
    AnyMessage,
    Close,
    Draft,
    Error,
    ErrorCode,
    Limits,
    Open,
    Resync,
    VerifierState,
    decode,
    open_key,
)

PART = 32
RESTING = 128  # handles that were given up last and are not given again yet


class Send(NamedTuple):
    """A message to publish. usage: of the session that it belongs to."""

    topic: str
    message: AnyMessage
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """sessions: open at once, in all and of one device; repair_s: until an unanswered commit is sent again; idle_s:
    until a session whose device is silent is forgotten; quiet_s: until it gets no more steps; open_s: until an open
    that nobody has looked at is of no use, since its device has opened again by then; messages_per_s: what is listened
    to of one device; draft_rows, ahead: see `protocol.messages.Limits`.
    """

    sessions: int = 64
    sessions_per_device: int = 8
    draft_rows: int = 48
    ahead: int = 64
    repair_s: float = 1.5
    idle_s: float = 60.0
    quiet_s: float = 2.5
    open_s: float = 4.0
    messages_per_s: float = 500.0


@dataclass(slots=True)
class Tally:
    """What a verifier has done since it started. stale: guesses that came too late; late: opens that did."""

    steps: int = 0
    rows: int = 0
    committed: int = 0
    guessed: int = 0
    grafted: int = 0
    stale: int = 0
    late: int = 0
    errors: Counter[str] = field(default_factory=Counter)


class Verifier:
    """Ledgers by device and handle, over one engine."""

    def __init__(
        self,
        id: str,
        engine: Engine,
        *,
        scheduler: Scheduler,
        bounds: Bounds,
        version: str = "",
        contracts: Mapping[str, Contract] | None = None,
        cost: StepCost | None = None,
        observers: Sequence[Observer] = (),
        day: Day | None = None,
    ) -> None:
        """contracts: by tenant; cost: what is known of the engine's steps, if it was measured; day: what tenants have
        had today, for those whose contract bounds it.
        """
        self._observers, self._day = observers, day
        self.id, self.engine, self.scheduler, self.bounds, self.version = id, engine, scheduler, bounds, version
        info = engine.info
        self.limits = Limits(bounds.draft_rows, bounds.ahead, info.context, info.vocab_size, engine.takes_trees)
        self.tally = Tally()
        self.draining = False
        self._by_key: dict[int, Ledger] = {}
        self._by_handle: dict[tuple[str, int], Ledger] = {}
        self._by_session: dict[tuple[str, int], Ledger] = {}
        # What was said to a session that is gone may still come, and would be taken for its heir's.
        self._resting: deque[tuple[str, int]] = deque(maxlen=RESTING)
        self._next_key = 0
        self._outbox: list[Send] = []
        self.experience = Experience(cost)
        self.tenants = Tenants(contracts)
        self.residency = Residency(engine, self.tenants)
        self.archive = Archive()
        self._planned = Step(())
        self._queue_s = 0.0

    # -- messages in ----------------------------------------------------------------------------------------------

    def receive(self, topic: str, payload: bytes, now: float, waited_s: float = 0.0) -> None:
        """Take one message from the broker, which came `now` and is looked at `waited_s` later. Bad ones are counted
        and answered; nothing is raised.
        """
        try:
            device, kind, _ = topics.parse(topic)
        except WireError:
            self._count_error("", ErrorCode.BAD_MESSAGE)
            return
        try:
            message = decode(payload)
        except WireError as error:
            self._refuse_bytes(device, kind, payload, error)
            return
        match message:
            case Open() if kind == "open" and waited_s >= self.bounds.open_s:
                self.tally.late += 1
            case Open() if kind == "open":
                self._open(device, message, len(payload), now)
            case Draft() | Resync() if kind == "draft":
                self._speak(device, message, len(payload), now)
            case Close() if kind == "draft":
                self._close(device, message)
            case _:
                self._count_error(device, ErrorCode.BAD_MESSAGE)

    def flooded(self, device: str, num: int) -> None:
        """So many messages of a device were dropped unread."""
        what = f"{num} messages over {self.bounds.messages_per_s:g} a second were dropped"
        self._error(device, 0, 0, ErrorCode.OVER_LIMIT, what)

    def _refuse_bytes(self, device: str, kind: str, payload: bytes, error: WireError) -> None:
        key = open_key(payload) if kind == "open" else None
        if key is None:
            self._count_error(device, ErrorCode.BAD_MESSAGE)
        else:
            self._error(device, *key, ErrorCode.BAD_OPEN, str(error))

    def _open(self, device: str, message: Open, size: int, now: float) -> None:
        known = self._by_session.get((device, message.session))
        if message.prefix is not None:
            whole = self.archive.whole(device, message)
            if whole is None:
                what = f"session {message.prefix[0]:x} is not held here; send the whole text"
                self._error(device, message.session, message.epoch, ErrorCode.UNKNOWN_PREFIX, what, 0)
                return
            message = whole
        if known is not None:
            if message.epoch < known.epoch:
                return
            if message.epoch == known.epoch:
                self._answer(known, now)
                return
            if known.continues(message):  # a board that was killed: nothing is drawn or read twice
                known.renew(message, now)
                self._answer(known, now)
                return
            self._forget(known)
        tenant = self.tenants[topics.tenant_of(device)]
        refusal = self._refusal(device, message, now)
        if refusal is not None:
            self._error(device, message.session, message.epoch, refusal.code, refusal.what, refusal.retry_ms)
            return
        # From the session's id, so that the sessions of one device at several verifiers seldom share a handle.
        handle = next(h for h in count(message.session & 0x7F) if self._is_free(device, h))
        self._next_key += 1
        ledger = Ledger(
            device,
            message,
            verifier=self.id,
            handle=handle,
            key=self._next_key,
            limits=self.limits,
            now=now,
            quiet_s=self.bounds.quiet_s,
            contract=tenant.contract,
            fleet=tenant.rates,
        )
        if not ledger.finish:
            try:
                self.engine.open(ledger.key, ledger.text, ledger.sampling, ledger.end, tenant.name)
            except ModelError as error:
                self._error(device, message.session, message.epoch, ErrorCode.OVER_CONTEXT, str(error))
                return
            self._by_key[ledger.key] = ledger
        ledger.usage.bytes_in += size
        tenant.num_sessions += 1
        self._by_handle[device, handle] = ledger
        self._by_session[device, message.session] = ledger
        for observer in self._observers:
            observer.opened(ledger)
        self._answer(ledger, now)

    def _answer(self, ledger: Ledger, now: float) -> None:
        self._say(ledger, ledger.opened(now, self.experience.step_us))
        if ledger.finish or ledger.frontier > ledger.device_has:
            self._say(ledger, ledger.news(ledger.device_has, now))

    def _refusal(self, device: str, message: Open, now: float) -> Refusal | None:
        """Why a session is not taken."""
        if self.draining:
            return Refusal(ErrorCode.DRAINING, f"verifier {self.id} is shutting down")
        refusal = unfit(message, self.engine.info)
        if refusal is not None:
            return refusal
        if len(self._by_session) >= self.bounds.sessions:
            return Refusal(ErrorCode.NO_ROOM, f"all {self.bounds.sessions} sessions are taken", RETRY_MS)
        most = self.bounds.sessions_per_device
        if sum(of == device for of, _ in self._by_session) >= most:
            return Refusal(ErrorCode.OVER_LIMIT, f"{device} has {most} sessions open already", RETRY_MS)
        return over_contract(self.tenants[topics.tenant_of(device)], message, self._day, now)

    def _speak(self, device: str, message: Draft | Resync, size: int, now: float) -> None:
        ledger = self._by_handle.get((device, message.handle))
        if ledger is None or ledger.epoch != message.epoch:
            self._error(device, 0, message.epoch, ErrorCode.UNKNOWN_SESSION, handle=message.handle)
            return
        ledger.usage.bytes_in += size
        try:
            if isinstance(message, Draft):
                grafted = ledger.graft(message, now)
                self.tally.grafted += grafted.new
                self.tally.stale += grafted.stale
            else:
                ledger.heard(message.have, message.hash, now)
                if message.alone:
                    ledger.left_alone()
                if message.ask:
                    self._say(ledger, ledger.news(message.have, now))
        except LedgerError as error:
            code = ErrorCode.DIVERGED if isinstance(message, Resync) else ErrorCode.BAD_MESSAGE
            self._quarantine(ledger, code, str(error))

    def _close(self, device: str, message: Close) -> None:
        ledger = self._by_session.get((device, message.session))
        if ledger is not None and ledger.epoch <= message.epoch:
            self._forget(ledger)

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """The next step; without work when nobody is due."""
        experience = self.experience
        ready, evicted = self.residency.admit(list(self._by_key.values()), now, experience.cost, experience.crowded)
        for ledger in evicted:
            self._tell_evicted(ledger)
        step = self.scheduler.plan(
            ready, self.engine.pending, now, experience.cost, tenants=self.tenants, crowded=experience.crowded
        )
        if step.work:
            self._planned = step
            experience.priced(step)
            drawing = [self._by_key[work.key] for work in step.work if work.rows == self.engine.pending(work.key)]
            waiting = [ledger for ledger in self._by_key.values() if self.residency.waits(ledger)]
            self._queue_s = experience.queued(drawing, waiting, now)
        return step

    def settle(self, outcome: Outcome, now: float) -> None:
        """Commit what a step drew."""
        for _ in self.settle_in_parts(outcome, now):
            pass

    def settle_in_parts(self, outcome: Outcome, now: float) -> Iterator[None]:
        """`settle` with a pause after every PART sessions, in which their news may leave: they are on their way while
        those of the next are made, and before anything is learned or charged.
        """
        self.tally.steps += 1
        self.tally.rows += outcome.rows
        self.experience.timed(outcome)
        step_us, welcome = self.experience.step_us, self.experience.welcome
        for done, (key, ids) in enumerate(outcome.accepted.items(), 1):
            ledger = self._by_key[key]
            base, guessed = ledger.commit(ids, now)
            self.tally.committed += ledger.frontier - base
            self.tally.guessed += guessed
            self._say(ledger, ledger.news(base, now, step_us, welcome))
            if done % PART == 0:
                yield
        yield
        self._learn(outcome, now)
        for key in outcome.evicted:
            if key in self._by_key:
                ledger = self._by_key[key]
                self.residency.lost(ledger, now)
                self._tell_evicted(ledger)
        for key, reason in outcome.failed.items():
            self._quarantine(self._by_key[key], ErrorCode.ENGINE, reason)
        for observer in self._observers:
            observer.stepped(self._planned, outcome, self._queue_s)

    def tick(self, now: float) -> None:
        """Repair what may have been lost, and forget who has fallen silent."""
        for ledger in list(self._by_session.values()):
            if now - ledger.heard_at >= self.bounds.idle_s:
                self._forget(ledger)
            elif self._owes(ledger) and now - ledger.told_at >= self.bounds.repair_s:
                if not ledger.spoke:
                    self._say(ledger, ledger.opened(now, self.experience.step_us))
                self._say(ledger, ledger.news(ledger.device_has, now))
        for tenant in self._over_their_day():
            self._end_of_day(tenant)

    def wake_at(self, now: float) -> float:
        """When `plan` or `tick` may next have something to do, if no message comes."""
        times = [inf]
        for ledger in self._by_session.values():
            times.append(ledger.heard_at + self.bounds.idle_s)
            if self._owes(ledger):
                times.append(ledger.told_at + self.bounds.repair_s)
            if ledger.finish:
                continue
            ready_at = self.tenants[ledger.tenant].ready_at()
            if self.residency.is_resident(ledger) and self.engine.pending(ledger.key) > 1:
                times.append(max(now, ready_at))
            elif self.residency.waits(ledger):  # for others to go: until then there is work, or a reason to wake
                if self.residency.retry_at > now:
                    times.append(self.residency.retry_at)
            elif ledger.may_run():
                times.append(max(ledger.due_at(self.experience.crowded), ready_at))
        return min(times)

    def drain(self) -> None:
        """Refuse new sessions and send those that are open elsewhere."""
        self.draining = True
        for ledger in list(self._by_session.values()):
            what = f"verifier {self.id} is shutting down"
            self._error(ledger.device, ledger.session, ledger.epoch, ErrorCode.DRAINING, what)
            self._forget(ledger)

    # -- messages out ---------------------------------------------------------------------------------------------

    def take(self) -> Sequence[Send]:
        """The messages to publish since the last call."""
        sends, self._outbox = self._outbox, []
        return sends

    def flush(self, now: float) -> None:
        """Let the observers look at the open sessions: about every second."""
        for observer in self._observers:
            observer.flush(self._by_session.values(), now)

    def close(self) -> None:
        """Nothing more will come."""
        for observer in self._observers:
            observer.close()

    def state(self, status: str) -> VerifierState:
        info = self.engine.info
        return VerifierState(
            self.id,
            status,
            info.id,
            info.model,
            info.tokenizer_digest,
            info.numerics,
            self.version,
            self.limits,
            len(self._by_session),
            self.experience.step_us,
        )

    @property
    def num_sessions(self) -> int:
        return len(self._by_session)

    # -- details --------------------------------------------------------------------------------------------------

    def _learn(self, outcome: Outcome, now: float) -> None:
        """What a step says of guesses and prices, and who had which rows, and so how much of its time."""
        ledgers = {work.key: self._by_key[work.key] for work in self._planned.work if work.key in self._by_key}
        self.experience.learn(self._planned, outcome, ledgers, self.tenants)
        row_s = outcome.seconds / max(1, outcome.rows)
        for work in self._planned.work:
            ledger = ledgers.get(work.key)
            rows = outcome.ran.get(work.key, 0)
            if ledger is not None and rows:
                drafts = min(len(work.draft), rows - 1)
                ledger.charge(rows - drafts, drafts, work.key in outcome.accepted, row_s * rows)
                self.tenants[ledger.tenant].charge(rows, now)
        for key in outcome.accepted:
            ledger = self._by_key[key]
            ledger.learn()
            if ledger.finish:
                self._release(ledger)

    def _is_free(self, device: str, handle: int) -> bool:
        return (device, handle) not in self._by_handle and (device, handle) not in self._resting

    def _over_their_day(self) -> list[Tenant]:
        if self._day is None:
            return []
        return [tenant for tenant in self.tenants if tenant.num_sessions and spent(tenant, self._day)]

    def _end_of_day(self, tenant: Tenant) -> None:
        """A tenant has had its tokens of the day: what is committed stays, the rest is for tomorrow."""
        assert self._day is not None
        refusal = out_of_tokens(tenant, self._day)
        for ledger in list(self._by_session.values()):
            if ledger.tenant == tenant.name and not ledger.finish:
                self._error(ledger.device, ledger.session, ledger.epoch, refusal.code, refusal.what, refusal.retry_ms)
                self._forget(ledger)

    def _tell_evicted(self, ledger: Ledger) -> None:
        for observer in self._observers:
            observer.evicted(ledger)

    @staticmethod
    def _owes(ledger: Ledger) -> bool:
        return not ledger.spoke or ledger.device_has < ledger.frontier

    def _say(self, ledger: Ledger, message: AnyMessage) -> None:
        self._outbox.append(Send(ledger.verdict_topic, message, ledger.usage))

    def _error(
        self,
        device: str,
        session: int,
        epoch: int,
        code: str,
        what: str = "",
        retry_ms: int | None = None,
        handle: int | None = None,
    ) -> None:
        self._count_error(device, code, what, session)
        message = Error(session, epoch, code, what[:1000], retry_ms, handle)
        self._outbox.append(Send(topics.verdict_topic(device), message))

    def _count_error(self, device: str, code: str, what: str = "", session: int = 0) -> None:
        self.tally.errors[code] += 1
        for observer in self._observers:
            observer.refused(device, code, what, session)

    def _quarantine(self, ledger: Ledger, code: str, what: str) -> None:
        self._error(ledger.device, ledger.session, ledger.epoch, code, what)
        self._forget(ledger)

    def _release(self, ledger: Ledger) -> None:
        """Free the engine's part of a session; what it committed stays until the device has it."""
        if self._by_key.pop(ledger.key, None) is not None:
            self.engine.close(ledger.key)
            self.residency.release(ledger)

    def _forget(self, ledger: Ledger) -> None:
        self._release(ledger)
        del self._by_handle[ledger.device, ledger.handle]
        self._resting.append((ledger.device, ledger.handle))
        del self._by_session[ledger.device, ledger.session]
        self.tenants[ledger.tenant].num_sessions -= 1
        if ledger.finish:
            self.archive.keep(ledger)
        for observer in self._observers:
            observer.closed(ledger)
