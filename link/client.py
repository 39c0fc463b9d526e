"""paho-mqtt as this project uses it: a client for one connection, the socket's tuning, and failures in words."""

from __future__ import annotations

import errno
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
from paho.mqtt.reasoncodes import ReasonCode

from link.config import BrokerConfig
from link.packets import PUBLISH, read_publish
from protocol.errors import ConfigError, WireError
from protocol.topics import check_name

READ_BYTES = 64 << 10  # from the socket at once
UNANSWERED_MS = 3000  # that TCP may go on sending again what the other end does not acknowledge
UNSENT_BYTES = 16 << 10  # what the kernel may hold unsent: what waits longer must wait where it can still be dropped

REMEDIES = {
    0x84: "The broker must speak MQTT 5.",
    0x85: "Check `client_id` in [broker].",
    0x86: "Check `username` and `password_file` in [broker].",
    0x87: "Check `username` and `password_file` in [broker], and the broker's access list.",
    0x8A: "Ask the broker's operator to lift the ban.",
    0x8E: "Another process uses the same client id: stop it, or give this one a `client_id` of its own.",
}


NOT_YET_VALID, EXPIRED = 9, 10  # OpenSSL's X509_V_ERR_CERT_...

# How the broker refuses a client's certificate: TLS alerts, as OpenSSL names them.
ALERTS = {
    "CERTIFICATE_REQUIRED": ("wants a certificate", "Set `cert` and `key` in [broker.tls]."),
    "CERTIFICATE_EXPIRED": ("says that `cert` has expired", "Renew it, or set the broker's clock if that is wrong."),
    "CERTIFICATE_REVOKED": ("says that `cert` is revoked", "Enrol anew, with a new code."),
    "UNKNOWN_CA": ("does not know the authority of `cert`", "Enrol with the authority of this broker's fleet."),
    "BAD_CERTIFICATE": ("does not take `cert`", "Compare its dates with the broker's clock: it may not be valid yet."),
    "UNSUPPORTED_CERTIFICATE": ("does not take `cert`", "It is for another purpose than to be a client's."),
}


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
    messages at QoS 0 past paho's bookkeeping.
    """

    _ahead, _at = b"", 0  # what was read from the socket, and how far it was taken
    _broken: OSError | None = None  # what ended the connection behind what was read ahead
    alert: ssl.SSLError | None = None  # why TLS ended the connection, which paho only logs

    @property
    def unread(self) -> bool:
        """Whether there is something to read that no event will tell of."""
        sock = self.socket()
        return self._at < len(self._ahead) or (isinstance(sock, ssl.SSLSocket) and sock.pending() > 0)

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
    client.on_socket_open = _tune
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
        raise ConfigError(f"cannot read key {config.tls.key}: {_words(error)}", where="[broker.tls]") from None
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
            f"cannot read {key} {path}: {_words(error)}",
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
        raise ConfigError(
            f"cannot use {files}: {_words(error)}",
            where="[broker.tls]",
            remedy="Name readable PEM files, the key without a passphrase.",
        ) from None
    return context


def remedy(reason: ReasonCode) -> str:
    """What to do about a broker's reason code."""
    return REMEDIES.get(reason.value, "Trying again.")


def explain(error: OSError) -> tuple[str, str]:
    """(what, remedy) for a connection that could not be made."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in (NOT_YET_VALID, EXPIRED):
            return (
                f"TLS: the broker's {error.verify_message}",
                f"This machine's clock says {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: set it if that is "
                "wrong, else renew the broker's certificate.",
            )
        return f"TLS: {error.verify_message}", "Check `ca` in [broker.tls], and that `host` is the certificate's name."
    if isinstance(error, ssl.SSLError):
        for name, (what, remedy) in ALERTS.items():
            if (error.reason or "").endswith(f"_ALERT_{name}"):
                return f"TLS: the broker {what}", remedy
        return f"TLS: {_words(error)}", "Check that the port is the broker's TLS port, and [broker.tls]."
    if isinstance(error, socket.gaierror):
        return f"no such host: {_words(error)}", "Check `host` in [broker], and the name server."
    if isinstance(error, ConnectionRefusedError):
        return "connection refused", "Check that the broker runs, and `port` in [broker]."
    if isinstance(error, TimeoutError):
        return "no answer to the connection", "Check the network and `host` in [broker]."
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "no route to the broker", "Check the network."
    return _words(error), "Trying again."


def _words(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)


def _tune(client: paho.Client, userdata: Any, sock: Any) -> None:
    """Small messages leave at once, what the network does not take is noticed at once, and that it takes nothing soon:
    TCP tries again after pauses that double, so that a connection finds out late that the network is back; a new one
    does not.
    """
    with suppress(OSError):  # a socket that is not TCP
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNANSWERED_MS)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
