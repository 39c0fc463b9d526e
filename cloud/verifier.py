"""All sessions of one verifier: messages in, messages out, and steps in between. Pure: time is an argument, the engine
is handed in, and no message is ever waited for.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import median

from cloud.acceptance import Rates
from cloud.cost import StepCost
from cloud.engines.base import Engine, Outcome, Plan
from cloud.goodput import Goodput
from cloud.ledger import Contract, Ledger, LedgerError
from cloud.scheduler import Scheduler, Step
from cloud.usage import Observer
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

PRICE_GAIN = 0.15
CHOICE = 0.7  # of the price: guesses a little less likely are welcome too, so that there is a choice in every step
NOTHING_PAYS = 0.95
CROWDED, CALM = 1.5, 1.25  # times a step of one session: beyond the one it is a crowd, below the other no longer


@dataclass(frozen=True, slots=True)
class Send:
    """A message to publish."""

    topic: str
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Bounds:
    """sessions: open at once, in all and of one device; repair_s: until an unanswered commit is sent again; idle_s:
    until a session whose device is silent is forgotten; quiet_s: until it gets no more steps; draft_rows, ahead: see
    `protocol.messages.Limits`.
    """

    sessions: int = 64
    sessions_per_device: int = 8
    draft_rows: int = 48
    ahead: int = 64
    repair_s: float = 1.5
    idle_s: float = 60.0
    quiet_s: float = 2.5


@dataclass(slots=True)
class Tally:
    """What a verifier has done since it started."""

    steps: int = 0
    rows: int = 0
    committed: int = 0
    guessed: int = 0
    grafted: int = 0
    stale: int = 0
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
    ) -> None:
        """contracts: by tenant; cost: what is known of the engine's steps, if it was measured."""
        self._observers = observers
        self.id, self.engine, self.scheduler, self.bounds, self.version = id, engine, scheduler, bounds, version
        info = engine.info
        self.limits = Limits(bounds.draft_rows, bounds.ahead, info.context, info.vocab_size, engine.takes_trees)
        self.tally = Tally()
        self.draining = False
        self._by_key: dict[int, Ledger] = {}
        self._by_handle: dict[tuple[str, int], Ledger] = {}
        self._by_session: dict[tuple[str, int], Ledger] = {}
        self._next_key = 0
        self._outbox: list[Send] = []
        self._step_s: deque[float] = deque(maxlen=15)
        self.cost = cost or StepCost()
        self.goodput = Goodput()
        self.crowded = False
        self._contracts = contracts or {}
        self._rates = Rates()
        self._price = 0.0
        self._planned = Step(())

    # -- messages in ----------------------------------------------------------------------------------------------

    def receive(self, topic: str, payload: bytes, now: float) -> None:
        """Take one message from the broker. Bad ones are counted and answered; nothing is raised."""
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
            case Open() if kind == "open":
                self._open(device, message, now)
            case Draft() | Resync() if kind == "draft":
                self._speak(device, message, now)
            case Close() if kind == "draft":
                self._close(device, message)
            case _:
                self._count_error(device, ErrorCode.BAD_MESSAGE)

    def _refuse_bytes(self, device: str, kind: str, payload: bytes, error: WireError) -> None:
        key = open_key(payload) if kind == "open" else None
        if key is None:
            self._count_error(device, ErrorCode.BAD_MESSAGE)
        else:
            self._error(device, *key, ErrorCode.BAD_OPEN, str(error))

    def _open(self, device: str, message: Open, now: float) -> None:
        known = self._by_session.get((device, message.session))
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
        refusal = self._refusal(device, message)
        if refusal is not None:
            code, what, retry_ms = refusal
            self._error(device, message.session, message.epoch, code, what, retry_ms)
            return
        # From the session's id, so that the sessions of one device at several verifiers seldom share a handle.
        handle = next(h for h in count(message.session & 0x7F) if (device, h) not in self._by_handle)
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
            contract=self._contracts.get(device.split(".")[0]),
            fleet=self._rates,
        )
        if not ledger.finish:
            try:
                self.engine.open(ledger.key, ledger.text, ledger.sampling, ledger.end, topics.tenant_of(device))
            except ModelError as error:
                self._error(device, message.session, message.epoch, ErrorCode.NO_ROOM, str(error), 2000)
                return
            self._by_key[ledger.key] = ledger
        self._by_handle[device, handle] = ledger
        self._by_session[device, message.session] = ledger
        for observer in self._observers:
            observer.opened(ledger)
        self._answer(ledger, now)

    def _answer(self, ledger: Ledger, now: float) -> None:
        self._send(ledger.device, ledger.opened(now, self.step_us))
        if ledger.finish or ledger.frontier > ledger.device_has:
            self._send(ledger.device, ledger.news(ledger.device_has, now))

    def _refusal(self, device: str, message: Open) -> tuple[str, str, int | None] | None:
        """Why a session is not taken: (code, what, retry_ms)."""
        info, bounds = self.engine.info, self.bounds
        if self.draining:
            return ErrorCode.DRAINING, f"verifier {self.id} is shutting down", None
        if message.target != info.id:
            return ErrorCode.WRONG_TARGET, f"this verifier serves {info.id}, not {message.target}", None
        if message.prefix is not None:
            return ErrorCode.UNKNOWN_PREFIX, f"session {message.prefix[0]:x} is not held here; send the whole text", 0
        outside = next((id for id in message.ids if id >= info.vocab_size), None)
        if outside is not None:
            return ErrorCode.BAD_OPEN, f"id {outside} is outside the vocabulary of {info.vocab_size}", None
        if len(message.ids) > info.context or message.prompt_len >= info.context:
            what = f"a text of {len(message.ids)} tokens does not fit the context of {info.context}"
            return ErrorCode.OVER_CONTEXT, what, None
        if message.max_tokens < 1:
            return ErrorCode.BAD_OPEN, "max_tokens is less than 1", None
        if len(self._by_session) >= bounds.sessions:
            return ErrorCode.NO_ROOM, f"all {bounds.sessions} sessions are taken", 2000
        if sum(of == device for of, _ in self._by_session) >= bounds.sessions_per_device:
            return ErrorCode.OVER_LIMIT, f"{device} has {bounds.sessions_per_device} sessions open already", 2000
        return None

    def _speak(self, device: str, message: Draft | Resync, now: float) -> None:
        ledger = self._by_handle.get((device, message.handle))
        if ledger is None or ledger.epoch != message.epoch:
            self._error(device, 0, message.epoch, ErrorCode.UNKNOWN_SESSION, handle=message.handle)
            return
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
                    self._send(device, ledger.news(message.have, now))
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
        step = self.scheduler.plan(
            self._by_key.values(),
            self.engine.pending,
            now,
            self.cost,
            share=self.goodput.share,
            crowded=self.crowded,
        )
        if step.work:
            self._planned = step
        return step

    def settle(self, outcome: Outcome, now: float) -> None:
        """Commit what a step drew."""
        self.tally.steps += 1
        self.tally.rows += outcome.rows
        if outcome.accepted:
            self._step_s.append(outcome.seconds)
        self._learn(outcome)
        step_us = self.step_us
        welcome = self._price * CHOICE if self._price < NOTHING_PAYS else 1.0
        for key, ids in outcome.accepted.items():
            ledger = self._by_key[key]
            base, guessed = ledger.commit(ids, now)
            self.tally.committed += ledger.frontier - base
            self.tally.guessed += guessed
            advice = ledger.advise(welcome)
            self._send(ledger.device, ledger.news(base, now, step_us=step_us, advice=advice))
            if ledger.finish:
                self._release(ledger)
        for key, reason in outcome.failed.items():
            self._quarantine(self._by_key[key], ErrorCode.ENGINE, reason)

    def tick(self, now: float) -> None:
        """Repair what may have been lost, and forget who has fallen silent."""
        for ledger in list(self._by_session.values()):
            if now - ledger.heard_at >= self.bounds.idle_s:
                self._forget(ledger)
            elif self._owes(ledger) and now - ledger.told_at >= self.bounds.repair_s:
                if not ledger.spoke:
                    self._send(ledger.device, ledger.opened(now, self.step_us))
                self._send(ledger.device, ledger.news(ledger.device_has, now))

    def wake_at(self, now: float) -> float:
        """When `plan` or `tick` may next have something to do, if no message comes."""
        times = [inf]
        for ledger in self._by_session.values():
            times.append(ledger.heard_at + self.bounds.idle_s)
            if self._owes(ledger):
                times.append(ledger.told_at + self.bounds.repair_s)
            if not ledger.finish and self.engine.pending(ledger.key) > 1:
                times.append(now)
            elif ledger.may_run():
                times.append(ledger.due_at(self.crowded))
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
            self.step_us,
        )

    @property
    def step_us(self) -> int:
        """Median time of the latest steps that drew a token, in microseconds; 0 before the first."""
        return round(median(self._step_s) * 1e6) if self._step_s else 0

    @property
    def num_sessions(self) -> int:
        return len(self._by_session)

    # -- details --------------------------------------------------------------------------------------------------

    def _learn(self, outcome: Outcome) -> None:
        """What the step took and gave, for the next ones."""
        step, cost = self._planned, self.cost
        if outcome.failed or outcome.rows != step.roots + step.drafts + step.prefill:
            return  # the engine did something else than was planned
        cost.learn(step.roots + step.drafts, outcome.seconds, step.context, step.prefill)
        if not step.roots:
            return
        plain_s = cost.seconds(step.roots, step.context, step.prefill)
        if step.drafts:
            self.goodput.learn(sum(map(len, outcome.accepted.values())), outcome.seconds, step.roots, plain_s)
        self.goodput.step()
        self._price += PRICE_GAIN * (step.price - self._price)
        alone_s = cost.seconds(1)
        self.crowded = plain_s > (CALM if self.crowded else CROWDED) * alone_s

    @staticmethod
    def _owes(ledger: Ledger) -> bool:
        return not ledger.spoke or ledger.device_has < ledger.frontier

    def _send(self, device: str, message: AnyMessage) -> None:
        self._outbox.append(Send(topics.verdict_topic(device), message))

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
        self._count_error(device, code)
        self._send(device, Error(session, epoch, code, what[:1000], retry_ms, handle))

    def _count_error(self, device: str, code: str) -> None:
        self.tally.errors[code] += 1
        for observer in self._observers:
            observer.refused(device, code)

    def _quarantine(self, ledger: Ledger, code: str, what: str) -> None:
        self._error(ledger.device, ledger.session, ledger.epoch, code, what)
        self._forget(ledger)

    def _release(self, ledger: Ledger) -> None:
        """Free the engine's part of a session; what it committed stays until the device has it."""
        if self._by_key.pop(ledger.key, None) is not None:
            self.engine.close(ledger.key)

    def _forget(self, ledger: Ledger) -> None:
        self._release(ledger)
        del self._by_handle[ledger.device, ledger.handle]
        del self._by_session[ledger.device, ledger.session]
        for observer in self._observers:
            observer.closed(ledger)
