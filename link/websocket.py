"""MQTT in a WebSocket (MQTT 5, 6; RFC 6455): binary messages, made by wsproto, behind what paho uses of a socket."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Ping, RejectConnection, Request
from wsproto.utilities import ProtocolError

from link.failures import Refusal, words

CHECK = "Check that `port` is the broker's WebSocket port, and `path`, in [broker]."


class WebSocket:
    """A connected socket, and the WebSocket in it. It is made while the socket has its time-out, used when it no longer
    blocks. Raises Refusal where the other end does not agree to it.
    """

    def __init__(self, sock: socket.socket | ssl.SSLSocket, host: str, path: str) -> None:
        """host: with its port, as HTTP names the server."""
        self._sock = sock
        self._protocol = WSConnection(ConnectionType.CLIENT)
        self._unsent = bytearray()
        self._framed = 0  # bytes of the caller's that are in `_unsent`, and not yet said to be sent
        self._ended = False
        try:
            self._shake_hands(Request(host=host, target=path, subprotocols=["mqtt"]), path)
        except BaseException:
            sock.close()
            raise

    def _shake_hands(self, request: Request, path: str) -> None:
        try:
            self._sock.sendall(self._protocol.send(request))
            while True:
                data = self._sock.recv(4096)
                if not data:
                    raise Refusal("no WebSocket: the connection is ended", CHECK)
                self._protocol.receive_data(data)
                for event in self._protocol.events():
                    if isinstance(event, RejectConnection):
                        raise Refusal(f"no WebSocket at {path}: the answer is {event.status_code}", CHECK)
                    if isinstance(event, AcceptConnection):
                        if event.subprotocol != "mqtt":
                            raise Refusal(f"the WebSocket at {path} does not carry MQTT", CHECK)
                        return
        except ProtocolError:
            raise Refusal("what answers there does not speak HTTP, or opens no WebSocket", CHECK) from None
        except TimeoutError:
            raise Refusal("no answer when a WebSocket is asked for", CHECK) from None
        except ConnectionError as error:
            raise Refusal(f"no WebSocket: {words(error)}", CHECK) from None

    def recv(self, size: int) -> bytes:
        """At most `size` of the bytes that have come, b"" at the end. Raises BlockingIOError, or what TLS raises."""
        while not self._ended:
            if come := self._receive(self._sock.recv(size)):
                return come
        return b""

    def _receive(self, data: bytes) -> bytes:
        """What of `data` is the other end's: no more than it is long."""
        come = b""
        try:
            self._protocol.receive_data(data or None)
            for event in self._protocol.events():
                if isinstance(event, BytesMessage):
                    come += event.data
                elif isinstance(event, Ping):
                    self._unsent += self._protocol.send(event.response())
                    with suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        self._flush()  # else it goes before the next message
                elif isinstance(event, CloseConnection):
                    self._ended = True
        except ProtocolError as error:
            raise ConnectionError(f"broken WebSocket: {error}") from None
        return come

    def send(self, data: bytes | bytearray) -> int:
        """Send all of `data` as one message and return its size. Raises BlockingIOError, or what TLS raises, while a
        part waits for the socket: the caller comes again with the same data, as paho does.
        """
        if self._ended:
            raise ConnectionError("the broker has closed the WebSocket")
        if not self._framed:
            self._unsent += self._protocol.send(BytesMessage(data=bytes(data)))
            self._framed = len(data)
        self._flush()
        sent, self._framed = self._framed, 0
        return sent

    def _flush(self) -> None:
        while self._unsent:
            del self._unsent[: self._sock.send(self._unsent)]

    def pending(self) -> int:
        """Bytes that have come and that no event will tell of."""
        return self._sock.pending() if isinstance(self._sock, ssl.SSLSocket) else 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def setblocking(self, flag: bool) -> None:
        self._sock.setblocking(flag)

    def close(self) -> None:
        self._sock.close()
