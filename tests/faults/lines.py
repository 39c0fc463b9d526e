"""The lines between processes and their broker, each of which can be cut, frozen, slowed and disturbed on its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tests.faults.scramble import Disorder, Scrambler
from tools.wan import Outage, WanProxy

T = TypeVar("T")


class Line:
    """One process's way to the broker."""

    def __init__(self, lines: Lines, wan: WanProxy, scrambler: Scrambler | None) -> None:
        self._lines, self._wan, self.scrambler = lines, wan, scrambler

    @property
    def port(self) -> int:
        return self._wan.port

    def outage(self, mode: Outage | None) -> None:
        self._lines.call(self._wan.set_outage(mode))

    def shape(self, **link: float) -> None:
        """See `WanProxy.shape`; nothing for a good link."""
        self._lines.do(lambda: self._wan.shape(**link))

    def disturb(self, disorder: Disorder) -> None:
        def change() -> None:
            assert self.scrambler is not None
            self.scrambler.disorder = disorder

        self._lines.do(change)


class Lines:
    """All of them on one thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lines", daemon=True)
        self._thread.start()
        self._ends: list[WanProxy | Scrambler] = []

    def add(self, broker_port: int, seed: int, *, scrambles: bool) -> Line:
        to, scrambler = ("127.0.0.1", broker_port), None
        if scrambles:
            scrambler = Scrambler(to, seed)
            self.call(scrambler.start())
            self._ends.append(scrambler)
            to = ("127.0.0.1", scrambler.port)
        wan = WanProxy(to, seed=seed)
        self.call(wan.start())
        self._ends.append(wan)
        return Line(self, wan, scrambler)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def do(self, work: Any) -> None:
        async def run() -> None:
            work()

        self.call(run())

    def stop(self) -> None:
        for end in self._ends:
            self.call(end.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
