"""The link: MQTT 5 to a broker, reconnecting for ever, never blocking the caller; used by boards and cloud alike."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from link.aliases import AliasedTopics, Aliases
from link.backoff import Backoff
from link.client import Client, Will, new_client, password, private_id, tls_context
from link.config import BrokerConfig
from link.counters import Counters
from link.failures import explain, remedy
from link.outbox import EXPIRED, PACKET_TOO_LARGE, QUOTA_EXCEEDED, Message, Queue, Retained, Window
from link.packets import check_topic, publish_packet
from protocol.errors import ConfigError, LinkError, WireError

log = logging.getLogger(__name__)

GOODBYE_S = 0.5  # for the last packet, after what `close` allows for the queue
READ_AT_ONCE = 64
WRITE_AT_ONCE = 8 << 10  # bytes of messages at QoS 0: what the socket does not take of them can no longer be dropped
WIDEST = 4  # bytes of a character in UTF-8
TICK_S = 0.5  # keepalive and refresh are looked at this often
QUICK_FOR_S = 90.0  # of pauses that are short, since most outages last less
CONNECTING_S = 180.0  # name servers and addresses are tried one after the other, and each has its time


class MqttLink:
    """One MQTT 5 client on a thread of its own, at one broker at a time: a connection that fails or ends is followed by
    one to the next of those that the configuration names.

    on_message(topic, payload), on_puback(topic, reason code) and on_state(up, reason) are called on that thread, one
    at a time and with no lock held: they may publish, and they must be quick, since nothing is received meanwhile.
    on_state reports every connection made or lost and every failed attempt; `failure` holds the latest as LinkError.
    on_puback reports, for QoS 1, what the broker answered (0: delivered to somebody, 0x10: nobody subscribes,
    0x80 and above: refused) or that the message was given up here (`link.outbox`: EXPIRED, PACKET_TOO_LARGE,
    QUOTA_EXCEEDED).

    turned_at: when the thread last turned, by `time.monotonic`; ahead of now by what it may take to connect.

    Raises ConfigError for TLS files or a password file that cannot be read.
    """

    def __init__(
        self,
        config: BrokerConfig,
        client_id: str,
        *,
        on_message: Callable[[str, bytes], None],
        on_state: Callable[[bool, str], None] = lambda up, reason: None,
        on_puback: Callable[[str, int], None] = lambda topic, reason: None,
        subscriptions: Iterable[tuple[str, int]] = (),
        will: Will | None = None,
    ) -> None:
        self._places, self._will = config.places, will
        self._config = self._places[0]
        self._on_message, self._on_state, self._on_puback = on_message, on_state, on_puback
        self._tls = tls_context(config)
        self._client_id = private_id(config, client_id)
        password(config)
        self.failure: LinkError | None = None
        self.turned_at = inf
        self._lock = threading.Lock()  # everything below, and every call into paho while connected
        self._changed = threading.Condition(self._lock)
        self._subscriptions = dict(subscriptions)
        self._retained = Retained()
        self._outbox = Queue(config.max_queued_messages, config.max_queued_bytes)
        self._backlog = Queue(config.max_queued_messages * 16, config.backlog_bytes)
        self._window = Window()
        self._aliases = Aliases()  # of this connection, as all of MQTT's
        self._aliased = AliasedTopics()
        self._counters = Counters()
        self._events: list[tuple[Callable[..., None], Any, Any]] = []
        self._client: Client | None = None
        self._up = False
        self._up_since: float | None = None
        self._lost: LinkError | None = None
        self._granting: set[int] = set()  # subscribe packet ids without an answer yet
        self._packet_limit = config.max_packet_bytes
        self._close_by: float | None = None
        self._goodbye = False
        self._wake_r, self._wake_w = socket.socketpair()
        self._wake_r.setblocking(False)
        self._wake_w.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"mqtt {config.address}", daemon=True)

    # What callers on any thread use.

    def start(self) -> MqttLink:
        self.turned_at = time.monotonic()
        self._thread.start()
        return self

    @property
    def address(self) -> str:
        """Of the broker that is connected, or tried."""
        return self._config.address

    @property
    def up(self) -> bool:
        """Whether the broker has accepted this client and its subscriptions."""
        return self._up

    def wait_up(self, timeout_s: float) -> None:
        """Return once the link is up. Raises LinkError with the latest failure when it is not up in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._up, timeout_s):
                raise self.failure or LinkError(f"no answer within {timeout_s:g} s", where=self._config.address)

    def counters(self) -> Counters:
        with self._lock:
            return replace(self._counters)

    def publish(
        self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, expiry_s: float | None = None
    ) -> bool:
        """Send, or queue, one message without waiting for the network; False when it was dropped instead.

        QoS 0: dropped while there is no connection; while the socket is full it waits in a short backlog.
        QoS 1: waits, in order, until the broker acknowledges it, across connections (so it can arrive twice).
        A queue that overflows drops its oldest message; a message that waits longer than expiry_s is dropped. The
        broker is told of expiry_s only where it may keep the message: at QoS 1, or retained.
        Raises WireError for a topic that cannot be published to.
        """
        message = Message(check_topic(topic), payload, qos, retain, expiry_s, time.monotonic())
        with self._lock:
            taken = self._take(message)
            if taken:
                self._pump()
            return taken

    def publish_all(self, messages: Sequence[tuple[str, bytes]]) -> int:
        """Send many (topic, payload) at QoS 0, in their order, as `publish` does but with few writes.

        Returns how many were dropped. Raises WireError for a topic that cannot be published to, before any is sent.
        """
        for topic, _ in messages:
            check_topic(topic)
        with self._lock:
            written = self._write(messages)
            now, num_dropped = time.monotonic(), 0
            for topic, payload in messages[written:]:
                num_dropped += not self._take(Message(topic, payload, 0, False, None, now))
            self._pump()
            return num_dropped

    def retain(self, topic: str, payload: bytes, expiry_s: float | None = None) -> None:
        """Keep `payload` as the retained state of `topic`: sent at each connect and again after half of expiry_s."""
        with self._lock:
            self._retained.set(topic, payload, expiry_s)
        self._wake()

    def forget(self, topic: str) -> None:
        """Remove the retained state of `topic` here and at the broker."""
        with self._lock:
            self._retained.forget(topic)
        self.publish(topic, b"", qos=1, retain=True)

    def subscribe(self, topic_filter: str, qos: int = 0) -> None:
        """Add a subscription, now and at each connect."""
        with self._lock:
            self._subscriptions[topic_filter] = qos
            if self._client and (self._up or self._granting):
                self._send_subscriptions(self._client, {topic_filter: qos})

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription; what the broker has already sent still arrives."""
        with self._lock:
            if (
                self._subscriptions.pop(topic_filter, None) is not None
                and self._client
                and (self._up or self._granting)
            ):
                self._client.unsubscribe(topic_filter)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Flush QoS 1 for at most timeout_s, say goodbye (the will is not published) and end the thread.

        True when nothing was left unacknowledged.
        """
        with self._lock:
            self._close_by = time.monotonic() + timeout_s
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + 1.0)
        with self._lock:
            return not len(self._outbox) and not len(self._window)

    # Under the lock, on any thread.

    def _wake(self) -> None:
        with suppress(OSError):  # full: it will wake anyway; closed: nobody to wake
            self._wake_w.send(b"w")

    def _notify(self, callback: Callable[..., None], first: Any, second: Any) -> None:
        self._events.append((callback, first, second))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _give_up(self, message: Message, reason: int) -> None:
        if reason == EXPIRED:
            self._counters.expired += 1
        elif reason == PACKET_TOO_LARGE:
            self._counters.refused += 1
        else:
            self._counters.dropped += 1
        if message.qos:
            self._notify(self._on_puback, message.topic, reason)

    def _take(self, message: Message) -> bool:
        if self._close_by is not None or (message.qos == 0 and not self._up):
            self._counters.dropped += 1
            return False
        if message.size > self._packet_limit:
            self._give_up(message, PACKET_TOO_LARGE)
            return False
        self._enqueue(message)
        return True

    def _enqueue(self, message: Message) -> None:
        for dropped in (self._outbox if message.qos else self._backlog).put(message):
            self._give_up(dropped, QUOTA_EXCEEDED)

    def _pump(self) -> None:
        """Hand messages to paho as long as the socket takes them; what is cut short waits for the loop."""
        client, now = self._client, time.monotonic()
        while client is not None and self._up and not client.want_write():
            if len(self._outbox) and self._window.has_room:
                message = self._outbox.pop()
                if self._may_send(message, now):
                    self._send(client, message, message.expiry_left(now))
            elif len(self._backlog):
                if packets := self._gather(now):
                    client.write(packets)
            else:
                return
        if threading.current_thread() is not self._thread:
            self._wake()  # so that the loop waits for the socket to take the rest

    def _write(self, messages: Sequence[tuple[str, bytes]]) -> int:
        """Write the first of these past the queues, as long as nothing waits; returns how many."""
        client, written = self._client, 0
        if client is None or not self._up or self._close_by is not None or len(self._outbox) or len(self._backlog):
            return 0
        while not client.want_write():
            packets = bytearray()
            for topic, payload in messages[written:]:
                if len(packets) >= WRITE_AT_ONCE or len(payload) + WIDEST * len(topic) + 16 > self._packet_limit:
                    break
                name, alias = self._aliases.shorten(topic)
                packets += publish_packet(name, payload, alias=alias)
                written += 1
                self._counters.bytes_sent += len(payload)
            if not packets:
                break
            client.write(bytes(packets))
        self._counters.sent += written
        return written

    def _may_send(self, message: Message, now: float) -> bool:
        if message.expiry_left(now) == 0:
            self._give_up(message, EXPIRED)
        elif message.size > self._packet_limit:
            self._give_up(message, PACKET_TOO_LARGE)
        else:
            self._counters.sent += 1
            self._counters.bytes_sent += len(message.payload)
            return True
        return False

    def _send(self, client: Client, message: Message, left: int | None) -> None:
        """At QoS 1. What may be sent again, on another connection, goes with its full topic."""
        properties: Properties | None = None
        if left is not None:
            properties = Properties(PacketTypes.PUBLISH)
            properties.MessageExpiryInterval = left
        info = client.publish(message.topic, message.payload, message.qos, message.retain, properties)
        self._window.sent(info.mid, message)

    def _gather(self, now: float) -> bytes:
        """The next of the backlog as packets, as short as MQTT allows."""
        packets = bytearray()
        while len(self._backlog) and len(packets) < WRITE_AT_ONCE:
            message = self._backlog.pop()
            if self._may_send(message, now):
                topic, alias = self._aliases.shorten(message.topic)
                left = message.expiry_left(now) if message.retain else None
                packets += publish_packet(topic, message.payload, retain=message.retain, expiry_s=left, alias=alias)
        return bytes(packets)

    def _send_subscriptions(self, client: paho.Client, subscriptions: dict[str, int]) -> None:
        _, packet_id = client.subscribe([(name, SubscribeOptions(qos=qos)) for name, qos in subscriptions.items()])
        if packet_id is not None:
            self._granting.add(packet_id)

    # On the link's thread.

    def _run(self) -> None:
        backoff = Backoff(self._config.backoff_max_s, quick_for_s=QUICK_FOR_S)
        while not self._finished():
            self._lost = self._up_since = None
            try:
                failure = self._connection()
            except OSError as error:
                failure = self._lost or self._failure(*explain(error, proxied=self._config.proxy is not None))
            except ConfigError as error:
                failure = self._failure(error.what, error.remedy)
            except Exception as error:  # whatever a broken peer made paho raise must not end the link
                log.exception("connection to %s", self._config.address)
                failure = self._failure(f"broken packet: {error!r}", "Check that an MQTT 5 broker listens there.")
            self.turned_at = time.monotonic()
            if failure is None:
                break
            pause_s = backoff.pause_s(time.monotonic() - self._up_since if self._up_since else 0.0)
            self._down(failure)
            self._dispatch()
            self._sleep(pause_s)
            self._places = (*self._places[1:], self._places[0])
            self._config = self._places[0]
        self._down(None)
        self._dispatch()
        with self._lock:
            self._wake_r.close()
            self._wake_w.close()

    def _finished(self) -> bool:
        if self._close_by is None:
            return False
        return time.monotonic() >= self._close_by or not (len(self._outbox) or len(self._window))

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._finished():
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_r, selectors.EVENT_READ)
                selector.select(min(left, TICK_S))
            self.turned_at = time.monotonic()
            self._drain_wake()
            self._dispatch()

    def _drain_wake(self) -> None:
        with suppress(BlockingIOError):
            self._wake_r.recv(4096)

    def _connection(self) -> LinkError | None:
        """One connection from TCP to its end. Returns why it ended, None after a goodbye. Raises OSError."""
        client = new_client(self._config, self._client_id, self._will, self._tls)
        client.on_connect = self._connected
        client.on_subscribe = self._granted
        client.on_disconnect = self._disconnected
        client.on_message = self._received
        client.on_publish = self._acknowledged
        self._aliased = AliasedTopics(self._config.topic_aliases)
        self.turned_at = time.monotonic() + CONNECTING_S
        client.reconnect()  # blocks this thread alone: nobody else has the client yet
        sock: Any = client.socket()
        if sock is None:  # refused before anything was said
            return self._ended(client)
        with self._lock:
            self._client = client
        answer_by = time.monotonic() + self._config.connect_timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ)
            selector.register(self._wake_r, selectors.EVENT_READ)
            while client.socket() is sock:
                now = self.turned_at = time.monotonic()
                if not self._up and self._close_by is None and now > answer_by:
                    return self._failure("the broker does not answer", "Check that an MQTT 5 broker listens there.")
                if self._close_by is not None and now > self._close_by + GOODBYE_S:
                    return None
                self._turn(client, sock, selector)
                self._dispatch()
        if self._goodbye:
            return None
        return self._ended(client)

    def _ended(self, client: Client) -> LinkError:
        if client.alert is not None:
            return self._failure(*explain(client.alert))
        return self._lost or self._failure("connection lost", "Trying again.")

    def _turn(self, client: Client, sock: Any, selector: selectors.BaseSelector) -> None:
        """Wait for the socket, a caller or the clock, then read, write and keep the connection alive."""
        unread = client.unread
        selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if client.want_write() else 0))
        ready = {key.fileobj for key, _ in selector.select(0.0 if unread else TICK_S)}
        if self._wake_r in ready:
            self._drain_wake()
        with self._lock:
            if unread or sock in ready:
                client.read(READ_AT_ONCE, self._arrived)  # a few at most: the lock is held
            if client.want_write():
                client.loop_write()
            client.loop_misc()
            if self._up:
                for state in self._retained.due(time.monotonic()):
                    self._enqueue(state)
            self._pump()
            if self._finished() and not self._goodbye:
                self._goodbye = True
                client.disconnect()

    def _down(self, failure: LinkError | None) -> None:
        """The connection, if there was one, is over: what was in flight waits again, in its order."""
        with self._changed:
            client, self._client, self._up = self._client, None, False
            if client is not None and (sock := client.socket()) is not None:
                sock.close()
            self._outbox.put_back(self._window.close())
            self._counters.dropped += len(self._backlog.clear())
            self._granting.clear()
            self._packet_limit = self._config.max_packet_bytes
            self._retained.disconnected()
            self.failure = failure
            self._notify(self._on_state, False, str(failure) if failure else "closed")
            self._changed.notify_all()

    def _dispatch(self) -> None:
        """Call back, with no lock held."""
        with self._lock:
            events, self._events = self._events, []
        for callback, first, second in events:
            try:
                callback(first, second)
            except Exception:
                log.exception("callback failed for %s", first)

    def _failure(self, what: str, remedy: str) -> LinkError:
        return LinkError(what, where=self._config.address, remedy=remedy)

    # paho's callbacks, under the lock.

    def _connected(
        self, client: paho.Client, _: Any, flags: Any, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if reason.is_failure:
            self._lost = self._failure(f"the broker refused this client: {reason}", remedy(reason))
            return
        self._window.open(getattr(properties, "ReceiveMaximum", 65535))
        self._aliases = Aliases(getattr(properties, "TopicAliasMaximum", 0))
        self._packet_limit = min(self._packet_limit, getattr(properties, "MaximumPacketSize", self._packet_limit))
        if self._subscriptions:
            self._send_subscriptions(client, self._subscriptions)
        else:
            self._set_up()

    def _granted(self, client: paho.Client, _: Any, packet_id: int, reasons: list[ReasonCode], properties: Any) -> None:
        self._granting.discard(packet_id)
        if refused := [str(reason) for reason in reasons if reason.is_failure]:
            self._lost = self._failure(
                f"the broker refused a subscription of {', '.join(self._subscriptions)}: {refused[0]}",
                "Check the broker's access list.",
            )
            client.disconnect()
        elif not self._granting and not self._up:
            self._set_up()

    def _set_up(self) -> None:
        self._up, self._up_since, self.failure = True, time.monotonic(), None
        self._counters.connects += 1
        self._notify(self._on_state, True, "connected")
        self._changed.notify_all()

    def _disconnected(self, client: paho.Client, _: Any, flags: Any, reason: ReasonCode, properties: Any) -> None:
        if self._lost is None and reason.is_failure:
            if flags.is_disconnect_packet_from_server:
                self._lost = self._failure(f"the broker ended the connection: {reason}", remedy(reason))
            else:
                self._lost = self._failure(
                    f"connection lost: {reason}",
                    f"Trying again. If this goes on, look for another process with the client id {self._client_id!r}.",
                )
        self._up = False
        if threading.current_thread() is not self._thread:
            self._wake()

    def _received(self, client: paho.Client, _: Any, message: paho.MQTTMessage) -> None:
        with suppress(UnicodeDecodeError):
            self._arrived(message.topic, getattr(message.properties, "TopicAlias", None), bytes(message.payload))

    def _arrived(self, topic: str, alias: int | None, payload: bytes) -> None:
        self._counters.received += 1
        self._counters.bytes_received += len(payload)
        try:
            topic = self._aliased.resolve(topic, alias)
        except WireError as error:
            self._lost = self._failure(error.what, "Set `topic_aliases = 0` in [broker].")
            assert self._client is not None
            self._client.disconnect(ReasonCode(PacketTypes.DISCONNECT, "Topic alias invalid"))
            return
        self._events.append((self._on_message, topic, payload))

    def _acknowledged(self, client: paho.Client, _: Any, packet_id: int, reason: ReasonCode, properties: Any) -> None:
        message = self._window.acknowledged(packet_id)
        if message is not None:
            self._counters.acknowledged += 1
            self._notify(self._on_puback, message.topic, reason.value)
