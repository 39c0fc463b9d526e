"""A way out through an HTTP proxy: CONNECT (RFC 9110, 9.3.6), behind which TLS is the broker's own."""

from __future__ import annotations

import base64
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from link.failures import Refusal, words

READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy. user, password: for Basic authentication; `user` is None where it wants none."""

    host: str
    port: int
    user: str | None = None
    password: str = field(default="", repr=False)

    @classmethod
    def parse(cls, url: str) -> Proxy:
        """Of `http://[user:password@]host:port`. Raises ValueError, without the URL: it may hold a password."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            port = None
        if port is None or parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError("`proxy` is not http://host:port or http://user:password@host:port")
        user = None if parts.username is None else unquote(parts.username)
        return cls(parts.hostname, port, user, unquote(parts.password or ""))

    @property
    def address(self) -> str:
        return f"proxy {self.host}:{self.port}"


def open_tunnel(proxy: Proxy, target: str, timeout_s: float) -> socket.socket:
    """A connection to `target`, host:port, which the proxy looks up. timeout_s: to reach the proxy, and for its answer.

    Raises Refusal, which names the proxy.
    """
    try:
        sock = socket.create_connection((proxy.host, proxy.port), timeout=timeout_s)
    except OSError as error:
        raise Refusal(f"{proxy.address}: {words(error)}", "Check `proxy` in [broker], and the network.") from None
    try:
        _connect(sock, proxy, target)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, proxy: Proxy, target: str) -> None:
    import h11  # not before it is needed: most links go straight

    headers = [("Host", target)]
    if proxy.user is not None:
        secret = base64.b64encode(f"{proxy.user}:{proxy.password}".encode()).decode()
        headers.append(("Proxy-Authorization", f"Basic {secret}"))
    ours = h11.Connection(h11.CLIENT)
    try:
        sock.sendall(ours.send(h11.Request(method="CONNECT", target=target, headers=headers)) or b"")
        while not isinstance(answer := ours.next_event(), h11.Response):
            if answer is h11.NEED_DATA:
                if not (data := sock.recv(READ_BYTES)):
                    raise Refusal(
                        f"{proxy.address} ended the connection", "Check host and port of `proxy` in [broker]."
                    )
                ours.receive_data(data)
    except Refusal:
        raise
    except h11.RemoteProtocolError:
        raise Refusal(f"{proxy.address} is no HTTP proxy", "Check host and port of `proxy` in [broker].") from None
    except OSError as error:
        raise Refusal(f"{proxy.address} does not answer: {words(error)}", "Check `proxy` in [broker].") from None
    if not 200 <= answer.status_code < 300:
        offered = [value.decode("latin-1") for name, value in answer.headers if name == b"proxy-authenticate"]
        raise _refusal(proxy, target, answer.status_code, offered)


def _refusal(proxy: Proxy, target: str, status: int, offered: list[str]) -> Refusal:
    """offered: the ways to authenticate that the proxy names."""
    if status in (401, 407):  # tinyproxy says 401 to a wrong password
        schemes = sorted({one.split(" ", 1)[0] for one in offered})
        if schemes and "basic" not in (scheme.lower() for scheme in schemes):
            return Refusal(
                f"{proxy.address} wants {' or '.join(schemes)} authentication ({status})",
                "This link knows Basic only: ask for that, or for an exception for this board.",
            )
        if proxy.user is None:
            return Refusal(
                f"{proxy.address} wants a user and a password ({status})",
                "Write them into `proxy` in [broker]: http://user:password@host:port.",
            )
        return Refusal(
            f"{proxy.address} does not take the user {proxy.user!r} with this password ({status})",
            "Correct `proxy` in [broker]; `@`, `:`, `/` and `%` in them are written as %40, %3A, %2F and %25.",
        )
    if status in (403, 405):
        return Refusal(
            f"{proxy.address} does not let {target} through ({status})",
            "Most let only port 443 through: use a broker's port 443, or ask for an exception.",
        )
    if status in (502, 503, 504):
        return Refusal(f"{proxy.address} cannot reach {target} ({status})", "Check `host` and `port` in [broker].")
    return Refusal(f"{proxy.address} answers {status} to CONNECT {target}", "Check that it is an HTTP proxy.")
