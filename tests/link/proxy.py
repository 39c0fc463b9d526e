"""An HTTP proxy that tunnels with CONNECT, and that can be told to refuse."""

from __future__ import annotations

import base64
import socket
import threading
from contextlib import suppress
from types import TracebackType


class ConnectProxy:
    """Takes one user and password, or anybody. answer: what it says instead of making a tunnel, to everybody.

    targets: what was asked for, host:port each; bytes_through: of both directions.
    """

    def __init__(self, user: str = "", password: str = "", answer: bytes | None = None) -> None:
        self._secret = base64.b64encode(f"{user}:{password}".encode()).decode() if user else ""
        self._answer = answer
        self.targets: list[str] = []
        self.bytes_through = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> ConnectProxy:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        self._thread.join()

    def cut(self) -> None:
        """End all tunnels."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def _serve(self) -> None:
        while True:
            try:
                there, _ = self._listening.accept()
            except OSError:
                return
            self._open.append(there)
            threading.Thread(target=self._tunnel, args=(there,), daemon=True).start()

    def _tunnel(self, there: socket.socket) -> None:
        with there, suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                if not (data := there.recv(4096)):
                    return
                head += data
            line, *headers = head.decode("latin-1").split("\r\n")
            method, target, _ = line.split(" ")
            assert method == "CONNECT"
            self.targets.append(target)
            if self._answer is not None:
                there.sendall(self._answer)
                return
            if self._secret and f"Proxy-Authorization: Basic {self._secret}" not in headers:
                there.sendall(refusal(407, 'Proxy-Authenticate: Basic realm="out"\r\n'))
                return
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port)), 5.0) as broker:
                self._open.append(broker)
                there.sendall(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 test\r\n\r\n")
                back = threading.Thread(target=self._pass_on, args=(broker, there), daemon=True)
                back.start()
                self._pass_on(there, broker)
                back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            for one in (source, sink):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while data := source.recv(65536):
                self.bytes_through += len(data)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def refusal(status: int, headers: str = "") -> bytes:
    return f"HTTP/1.1 {status} No\r\n{headers}Content-Length: 0\r\n\r\n".encode()
