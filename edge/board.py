"""A board at its broker: one link, one drafter, and the sessions that use them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import msgspec

from edge.calibration import Calibration
from edge.config import EdgeConfig
from edge.cooling import Watch
from edge.drafters.base import Drafter
from edge.journal import Entry, Journal, SessionJournal
from edge.policy import NoDraftPolicy
from edge.runtime import SessionRun
from edge.session import Request, Send, Tally
from edge.targets import choose_target
from edge.turns import Turns
from edge.window import Window
from link.client import Will
from link.command import package_version
from link.mqtt import MqttLink
from link.outbox import EXPIRED
from protocol import topics
from protocol.errors import LinkError, OutriderError, SessionError, WireError
from protocol.messages import Announcement, DeviceState, Error, ErrorCode, Health, VerifierState, decode, encode

log = logging.getLogger(__name__)

STATE_EXPIRY_S = 120
OFFLINE_EXPIRY_S = 24 * 3600
GIVE_BACK_S = 5.0
NO_MATCHING_SUBSCRIBERS = 0x10
REFUSED = 0x80


class Stream:
    """Verified ids of one session, for one reader. Iterate, or ask `run` for what is not verified yet.

    Iteration ends when the text is complete; it raises SessionError when it cannot be completed.
    """

    def __init__(self) -> None:
        self.run: SessionRun | None = None
        self._queue: SimpleQueue[list[int] | None] = SimpleQueue()

    def verified(self, ids: Sequence[int]) -> None:
        self._queue.put(list(ids))

    def ended(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> list[int]:
        ids = self._queue.get()
        if ids is not None:
            return ids
        self._queue.put(None)
        if self.run is not None and self.run.window.failure is not None:
            raise self.run.window.failure
        raise StopIteration

    def abandon(self, error: BaseException) -> None:
        """The session's thread has died."""
        if self.run is not None and not self.run.window.done:
            self.run.window.failure = SessionError(f"the drafting loop stopped: {error!r}")
        self._queue.put(None)


class Updates(Protocol):
    """Who takes releases, see `edge.updates`. Both are called on the board's threads, and return at once."""

    def announced(self, announcement: Announcement) -> None: ...

    def ended(self, tally: Tally) -> None:
        """A session has ended."""


class Board:
    """Opens sessions. The drafter serves one session at a time; others meanwhile are streamed without it.

    present: whether this process speaks for the device, so that its retained state tells whether it is online.
    root: below which the board's own facts are read.
    """

    def __init__(
        self,
        config: EdgeConfig,
        drafter: Drafter,
        *,
        client_id: str = "",
        present: bool = True,
        root: Path = Path("/"),
    ) -> None:
        self.config, self.drafter = config, drafter
        self.watch = Watch(config.board, on_news=self._retain, root=root)
        self.device = config.device.name
        self.journal = Journal(config.device.state / "journal")
        self._drafter_free = threading.Lock()
        self._drafting: SessionRun | None = None
        self._calibrations = {greedy: Calibration() for greedy in (True, False)}
        self._finding = threading.Lock()
        self._target: VerifierState | None = None
        self._watched: set[str] = set()
        self._lock = threading.Lock()
        self._runs: list[SessionRun] = []
        self._verifiers: dict[str, VerifierState] = {}
        self._verifiers_changed = threading.Event()
        self._turns = Turns()
        self._present, self._closing = present, False
        self._updates: Updates | None = None
        self._releases = ""
        state_topic = topics.device_state_topic(self.device)
        will = Will(state_topic, encode(DeviceState("offline")), retain=True, expiry_s=OFFLINE_EXPIRY_S)
        self.link = MqttLink(
            config.broker,
            client_id or f"outrider-{self.device}",
            on_message=self._on_message,
            on_state=self._on_state,
            on_puback=self._on_puback,
            subscriptions=[(topics.verdict_topic(self.device), 0)],
            will=will if present else None,
        )
        self._retain()

    def follow(self, updates: Updates, channel: str) -> None:
        """Take the releases of a channel from now on."""
        self._updates = updates
        self.link.subscribe(topics.update_topic(channel, "+"), 1)

    def tell_releases(self, line: str) -> None:
        """What runs, for the device's state."""
        self._releases = line
        self._retain()

    def moved(self) -> int:
        """Payload bytes that the link has carried, both ways."""
        counters = self.link.counters()
        return counters.bytes_sent + counters.bytes_received

    def start(self) -> Board:
        self.link.start()
        self.watch.start()
        return self

    def close(self) -> None:
        """End what runs, each with a SessionError: the journal has what it needs to go on."""
        self._closing = True
        self.watch.stop()
        for run in self._now_running():
            run.leave()
        if self._present:
            topic = topics.device_state_topic(self.device)
            self.link.publish(topic, encode(DeviceState("offline")), qos=1, retain=True, expiry_s=OFFLINE_EXPIRY_S)
        self.link.close()

    # -- sessions -------------------------------------------------------------------------------------------------

    def find_target(self, timeout_s: float) -> VerifierState:
        """The target for new sessions: the one found before, until its opens find nobody; else the first that the
        broker names and that fits; see `choose_target` for errors.

        Raises LinkError when the broker cannot be reached in that time.
        """
        self.link.wait_up(min(timeout_s, threading.TIMEOUT_MAX))
        with self._finding:
            if self._target is None:
                # The states of a whole fleet's verifiers are much for a metered link: they are read only to choose.
                everyone = topics.verifier_state_topic("+")
                self._verifiers.clear()
                self.link.subscribe(everyone)
                try:
                    self._target = self._await_target(timeout_s)
                finally:
                    self.link.unsubscribe(everyone)
            return self._target

    def _await_target(self, timeout_s: float) -> VerifierState:
        waited, said = 0.0, ""
        while True:
            try:
                with self._lock:
                    return choose_target(
                        list(self._verifiers.values()),
                        tokenizer_digest=self.drafter.info.tokenizer_digest,
                        wanted=self.config.session.target,
                        where=self.link.address,
                    )
            except OutriderError as error:
                if waited >= timeout_s or (waited > 1.0 and not isinstance(error, LinkError)):
                    raise
                if waited > 1.0 and str(error) != said:
                    said = str(error)
                    log.warning("%s. Still looking", said)
            self._verifiers_changed.wait(0.1)
            self._verifiers_changed.clear()
            waited += 0.1

    def open(self, request: Request) -> Stream:
        """Start a session in a thread of its own."""
        return self._begin(Entry(request, [], 0, ""), fresh=True)

    def resume(self, entry: Entry) -> Stream:
        """Go on with a session of the journal; the stream gives only what is new."""
        return self._begin(msgspec.structs.replace(entry, epoch=entry.epoch + 1), fresh=False)

    def _begin(self, entry: Entry, *, fresh: bool) -> Stream:
        request = entry.request
        journal = self._open_journal(request, fresh=fresh)
        drafting = self.config.drafting.policy != "none" and self._take_drafter()
        calibration = self._calibrations[request.sampling.greedy]
        policy = self.config.drafting.make(calibration) if drafting else NoDraftPolicy()
        stream = Stream()
        turn = self._turns.former(request.target, request.prompt) if fresh else None
        window = Window(
            self.device,
            request,
            timing=self.config.timing.timing(),
            now=0.0,
            committed=entry.committed,
            epoch=entry.epoch,
            former=turn.verifier if turn else entry.owner,
            prefix=turn.prefix if turn else None,
        )
        run = SessionRun(
            window,
            self.drafter if drafting else None,
            policy,
            publish=self._publish,
            listener=stream,
            journal=journal,
            share=lambda: self.watch.share,
        )
        stream.run = run
        with self._lock:
            if drafting:
                self._drafting = run
            self._runs.append(run)
            if not self.link.up:
                run.link_down(str(self.link.failure or f"{self.link.address}: not connected yet"))

        def work() -> None:
            try:
                run.run()
            except Exception as error:
                log.exception("the drafting loop stopped")
                stream.abandon(error)
            finally:
                with self._lock:
                    self._runs.remove(run)
                    self._turns.ended(window)
                if self._updates is not None:
                    self._updates.ended(window.tally)
                if drafting:
                    self._drafter_free.release()
                if journal is not None:
                    journal.close()

        threading.Thread(target=work, name=f"session {request.session:016x}", daemon=True).start()
        return stream

    def _open_journal(self, request: Request, *, fresh: bool) -> SessionJournal | None:
        """A disk that is full costs the way back after a crash, never the text."""
        try:
            return self.journal.begin(request) if fresh else self.journal.resume(request.session)
        except OSError as error:
            log.error("%s: %s; this text cannot be resumed after a crash", self.journal.folder, error.strerror)
            return None

    def _take_drafter(self) -> bool:
        """Whether the drafter is ours now. A session that has ended gives it back after the pass it is in."""
        with self._lock:
            user = self._drafting
        ending = user is not None and user.window.done
        return self._drafter_free.acquire(timeout=GIVE_BACK_S if ending else 0)

    @property
    def busy(self) -> bool:
        """Whether a session's thread is still at work; its text may already be complete."""
        return bool(self._now_running())

    def loops(self) -> dict[str, float]:
        """When each of the board's loops last got on, by `time.monotonic`."""
        runs = {f"session {run.window.request.session:016x}": run.turned_at for run in self._now_running()}
        return {"the link": self.link.turned_at, **runs}

    def status(self) -> str:
        """What the board does, for a person."""
        num = len(self._now_running())
        work = "idle" if not num else "1 session" if num == 1 else f"{num} sessions"
        if self.link.up:
            return f"{work}, connected to {self.link.address}"
        return f"{work}, not connected: {self.link.failure or self.link.address}"

    # -- the link's thread ----------------------------------------------------------------------------------------

    def _publish(self, send: Send) -> None:
        self.link.publish(send.topic, encode(send.message), qos=send.qos, expiry_s=send.expiry_s)

    def _on_message(self, topic: str, payload: bytes) -> None:
        try:
            message = decode(payload)
        except WireError as error:
            log.warning("%s: %s", topic, error)
            return
        if isinstance(message, Announcement):
            if self._updates is not None:
                self._updates.announced(message)
            return
        if isinstance(message, VerifierState):
            with self._lock:
                self._verifiers[message.verifier] = message
                if message.status == "gone":
                    self._turns.forget(message.verifier)
            self._verifiers_changed.set()
        if isinstance(message, Error) and message.code == ErrorCode.WRONG_TARGET:
            self._target = None
        for run in self._now_running():
            run.receive(message)
            self._watch(run.window.verifier)

    def _watch(self, verifier: str) -> None:
        """Hear of it when a session's owner dies; of former owners, only until there is a new one."""
        if not verifier or verifier in self._watched:
            return
        owners = {run.window.verifier for run in self._now_running()}
        for former in self._watched - owners:
            self.link.unsubscribe(topics.verifier_state_topic(former))
        self._watched = (self._watched & owners) | {verifier}
        self.link.subscribe(topics.verifier_state_topic(verifier))

    def _on_state(self, up: bool, reason: str) -> None:
        if not up and not self._closing:
            log.warning("%s", reason)
        for run in self._now_running():
            if up:
                run.link_up()
            else:
                run.link_down(reason)

    def _on_puback(self, topic: str, reason: int) -> None:
        if "/open/" not in topic or (reason != NO_MATCHING_SUBSCRIBERS and reason < REFUSED):
            return
        if reason == EXPIRED:  # while it waited for the network; the session's own timer opens again
            return
        if reason >= REFUSED:
            log.warning("the broker refused %s with reason 0x%02x", topic, reason)
        self._target = None
        for run in self._now_running():
            run.unserved()

    def _now_running(self) -> list[SessionRun]:
        with self._lock:
            return list(self._runs)

    def _retain(self) -> None:
        """Let the broker keep the device's state as it is now, where this process speaks for the device."""
        if self._present:
            self.link.retain(topics.device_state_topic(self.device), encode(self._state()), STATE_EXPIRY_S)

    def _state(self) -> DeviceState:
        info, facts = self.drafter.info, self.watch.facts
        health = Health(
            drafting=round(100 * self.watch.share),
            throttled=int(facts.throttle),
            temperature_c=None if facts.hottest is None else round(facts.hottest.celsius),
            free_mib=facts.free_mib,
            power_mode=facts.power_mode,
            hardware=facts.hardware,
        )
        return DeviceState(
            status="online",
            version=package_version(),
            drafter=info.name,
            drafter_digest=info.weights_digest,
            tokenizer_digest=info.tokenizer_digest,
            compute=f"{info.compute} on {info.provider}",
            health=health,
            releases=self._releases,
        )
