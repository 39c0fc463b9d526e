"""A board that has turned against its broker, in a process of its own: `python -m tests.flood`."""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import click

from link.packets import publish_packet
from protocol import topics

CONNECT = b"\x00\x04MQTT\x05\x02\x00\x3c\x00"
MANY = 500  # packets in one write


class Attacker:
    """Speaks MQTT past all that a client would hold to. user: the device, in whose folder its certificate is."""

    def __init__(self, port: int, folder: Path) -> None:
        self.port, self.device = port, folder.name
        self.tls = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        self.tls.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self.refused = 0

    def connect(self) -> ssl.SSLSocket:
        """A connection that the broker has accepted. Raises OSError."""
        raw = socket.create_connection(("127.0.0.1", self.port), 5.0)
        sock = self.tls.wrap_socket(raw, server_hostname="127.0.0.1")
        name = os.urandom(8).hex().encode()
        body = CONNECT + len(name).to_bytes(2, "big") + name
        sock.sendall(bytes((0x10, len(body))) + body)
        if not sock.recv(64):
            raise ConnectionError("refused")
        return sock

    def publishes(self, verifier: str) -> None:
        """Drafts that are none, as fast as the broker takes them."""
        topic = topics.draft_topic(self.device, verifier)
        burst = publish_packet(topic, b"\x00" * 40) * MANY
        self._for_ever(lambda sock: sock.sendall(burst))

    def retained(self, verifier: str) -> None:
        """Messages that the broker has to keep, each under a name of its own."""
        numbers = itertools.count()

        def fill(sock: ssl.SSLSocket) -> None:
            sock.sendall(
                publish_packet(topics.open_topic(self.device, f"n{next(numbers)}"), bytes(200_000), retain=True)
            )

        self._for_ever(fill)

    def filters(self, verifier: str) -> None:
        """Subscriptions to topics that do not exist, which no access list forbids."""
        numbers = itertools.count()

        def ask(sock: ssl.SSLSocket) -> None:
            asked = b"\x00\x01\x00"
            for _ in range(MANY):
                name = f"none/{next(numbers)}/{'x' * 200}".encode()
                asked += len(name).to_bytes(2, "big") + name + b"\x00"
            length = len(asked)
            sock.sendall(bytes((0x82, length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14)) + asked)
            sock.recv(4096)

        self._for_ever(ask)

    def connections(self, verifier: str) -> None:
        """As many connections as there are to be had, held."""
        held = []
        while True:
            try:
                held.append(self.connect())
            except OSError:
                self._is_refused()
                time.sleep(0.05)

    def _for_ever(self, act: Callable[[ssl.SSLSocket], None]) -> None:
        while True:
            with suppress(OSError), self.connect() as sock:
                while True:
                    act(sock)
            self._is_refused()
            time.sleep(0.05)

    def _is_refused(self) -> None:
        if not self.refused:
            print("refused", flush=True)
        self.refused += 1


@click.command()
@click.option("--port", type=int)
@click.option("--folder", type=click.Path(path_type=Path))
@click.option("--verifier")
@click.argument("how", type=click.Choice(["publishes", "retained", "filters", "connections"]))
def main(port: int, folder: Path, verifier: str, how: str) -> None:
    print("begun", flush=True)
    getattr(Attacker(port, folder), how)(verifier)


if __name__ == "__main__":
    main()
