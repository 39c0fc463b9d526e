"""What the broker is told: its configuration, and the access list by role."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from protocol.topics import PREFIX, VERIFIERS, update_topic

VERIFIER, OPERATOR = "verifier", "operator"  # the users of these roles: no device's name is without a dot

_STATES = f"{PREFIX}/{VERIFIERS}/+/state"
_RELEASES = update_topic("+", "+")

# A role's rights; those of boards are patterns, which hold for everybody: %u is the user, `tenant.board`.
ROLES: dict[str, tuple[tuple[str, str], ...]] = {
    VERIFIER: (
        ("read", f"{PREFIX}/+/open/+"),
        ("read", f"{PREFIX}/+/draft/+"),
        ("write", f"{PREFIX}/+/verdict"),
        ("readwrite", _STATES),
    ),
    OPERATOR: (
        ("read", f"{PREFIX}/+/state"),
        ("read", _STATES),
        ("write", _RELEASES),
        ("read", "$SYS/#"),
    ),
}
BOARD: tuple[tuple[str, str], ...] = (
    ("write", f"{PREFIX}/%u/open/+"),
    ("write", f"{PREFIX}/%u/draft/+"),
    ("write", f"{PREFIX}/%u/state"),
    ("read", f"{PREFIX}/%u/verdict"),
    ("read", _STATES),
    ("read", _RELEASES),
)


def access_list(barred: Iterable[str] = ()) -> str:
    """mosquitto's acl_file. barred: boards that are to fall silent at once, also on connections that are open."""
    lines = ["# Written by `python -m tools.provision acl`; docs/provisioning.md has the table that it stands for."]
    for role, rights in ROLES.items():
        lines += ["", f"user {role}", *(f"topic {right} {topic}" for right, topic in rights)]
        # The patterns below are for everybody; a role is no board.
        lines.append(f"topic deny {PREFIX}/{role}/#")
    for device in sorted(barred):
        lines += ["", f"user {device}", "topic deny #"]
    lines += ["", "# Everybody, and so boards: %u is the certificate's name, tenant.board."]
    lines += [f"pattern {right} {topic}" for right, topic in BOARD]
    return "\n".join(lines) + "\n"


def configuration(
    at: PurePath, *, ports: Iterable[int], websockets_port: int | None, state: PurePath, connections: int
) -> str:
    """mosquitto.conf for 2.0 and 2.1. at: where the files of this configuration lie on the broker's machine; ports: of
    MQTT over TLS; state: where it keeps retained messages over a restart; connections: most at one listener.
    """
    listeners = [_listener(at, port, "mqtt", connections) for port in ports]
    if websockets_port is not None:
        listeners.append(_listener(at, websockets_port, "websockets", connections))
    return _GLOBAL.format(at=at, state=state) + "".join(listeners)


_GLOBAL = """\
# Written by `python -m tools.provision broker-config`, for mosquitto 2.0 and 2.1.
allow_anonymous false
acl_file {at}/acl

# Without it a verdict can wait 40 ms for an acknowledgement.
set_tcp_nodelay true
max_keepalive 3600

# What one client may send, keep waiting and have under way.
max_packet_size 1048576
max_inflight_messages 64
max_queued_messages 1000
max_queued_bytes 8388608
memory_limit 402653184
persistent_client_expiration 1h

# Retained states are there after a restart, before their owners are back.
persistence true
persistence_location {state}/
autosave_interval 60

log_dest stderr
log_type error
log_type warning
log_type notice
"""


def _listener(at: PurePath, port: int, protocol: str, connections: int) -> str:
    return f"""
listener {port}
protocol {protocol}
cafile {at}/ca.pem
certfile {at}/broker.pem
keyfile {at}/broker.key
crlfile {at}/crl.pem
require_certificate true
use_identity_as_username true
# The lowest that is spoken.
tls_version tlsv1.2
ciphers ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305
max_connections {connections}
# One alias for each board that a verifier speaks to: a topic then travels as two bytes.
max_topic_alias 1000
max_qos 1
"""
