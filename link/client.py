"""paho-mqtt as this project uses it: a client for one connection, its way to the broker, and the socket's tuning."""

from __future__ import annotations

import hmac
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from link.config import BrokerConfig
from link.failures import words
from link.packets import PUBLISH, read_publish
from link.tunnel import open_tunnel
from protocol.errors import ConfigError, WireError
from protocol.topics import check_name

READ_BYTES = 64 << 10  # from the socket at once
UNANSWERED_MS = 3000  # that TCP may go on sending again what the other end does not acknowledge
UNSENT_BYTES = 16 << 10  # what the kernel may hold unsent: what waits longer must wait where it can still be dropped


@dataclass(frozen=True, slots=True)
class Will:
    """Published by the broker when this client vanishes without a goodbye. expiry_s: seconds it then lives."""

    topic: str
    payload: bytes
    retain: bool = False
    expiry_s: int | None = None
    qos: int = 1


class Client(paho.Client):
    """paho's client, with a shorter way for what comes and goes by the hundred: reads of many packets at once, and
    messages at QoS 0 past paho's bookkeeping. `broker`: where it connects to.
    """

    broker: BrokerConfig
    _ahead, _at = b"", 0  # what was read from the socket, and how far it was taken
    _broken: OSError | None = None  # what ended the connection behind what was read ahead
    alert: ssl.SSLError | None = None  # why TLS ended the connection, which paho only logs

    @property
    def unread(self) -> bool:
        """Whether there is something to read that no event will tell of."""
        sock: Any = self.socket()
        return self._at < len(self._ahead) or (hasattr(sock, "pending") and sock.pending() > 0)

    def read(self, most: int, on_message: Callable[[str, int | None, bytes], None]) -> None:
        """Call back with (topic, alias, payload) of each message at QoS 0, and let paho call back for all else, in the
        order in which they come. Returns after so many packets, or when what is left has not come yet.
        """
        for _ in range(most):
            packet = read_publish(self._ahead, self._at) if self._in_packet["command"] == 0 else None
            if packet is None:
                self.loop_read()
                if not self.unread:
                    return
            else:
                topic, alias, payload, self._at = packet
                on_message(topic, alias, payload)

    def write(self, packets: bytes) -> None:
        """Send whole packets at QoS 0 as one, or what the socket takes of them; the rest follows in `loop_write`."""
        self._packet_queue(PUBLISH, packets, 0, 1, None)  # "at QoS 1" paho keeps no account of their way out

    def _create_socket_connection(self) -> socket.socket:
        """In place of paho's, whose way an environment variable can change where PySocks is installed."""
        broker = self.broker
        if broker.way is not None:
            sock = open_tunnel(broker.way, broker.authority, broker.connect_timeout_s)
        else:
            sock = socket.create_connection((broker.host, broker.port), timeout=broker.connect_timeout_s)
        _tune(sock)
        return sock

    def _create_socket(self) -> Any:
        """In place of paho's WebSocket, whose answers to pings break the connection."""
        sock: Any = super()._create_socket()
        if self.broker.transport == "tcp":
            return sock
        from link.websocket import WebSocket  # most links have no need of it

        sock.settimeout(self.broker.connect_timeout_s)
        return WebSocket(sock, self.broker.authority, self.broker.path)

    def _sock_recv(self, bufsize: int) -> bytes:
        if self._at == len(self._ahead):
            try:
                self._ahead, self._at = self._records(max(bufsize, READ_BYTES)), 0
            except ssl.SSLError as error:
                self.alert = error
                raise
            # What paho does not read itself is a sign of life as well; its name in paho 2.2, and in 2.1.
            self._last_bytes_received = self._last_msg_in = time.monotonic()
        data = self._ahead[self._at : self._at + bufsize]
        self._at += len(data)
        return data

    def _records(self, most: int) -> bytes:
        """What has come, up to about so many bytes. TLS hands out one record at a time, and brokers make one of each
        message, so that without this none would come along with others.
        """
        if self._broken is not None:
            raise self._broken
        data = super()._sock_recv(most)
        if not hasattr(self.socket(), "pending"):
            return data
        records, size = [data], len(data)
        while data and size < most:
            try:
                data = super()._sock_recv(most - size)
            except BlockingIOError:
                break
            except OSError as error:  # what came before it counts
                self._broken = error
                break
            records.append(data)
            size += len(data)
        return b"".join(records)

    def _sock_send(self, buf: bytes | bytearray) -> int:
        try:
            return super()._sock_send(buf)
        except BlockingIOError:
            raise
        except OSError:
            with suppress(OSError):  # TLS 1.3 refuses a certificate after our handshake is over: hear why
                self._sock_recv(1)
            raise


def new_client(config: BrokerConfig, client_id: str, will: Will | None, tls: ssl.SSLContext | None) -> Client:
    """A client whose `reconnect()` makes one connection with a clean start.

    Each connection has its own, so that nothing of a lost one can leak into the next.
    """
    client = Client(CallbackAPIVersion.VERSION2, client_id=client_id, protocol=paho.MQTTv5)
    client.broker = config
    client.connect_timeout = config.connect_timeout_s
    client.max_inflight_messages_set(0)  # the link's window counts instead: paho does not obey the Receive Maximum
    if config.username is not None:
        client.username_pw_set(config.username, password(config))
    if tls is not None:
        client.tls_set_context(tls)
    if will is not None:
        properties = Properties(PacketTypes.WILLMESSAGE)
        if will.expiry_s is not None:
            properties.MessageExpiryInterval = will.expiry_s
        client.will_set(will.topic, will.payload, will.qos, will.retain, properties)
    limits = Properties(PacketTypes.CONNECT)
    limits.MaximumPacketSize = config.max_packet_bytes
    if config.topic_aliases:
        limits.TopicAliasMaximum = config.topic_aliases
    client.connect_async(config.host, config.port, config.keepalive_s, clean_start=True, properties=limits)
    return client


def private_id(config: BrokerConfig, name: str) -> str:
    """The client id that `name` has with this configuration: its own, else `name`, and with a key of its own behind it
    what nobody without that key can guess. mosquitto ends a connection when another one takes its id, whoever that is.

    Raises ConfigError for a key that cannot be read.
    """
    if config.client_id is not None:
        return config.client_id
    if config.tls is None or config.tls.key is None:
        return name
    try:
        key = config.tls.key.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read key {config.tls.key}: {words(error)}", where="[broker.tls]") from None
    return f"{name}-{hmac.new(key, name.encode(), 'sha256').hexdigest()[:16]}"


def password(config: BrokerConfig) -> str | None:
    """The first line of the password file, read anew for each connection so that a changed one is taken up.

    Raises ConfigError when the file cannot be read.
    """
    return None if config.password_file is None else _first_line(config.password_file, "password_file")


def share(config: BrokerConfig) -> str:
    """The first line of the share file, "" without one. Raises ConfigError when it cannot be read or is no name."""
    if config.share_file is None:
        return ""
    try:
        return check_name(_first_line(config.share_file, "share_file"), "secret")
    except WireError:  # its text would tell the secret
        raise ConfigError(
            f"the first line of share_file {config.share_file} is not 1 to 64 letters, digits, `-` or `_`",
            where="[broker]",
            remedy="Take the file `share` that `python -m tools.provision issue verifier` wrote.",
        ) from None


def _first_line(path: Path, key: str) -> str:
    try:
        return path.read_text(encoding="utf-8").split("\n", 1)[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {key} {path}: {words(error)}",
            where="[broker]",
            remedy="Name a readable file with the secret in its first line.",
        ) from None


def tls_context(config: BrokerConfig) -> ssl.SSLContext | None:
    """Raises ConfigError when a certificate or key cannot be used."""
    if config.tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=config.tls.ca)
        if config.tls.cert is not None:
            context.load_cert_chain(config.tls.cert, config.tls.key)
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(str(path) for path in (config.tls.ca, config.tls.cert, config.tls.key) if path)
        remedy = "Name readable PEM files, the key without a passphrase."
        if isinstance(error, FileNotFoundError):
            remedy = "Enrol this machine, which makes them (docs/provisioning.md), or name files that are there."
        raise ConfigError(f"cannot use {files}: {words(error)}", where="[broker.tls]", remedy=remedy) from None
    return context


def _tune(sock: socket.socket) -> None:
    """Small messages leave at once, what the network does not take is noticed at once, and that it takes nothing soon:
    TCP tries again after pauses that double, so that a connection finds out late that the network is back; a new one
    does not.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
