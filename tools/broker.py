"""A real MQTT 5 broker for the demo, tests and benchmarks: mosquitto where it is installed, else an embedded one."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Any

from protocol.errors import OutriderError

log = logging.getLogger(__name__)

KINDS = ("mosquitto", "iotcore")
CA = "ca.pem"

# What the tests of `tests/tools/test_broker.py` found missing, and what it means here.
LACKS: dict[str, dict[str, str]] = {
    "mosquitto": {},
    "iotcore": {
        "no matching subscribers": "an open that nobody serves is answered as if delivered, so the edge waits",
        "receive maximum": "it announces none, so nothing holds QoS 1 back",
        "lower qos": "it delivers at the subscription's QoS, also what was published at QoS 0",
        "tcp nodelay": "Nagle's algorithm stays on, so over a real network a message can wait 40 ms for an ACK",
    },
}

MOSQUITTO_CONF = """\
listener {port} 127.0.0.1
max_topic_alias {topic_aliases}
set_tcp_nodelay true
persistence false
max_queued_messages 1000
max_inflight_messages {receive_maximum}
log_dest stderr
log_type error
log_type warning
{access}
{tls}
{websockets}
"""

# rumqttd's own format.
IOTCORE_TOML = """\
id = 0
[router]
id = 0
max_connections = 1024
max_outgoing_packet_count = 200
max_segment_size = 8388608
max_segment_count = 4
[v5.1]
name = "v5"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1
[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = 1048576
max_inflight_count = {receive_maximum}
{access}
"""


def find_mosquitto() -> str | None:
    """Path of the mosquitto program; Debian installs it where a user's PATH does not look."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin")


def available() -> list[str]:
    """Brokers that can be started here, best first."""
    found = {"mosquitto": find_mosquitto() is not None, "iotcore": importlib.util.find_spec("iotcore") is not None}
    return [kind for kind in KINDS if found[kind]]


class Broker:
    """One broker process on loopback; use as a context manager, or call `stop`.

    host, port: where it listens; kind: which broker it is; pid: of its process; ca: PEM file of the authority that its
    certificate is from, None without TLS.
    """

    host = "127.0.0.1"

    def __init__(
        self, kind: str, port: int, process: subprocess.Popen[bytes], folder: str, websockets_port: int | None = None
    ) -> None:
        self.kind, self.port, self.websockets_port = kind, port, websockets_port
        self.ca = ca if (ca := Path(folder, CA)).exists() else None
        self._process, self._folder = process, folder

    @classmethod
    def start(
        cls,
        port: int = 0,
        *,
        kind: str | None = None,
        password: tuple[str, str] | None = None,
        tls: bool = False,
        websockets: bool = False,
        receive_maximum: int = 64,
        topic_aliases: int = 1000,
        timeout_s: float = 10.0,
    ) -> Broker:
        """Start a broker and return once it accepts connections.

        port: 0 takes a free one; kind: one of KINDS, when None the environment's OUTRIDER_BROKER or the best available;
        password: the only user and password it admits, anybody when None; tls: with a certificate of its own for
        127.0.0.1 and localhost, instead of plain TCP; websockets: also MQTT over WebSocket, at `websockets_port`, on
        all addresses; receive_maximum: QoS 1 messages that it takes, and sends, at a time; topic_aliases: that it
        grants each client. iotcore grants 4096 in any case, and has neither TLS nor WebSocket here.
        Raises OutriderError when there is no broker, no TLS with it, or it does not start.
        """
        kind = kind or os.environ.get("OUTRIDER_BROKER") or next(iter(available()), None)
        if kind not in available():
            raise OutriderError(
                f"no MQTT broker ({kind or ' or '.join(KINDS)}) on this machine",
                where="broker",
                remedy="Install mosquitto, or `pip install iotcore`.",
            )
        if lacks := LACKS[kind]:
            log.warning("broker %s lacks: %s", kind, "; ".join(f"{name} ({what})" for name, what in lacks.items()))
        if (tls or websockets) and kind != "mosquitto":
            what = "TLS" if tls else "WebSocket"
            raise OutriderError(f"no {what} with {kind}", where="broker", remedy="Install mosquitto.")
        port = port or free_port()
        _check_free(port)
        folder = tempfile.mkdtemp(prefix="outrider-broker-")
        websockets_port = free_port() if websockets else None
        if kind == "mosquitto":
            command = _mosquitto(Path(folder), port, password, tls, receive_maximum, topic_aliases, websockets_port)
        else:
            command = _iotcore(Path(folder), port, password, receive_maximum)
        with open(Path(folder, "log"), "wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        broker = cls(kind, port, process, folder, websockets_port)
        deadline = time.monotonic() + timeout_s
        while not broker._accepts():
            if process.poll() is not None or time.monotonic() > deadline:
                text = Path(folder, "log").read_text(errors="replace").strip()
                broker.stop()
                raise OutriderError(f"{kind} did not start: {text or 'no message'}", where=f"broker on port {port}")
            time.sleep(0.02)
        return broker

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it without a goodbye, as a crash would."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """End it and remove its files. Safe to call twice."""
        end_process(self._process)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _accepts(self) -> bool:
        try:
            for port in filter(None, (self.port, self.websockets_port)):
                socket.create_connection((self.host, port), timeout=0.5).close()
            return self._process.poll() is None
        except OSError:
            return False


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            where = f"broker on port {port}"
            raise OutriderError(f"cannot listen: {error.strerror}", where=where, remedy="Choose another.") from None


def end_process(process: subprocess.Popen[Any]) -> None:
    """End a broker with SIGTERM, and with SIGKILL if it does not heed that for three seconds.

    mosquitto listens a moment before it heeds signals, and what comes between is lost: so it is told again.
    """
    for _ in range(6):
        process.terminate()
        try:
            process.wait(0.5)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.wait()


def free_port() -> int:
    """A port on loopback that nobody listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _mosquitto(
    folder: Path,
    port: int,
    password: tuple[str, str] | None,
    tls: bool,
    receive_maximum: int,
    topic_aliases: int,
    websockets_port: int | None,
) -> list[str]:
    program = find_mosquitto()
    assert program is not None
    access = "allow_anonymous true"
    if password:
        users = folder / "users"
        users.write_text(":".join(password) + "\n")
        users.chmod(0o600)
        tool = shutil.which("mosquitto_passwd") or "mosquitto_passwd"
        subprocess.run([tool, "-U", users], check=True, capture_output=True)
        access = f"allow_anonymous false\npassword_file {users}"
    if os.geteuid() == 0:
        access += "\nuser root"  # so that it can read its files here
    certified = _certify(folder) if tls else ""
    conf = folder / "mosquitto.conf"
    text = MOSQUITTO_CONF.format(
        port=port,
        receive_maximum=receive_maximum,
        topic_aliases=topic_aliases,
        access=access,
        tls=certified,
        websockets=f"listener {websockets_port}\nprotocol websockets\n{certified}" if websockets_port else "",
    )
    conf.write_text(text)
    return [program, "-c", str(conf)]


def _certify(folder: Path) -> str:
    """Make an authority and, from it, a certificate for loopback; the lines of mosquitto.conf that use it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise OutriderError(
            f"no certificate for the broker: {error}", where="broker", remedy="`pip install cryptography`."
        ) from None

    now = datetime.now(timezone.utc)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Outrider test authority")])

    def certificate(
        name: x509.Name, public_key: ec.EllipticCurvePublicKey, extensions: list[x509.ExtensionType]
    ) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(ca_name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=2))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address(Broker.host))])
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_id)
    ca_key_usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    (folder / CA).write_bytes(
        certificate(ca_name, ca_key.public_key(), [x509.BasicConstraints(True, None), ca_id, ca_key_usage])
    )
    server = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    (folder / "cert.pem").write_bytes(
        certificate(server, key.public_key(), [x509.BasicConstraints(False, None), names, issued_by])
    )
    private = folder / "key.pem"
    private.touch(0o600)
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return f"certfile {folder}/cert.pem\nkeyfile {private}"


def _iotcore(folder: Path, port: int, password: tuple[str, str] | None, receive_maximum: int) -> list[str]:
    access = ""
    if password:
        access = f'[v5.1.connections.auth]\n"{password[0]}" = "{password[1]}"'
    conf = folder / "iotcore.toml"
    conf.write_text(IOTCORE_TOML.format(port=port, receive_maximum=receive_maximum, access=access))
    # It logs each packet as an error; into a pipe that nobody reads it soon stops, and answers no QoS 1 message.
    serve = (
        "import logging, sys; from iotcore.iotcore import IotCoreBroker; "
        "logging.getLogger('rumqttd').setLevel(logging.CRITICAL); "
        "IotCoreBroker(config_path=sys.argv[1]).run_forever()"
    )
    return [sys.executable, "-c", serve, str(conf)]
