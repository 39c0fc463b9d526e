"""Which replica starts, leaves or is given up: what is decided of a fleet of verifiers, apart from how it is done
(pure: events in, orders out, time as an argument).

A replica is never restarted: another one takes its place, with a name of its own, and nothing of the old one's state.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from cloud.autoscale import Autoscale, Load
from link.backoff import Backoff
from protocol.errors import ConfigError, ModelError, OutriderError

if TYPE_CHECKING:
    from cloud.config import ReplicasConfig

PAUSE_MOST_S = 60.0
FRUITLESS = 6  # deaths in a row, of replicas that never served
PLACE_S = 15.0  # from then on, and as often, it is said that a replica waits for a place

UNKNOWN = Load()


@dataclass(slots=True)
class Member:
    """A replica from its order to its end. slot: the lowest number that was free; generation: of the configuration that
    it was made from; began, placed, served, leaving: when each came about; heard: its latest sign of life.
    """

    id: str
    slot: int
    generation: int
    began: float
    heard: float
    placed: float | None = None
    served: float | None = None
    leaving: float | None = None
    told: float = 0.0
    load: Load = UNKNOWN

    @property
    def serves(self) -> bool:
        return self.served is not None and self.leaving is None


@dataclass(frozen=True, slots=True)
class Start:
    """Make a replica."""

    member: Member


@dataclass(frozen=True, slots=True)
class Retire:
    """Take a replica out of the share of new sessions."""

    id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Let a replica move its sessions and end."""

    id: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a replica's process."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Say something to whoever reads the log."""

    what: str


Order = Start | Retire | Stop | Kill | Tell


class Fleet:
    """The members and what is to be done about them.

    failure: why the fleet cannot serve, once that is certain; it then closes. over: closed, and nobody is left.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        *,
        backoff: Backoff | None = None,
        name: Callable[[], str] = lambda: f"v{secrets.token_hex(5)}",
    ) -> None:
        self.config = config
        self.members: dict[str, Member] = {}
        self.failure: OutriderError | None = None
        self.generation = 0
        self._scale = self._autoscale(config.least)
        self._backoff = backoff or Backoff(PAUSE_MOST_S)
        self._name = name
        self._pauses: list[float] = []  # until when the place of each of the dead stays empty
        self._fruitless = 0
        self._closing: float | None = None

    # -- events ---------------------------------------------------------------------------------------------------

    def heard(self, id: str, load: Load, now: float) -> None:
        """A replica has answered."""
        member = self.members[id]
        member.load = load
        member.heard = now - load.silence_s
        if member.placed is None:
            member.placed = now
        if load.serving and member.served is None:
            member.served = now
            self._fruitless = 0

    def ended(self, id: str, now: float, error: Exception | None = None) -> None:
        """A replica's process, or its verifier, has come to its end."""
        member = self.members.pop(id)
        if member.leaving is not None or self._closing is not None:
            return
        pause_s = self._backoff.pause_s(now - member.served if member.served is not None else 0.0)
        if isinstance(error, ConfigError | ModelError):
            if self._served_by_none:
                self._fail(error, now)
            pause_s = PAUSE_MOST_S  # others of the same configuration serve: their machine has what this one lacks
        elif member.served is None:
            self._fruitless += 1
            if self._fruitless >= FRUITLESS and self._served_by_none:
                what = f"{self._fruitless} replicas in a row ended before they served: {error or 'without an error'}"
                self._fail(OutriderError(what, where="replicas", remedy="See their log above"), now)
        self._pauses.append(now + pause_s)

    def renew(self, config: ReplicasConfig) -> None:
        """Replace every member, one after the other, each once its successor serves."""
        self.generation += 1
        self.config = config
        self._scale = self._autoscale(self._scale.wanted)

    def close(self, now: float) -> None:
        """Let all members leave."""
        if self._closing is None:
            self._closing = now

    # -- decisions ------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self._closing is not None and not self.members

    def orders(self, now: float) -> list[Order]:
        """What is to be done now; each order is given once."""
        orders: list[Order] = [order for member in list(self.members.values()) for order in self._judge(member, now)]
        if self._closing is not None:
            return orders + self._leave_all(now)
        serving = [member for member in self.members.values() if member.serves]
        # Those that have lost the broker have no queue, and no say.
        wanted = self._scale.look([member.load for member in serving if member.load.serving], now)
        staying = [member for member in self.members.values() if member.leaving is None]
        if len(serving) > wanted and len(staying) == len(self.members):
            leaver = min(serving, key=lambda member: (member.generation, member.load.sessions))
            orders += self._leave(leaver, now)
            staying.remove(leaver)
        spare = any(member.generation != self.generation for member in staying)
        self._pauses = [end for end in self._pauses if end > now]
        missing = wanted + spare - len(staying) - len(self._pauses)
        return orders + [self._start(now) for _ in range(missing)]

    def _judge(self, member: Member, now: float) -> list[Order]:
        """Whether one has had its time."""
        config = self.config
        if member.leaving is not None:
            late = now - member.leaving >= config.drain_s
            return [Kill(member.id, f"it has not left within {config.drain_s:g} s")] if late else []
        if member.placed is None:
            if now - max(member.began, member.told) >= PLACE_S:
                member.told = now
                return [
                    Tell(f"replica {member.id} waits for {config.cpus:g} CPU and {config.gpus:g} GPU that are free")
                ]
        elif member.served is None:
            if now - member.placed >= config.start_s:
                return [Kill(member.id, f"it does not serve after {config.start_s:g} s")]
        elif now - member.heard >= config.hang_s:
            return [Kill(member.id, f"it has given no sign of life for {config.hang_s:g} s")]
        return []

    def _start(self, now: float) -> Start:
        taken = {member.slot for member in self.members.values()}
        slot = next(slot for slot in count() if slot not in taken)
        member = Member(self._name(), slot, self.generation, began=now, heard=now)
        self.members[member.id] = member
        return Start(member)

    @staticmethod
    def _leave(member: Member, now: float) -> list[Order]:
        member.leaving = now
        return [Retire(member.id), Stop(member.id)]

    def _leave_all(self, now: float) -> list[Order]:
        """First all leave the share, so that no session moves to one that is about to leave as well."""
        staying = [member for member in self.members.values() if member.leaving is None]
        retiring: list[Order] = [Retire(member.id) for member in staying if member.serves]
        stopping: list[Order] = [
            Stop(member.id) if member.serves else Kill(member.id, "it has not begun to serve") for member in staying
        ]
        for member in staying:
            member.leaving = now
        return retiring + stopping

    # -- details --------------------------------------------------------------------------------------------------

    @property
    def _served_by_none(self) -> bool:
        return not any(member.serves for member in self.members.values())

    def _fail(self, error: OutriderError, now: float) -> None:
        self.failure = error
        self.close(now)

    def _autoscale(self, wanted: int) -> Autoscale:
        config = self.config
        most = max(config.least, config.most or 0)
        made = Autoscale(
            config.least, most, high_s=config.queue_high_s, low_s=config.queue_low_s, settle_s=config.settle_s
        )
        made.wanted = min(max(wanted, config.least), most)
        return made
