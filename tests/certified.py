"""A fleet as the tools make it: an authority, boards that enrolled, and mosquitto with the files written for it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
from click.testing import CliRunner
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from edge.cli import main as edge_cli
from link.config import BrokerConfig, TlsConfig
from tests.link.ends import End, until
from tools.broker import end_process, find_mosquitto, free_port
from tools.provision.__main__ import main as provision_cli

DEVICE, NEIGHBOUR, STRANGER = "acme.kitchen", "acme.hall", "umbrella.lab"
QUIET_S = 0.4  # long enough for a message that must not come


@dataclass
class CertifiedFleet:
    """The authority's folder, everybody's files, and the broker that was made from them. name: that broker's, where the
    folder has several.
    """

    folder: Path
    port: int
    second_port: int
    name: str = "broker"
    websockets_port: int | None = None
    process: subprocess.Popen[str] | None = None
    ends: list[End] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / ("log" if self.name == "broker" else f"{self.name}.log")

    def provision(self, *words: str) -> None:
        run(provision_cli, "--ca", str(self.folder / "ca"), *words)

    def enrol(self, device: str) -> None:
        tenant, board = device.split(".")
        home = self.folder / device
        home.mkdir()
        config = home / "edge.toml"
        config.write_text(
            f'[device]\nname = "{device}"\n[drafter]\nmodel = "drafter"\n'
            '[broker.tls]\nca = "ca.pem"\ncert = "cert.pem"\nkey = "key.pem"\n'
        )
        code, request, answer = home / "code", home / "request.json", home / "answer.json"
        self.provision("add", board, "--tenant", tenant, "--code-file", str(code))
        run(edge_cli, "enroll", "--config", str(config), "--code-file", str(code), "--request", str(request))
        self.provision("sign", str(request), "--out", str(answer))
        run(edge_cli, "enroll", "--config", str(config), "--answer", str(answer))

    def configure(self) -> None:
        """Write the broker's files."""
        out = self.folder / self.name
        state = self.folder / f"{self.name}-state"
        state.mkdir(exist_ok=True)
        ports = ["--port", str(self.port), "--port", str(self.second_port)]
        if self.websockets_port is not None:
            ports += ["--mosquitto", "2.1", "--websockets-port", str(self.websockets_port)]
        self.provision("broker-config", "127.0.0.1", "localhost", "--out", str(out), "--state", str(state), *ports)

    def start(self, **limits: int) -> None:
        """As it was written, but as this user, and with `limits` for the options of those names."""
        conf = self.folder / f"{self.name}.conf"
        text = (self.folder / self.name / "mosquitto.conf").read_text()
        for option, limit in limits.items():
            text, found = re.subn(rf"^{option} .*$", f"{option} {limit}", text, flags=re.MULTILINE)
            assert found, option
        conf.write_text(text + "user root\n" if os.geteuid() == 0 else text)
        program = find_mosquitto()
        assert program is not None
        with open(self.log, "a") as log:
            self.process = subprocess.Popen([program, "-c", str(conf)], stderr=log, text=True)
        until(lambda: self.process.poll() is not None or self._listens())
        assert self.process.poll() is None, self.log.read_text()

    def stop(self) -> None:
        assert self.process is not None
        end_process(self.process)

    def kill(self) -> None:
        """End it without a goodbye, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def reload(self) -> None:
        self.configure()
        assert self.process is not None
        self.process.send_signal(signal.SIGHUP)

    def config(self, user: str, **other: str) -> BrokerConfig:
        home = self.folder / user
        files = {"ca": home / "ca.pem", "cert": home / "cert.pem", "key": home / "key.pem"}
        tls = TlsConfig(**{**files, **{name: self.folder / path for name, path in other.items()}})
        return BrokerConfig(
            port=self.port, tls=tls, connect_timeout_s=2.0, max_queued_messages=1000, max_queued_bytes=64 << 20
        )

    def join(self, user: str, *subscriptions: str, name: str = "") -> End:
        name = name or f"{user}-{time.monotonic_ns()}"
        end = End(self.config(user), name, subscriptions=[(one, 1) for one in subscriptions])
        self.ends.append(end)
        end.link.wait_up(5.0)
        return end

    def client(self, user: str, **options) -> paho.Client:
        """paho's own, for what our link never does."""
        tls = self.config(user).tls
        assert tls is not None
        one = paho.Client(CallbackAPIVersion.VERSION2, f"{user}-{time.monotonic_ns()}", protocol=paho.MQTTv5, **options)
        one.tls_set(str(tls.ca), str(tls.cert), str(tls.key))
        return one

    def part(self) -> None:
        """All that joined leave."""
        for end in self.ends:
            end.link.close(0.0)
        self.ends.clear()

    def _listens(self) -> bool:
        try:
            for port in (self.port, self.second_port, self.websockets_port):
                if port is not None:
                    socket.create_connection(("127.0.0.1", port), 0.2).close()
        except OSError:
            return False
        return True


def run(command: click.Command, *words: str) -> str:
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@contextmanager
def certified_fleet(folder: Path) -> Iterator[CertifiedFleet]:
    """Three boards of two tenants, a verifier and an operator, and the broker, running."""
    fleet = CertifiedFleet(folder, free_port(), free_port())
    fleet.provision("init", "test")
    for device in (DEVICE, NEIGHBOUR, STRANGER):
        fleet.enrol(device)
    for role in ("verifier", "operator"):
        fleet.provision("issue", role, "one", "--out", str(fleet.folder / role))
    fleet.configure()
    fleet.start()
    try:
        yield fleet
    finally:
        fleet.part()
        fleet.stop()
