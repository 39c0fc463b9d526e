"""One link to each of several brokers, as one: for a verifier, whose boards may be at any of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec

from link.client import Will
from link.config import BrokerConfig
from link.counters import Counters
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import LinkError, WireError

LOOK_S = 0.02
BACKOFF_S = 2.0  # a broker that comes back must not find boards before it finds verifiers


def link_to(places: Sequence[BrokerConfig], client_id: str, **options: Any) -> MqttLink | Links:
    """A link to one broker, or to all of several. options: as `MqttLink` takes them; no `on_puback`."""
    return MqttLink(places[0], client_id, **options) if len(places) == 1 else Links(places, client_id, **options)


class Links:
    """To all of `places` at once, with what callers use of `MqttLink`. What is retained, subscribed or published goes
    to all; `publish_all` takes the broker at which a device was last heard. on_state is called for what is news.

    Callbacks come from as many threads as there are brokers.
    """

    def __init__(
        self,
        places: Sequence[BrokerConfig],
        client_id: str,
        *,
        on_message: Callable[[str, bytes], None],
        on_state: Callable[[bool, str], None] = lambda up, reason: None,
        subscriptions: Iterable[tuple[str, int]] = (),
        will: Will | None = None,
    ) -> None:
        self._on_message, self._on_state = on_message, on_state
        self._told: dict[int, tuple[bool, str]] = {}
        subscribed = tuple(subscriptions)
        self._away: dict[str, MqttLink] = {}  # by verdict topic: devices that were last heard at another than the first
        self.links = [
            MqttLink(
                msgspec.structs.replace(place, backoff_max_s=min(place.backoff_max_s, BACKOFF_S)),
                f"{client_id}-{number}" if number else client_id,
                on_message=partial(self._heard, number),
                on_state=partial(self._tell, number),
                subscriptions=subscribed,
                will=will,
            )
            for number, place in enumerate(places)
        ]

    def start(self) -> Links:
        for link in self.links:
            link.start()
        return self

    @property
    def up(self) -> bool:
        """Whether any broker is reached."""
        return any(link.up for link in self.links)

    @property
    def failure(self) -> LinkError | None:
        """The latest of the first broker that is not reached."""
        return next((link.failure for link in self.links if link.failure is not None), None)

    def wait_up(self, timeout_s: float) -> None:
        """Return once any broker is reached. Raises LinkError with a failure when none is in time."""
        deadline = time.monotonic() + timeout_s
        while not self.up:
            if time.monotonic() >= deadline:
                raise self.failure or LinkError(f"no answer within {timeout_s:g} s", where="all brokers")
            time.sleep(LOOK_S)

    def counters(self) -> Counters:
        """The sums."""
        each = [link.counters() for link in self.links]
        return Counters(**{field.name: sum(getattr(one, field.name) for one in each) for field in fields(Counters)})

    def publish_all(self, messages: Sequence[tuple[str, bytes]]) -> int:
        """As `MqttLink.publish_all`, each message at one broker."""
        if not self._away:
            return self.links[0].publish_all(messages)
        apart: dict[MqttLink, list[tuple[str, bytes]]] = {}
        for topic, payload in messages:
            apart.setdefault(self._away.get(topic, self.links[0]), []).append((topic, payload))
        return sum(link.publish_all(part) for link, part in apart.items())

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, expiry_s: float | None = None
    ) -> bool:
        """At every broker; whether any took it."""
        taken = [link.publish(topic, payload, qos, retain, expiry_s) for link in self.links]
        return any(taken)

    def retain(self, topic: str, payload: bytes, expiry_s: float | None = None) -> None:
        for link in self.links:
            link.retain(topic, payload, expiry_s)

    def subscribe(self, topic_filter: str, qos: int = 0) -> None:
        for link in self.links:
            link.subscribe(topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        for link in self.links:
            link.unsubscribe(topic_filter)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Flush those that are up for at most timeout_s each, and end all."""
        flushed = [link.close(timeout_s if link.up else 0.0) for link in self.links]
        return all(flushed)

    def _heard(self, number: int, topic: str, payload: bytes) -> None:
        if number or self._away:
            self._note(number, topic)
        self._on_message(topic, payload)

    def _tell(self, number: int, up: bool, reason: str) -> None:
        """Not each attempt at a broker that is away: those at the others go on."""
        if self._told.get(number) != (up, reason):
            self._told[number] = up, reason
            self._on_state(up, reason)

    def _note(self, number: int, topic: str) -> None:
        try:
            device = topics.parse(topic).device
        except WireError:
            return
        if not device:
            return
        verdict = topics.verdict_topic(device)
        if number:
            self._away[verdict] = self.links[number]
        else:
            self._away.pop(verdict, None)
