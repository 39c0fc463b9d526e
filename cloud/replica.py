"""One verifier of a fleet: what runs in a replica's process, whoever started it."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from cloud.autoscale import Load
from cloud.config import CloudConfig
from cloud.engines.base import Outcome
from cloud.gateway import Gateway
from cloud.scheduler import Step
from cloud.usage import Observer
from protocol.errors import OutriderError

SWITCH_S = 0.0005
FAILED_STEPS = 3
FADE_S = 3.0  # queue time is of no session any more, once there was no step for so long

Make = Callable[[CloudConfig, Observer], AbstractContextManager[Gateway]]


class Pulse(Observer):
    """Whether steps still come about. failed: steps in a row that the engine did not do at all."""

    def __init__(self, give_up: Callable[[], None]) -> None:
        self.failed = 0
        self.stepped_at = 0.0
        self._give_up = give_up

    def stepped(self, step: Step, outcome: Outcome, queue_s: float) -> None:
        self.stepped_at = time.monotonic()
        self.failed = self.failed + 1 if outcome.failed and not outcome.rows else 0
        if self.failed >= FAILED_STEPS:
            self._give_up()


class Replica:
    """Serves from `serve` to `stop`, SIGTERM or the engine's end; the other methods may be called meanwhile, on any
    thread. To be made on its process's main thread.
    """

    def __init__(self, config: CloudConfig, make: Make, configure_logs: Callable[[], None]) -> None:
        """config: with `verifier` set; make: the gateway for it, whose verifier has the given observer among others."""
        assert config.verifier
        self.name, self._config, self._make = config.verifier, config, make
        self._gateway: Gateway | None = None
        self._stopping = False
        self._pulse = Pulse(self.stop)
        sys.setswitchinterval(SWITCH_S)
        configure_logs()
        self._on_sigterm()

    def __repr__(self) -> str:
        return self.name

    def serve(self) -> None:
        """Raises what making the engine raises, and OutriderError when the engine fails again and again."""
        with self._make(self._config, self._pulse) as gateway:
            self._gateway = gateway
            if not self._stopping:
                gateway.run()
        if self._pulse.failed >= FAILED_STEPS:
            raise OutriderError(f"its engine failed in {FAILED_STEPS} steps in a row", where=f"replica {self.name}")

    def load(self) -> Load:
        gateway = self._gateway
        if gateway is None:
            return Load()
        now, verifier = time.monotonic(), gateway.verifier
        queued = now - self._pulse.stepped_at < FADE_S
        return Load(
            serving=gateway.link.up,
            sessions=verifier.num_sessions,
            queue_s=verifier.experience.queue_s if queued else 0.0,
            step_us=verifier.experience.step_us,
            silence_s=now - gateway.turned_at if gateway.turned_at else 0.0,
        )

    def retire(self) -> None:
        """Take no more new sessions; those that are open go on."""
        if self._gateway is not None:
            self._gateway.leave_share()

    def stop(self) -> None:
        """Move the sessions on and end `serve`."""
        self._stopping = True
        if self._gateway is not None:
            self._gateway.stop()

    def _on_sigterm(self) -> None:
        """The main thread may be outside Python for ever, and would run no handler: the C half of one writes to a
        socket, which another thread reads.
        """
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._wakeup = theirs
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)

        def wait() -> None:
            while signal.SIGTERM not in ours.recv(64):
                pass
            self.stop()

        threading.Thread(target=wait, name="sigterm", daemon=True).start()
