"""The verifier at the broker: messages from the link's thread, steps on the caller's, in a loop that reads as what it
does: receive, repair, plan, step, commit.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence

from cloud.engines.base import Outcome, Plan
from cloud.intake import Intake
from cloud.verifier import Send, Verifier
from link.client import Will, share
from link.config import BrokerConfig
from link.several import link_to
from protocol import topics
from protocol.messages import VerifierState, encode

log = logging.getLogger(__name__)

STATE_EXPIRY_S = 120
MOST_WAITING = 10_000
GARBAGE = 5_000  # objects: in a busy verifier a collection every second or two
OLDER, OLDEST = 5, 20  # the one of so many collections that looks at more
LOOK_S = 1.0
TELL_S = 60.0
LATE_S = 0.2


class Gateway:
    """Runs one `Verifier` until `stop`. At most MOST_WAITING messages wait for the loop; the oldest give way.

    turned_at: when the loop last turned, by the clock; 0 before the first time.
    """

    def __init__(self, verifier: Verifier, *brokers: BrokerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """brokers: all at which devices may be, each with those that stand by for it. `share_file` is the first's."""
        self.verifier, self._clock = verifier, clock
        self._inbox = Intake(MOST_WAITING, verifier.bounds.messages_per_s)
        self._something = threading.Event()
        self._stopping = False
        self.turned_at = 0.0
        self._tell_at = self._flush_at = 0.0
        self._collections = 0
        self._state_topic = topics.verifier_state_topic(verifier.id)
        self._share = topics.shared_open_filter(verifier.engine.info.id, share(brokers[0]))
        places = [place for broker in brokers for place in broker.places]
        self.link = link_to(
            places,
            f"outrider-{verifier.id}",
            on_message=self._on_message,
            on_state=self._on_state,
            subscriptions=[
                (self._share, 1),
                (topics.open_topic("+", verifier.id), 1),
                (topics.draft_topic("+", verifier.id), 1),
            ],
            will=Will(self._state_topic, encode(VerifierState(verifier.id, "gone")), retain=True, expiry_s=60),
        )

    def run(self) -> None:
        """Serve until `stop`, then move the sessions on and say goodbye."""
        # Libraries' hundred thousands of objects are not gone through between steps, nor the sessions' while news wait.
        gc.collect()
        gc.freeze()
        gc.disable()
        self.link.start()
        try:
            while not self._stopping:
                self._something.clear()
                self._turn()
        finally:
            self._leave()
            gc.enable()

    def stop(self) -> None:
        """End `run` after the step under way; may be called from a signal handler."""
        self._stopping = True
        self._something.set()

    def leave_share(self) -> None:
        """Get no more new sessions; those that are open go on. May be called on any thread."""
        self.link.unsubscribe(self._share)

    def _turn(self) -> None:
        verifier = self.verifier
        for _ in range(len(self._inbox)):  # what comes meanwhile has to wait for a step, however much it is
            topic, payload, came_at = self._inbox.take()
            verifier.receive(topic, payload, came_at, self._clock() - came_at)
        now = self.turned_at = self._clock()  # not before what was received came
        if now >= self._tell_at:
            self._tell_state("up")
            self._tell_at = now + TELL_S
        if now >= self._flush_at:
            for device, num in self._inbox.overflow().items():
                verifier.flooded(device, num)
            verifier.flush(now)
            self._flush_at = now + LOOK_S
        verifier.tick(now)
        plan = verifier.plan(now)
        self._publish()
        if plan.work:
            outcome = self._step(plan)
            for _ in verifier.settle_in_parts(outcome, self._clock()):
                self._publish()
            self._publish()
        else:
            wait = min(verifier.wake_at(now) - now, LOOK_S)
            self._something.wait(max(0.0, wait))
        if gc.get_count()[0] > GARBAGE:
            self._collections += 1
            gc.collect(2 if self._collections % OLDEST == 0 else 1 if self._collections % OLDER == 0 else 0)

    def _step(self, plan: Plan) -> Outcome:
        try:
            return self.verifier.engine.step(plan)
        except Exception:
            log.exception("a step of %d sessions failed; they are sent to open again", len(plan.work))
            return Outcome(failed={work.key: "the engine failed in this step" for work in plan.work})

    def _publish(self) -> None:
        if sends := self.verifier.take():
            self._send(sends)

    def _send(self, sends: Sequence[Send]) -> None:
        messages = []
        for send in sends:
            payload = encode(send.message)
            if send.usage is not None:
                send.usage.bytes_out += len(payload)
            messages.append((send.topic, payload))
        self.link.publish_all(messages)

    def _tell_state(self, status: str) -> None:
        self.link.retain(self._state_topic, encode(self.verifier.state(status)), STATE_EXPIRY_S)

    def _leave(self) -> None:
        tally = self.verifier.tally
        log.info(
            "%d steps of %d rows committed %d tokens, %d of them guessed; %d guesses were grafted, %d came too late",
            *(tally.steps, tally.rows, tally.committed, tally.guessed, tally.grafted, tally.stale),
        )
        self.leave_share()
        self.verifier.drain()
        self._publish()
        self._turn_away()
        self.verifier.flush(self._clock())
        self.verifier.close()
        self.link.retain(self._state_topic, encode(self.verifier.state("gone")), 60)
        self.link.publish(self._state_topic, encode(self.verifier.state("gone")), qos=1, retain=True, expiry_s=60)
        self.link.close()

    def _turn_away(self) -> None:
        """Answer the opens that were on their way, or their devices would wait for us in vain."""
        until = self._clock() + LATE_S
        while (left := until - self._clock()) > 0:
            self._something.clear()
            while self._inbox:
                self.verifier.receive(*self._inbox.take())
            self._publish()
            self._something.wait(left)

    def _on_message(self, topic: str, payload: bytes) -> None:
        self._inbox.put(topic, payload, self._clock())
        self._something.set()

    def _on_state(self, up: bool, reason: str) -> None:
        if up:
            log.info("serving %s as %s", self.verifier.engine.info.id, self.verifier.id)
        elif not self._stopping:
            log.warning("%s", reason)
