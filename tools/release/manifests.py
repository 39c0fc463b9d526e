"""From a directory of files to a manifest, its signature, and the message that announces it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from edge.drafters.manifest import digest
from edge.drafters.manifest import read as read_model
from edge.updates.manifest import (
    AnyRelease,
    File,
    ModelRelease,
    RuntimeRelease,
    SettingsRelease,
    open_signed,
    parse,
)
from edge.updates.settings import Settings
from link.mqtt import MqttLink
from protocol.errors import ConfigError, LinkError
from protocol.messages import Announcement, encode
from protocol.topics import update_topic

SIGNATURE = ".sig"  # beside the manifest: 64 raw bytes, as `openssl pkeyutl -rawin` reads and writes them


def make_key(path: Path) -> str:
    """Write a new private key (PKCS #8, PEM, mode 600) and return the public one in hex.

    Raises ConfigError where there is a file already: a lost key cannot be had back.
    """
    key = Ed25519PrivateKey.generate()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"no key written: {error.strerror}", where=str(path), remedy="Name another file") from None
    with open(descriptor, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return public_key(key)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Raises ConfigError for a file that holds no Ed25519 key."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise ConfigError(f"no key: {error.strerror}", where=str(path), remedy="Make one: `release key FILE`") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"no private key in PEM: {error}", where=str(path)) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"a {type(key).__name__}, not an Ed25519 key", where=str(path))
    return key


def public_key(key: Ed25519PrivateKey) -> str:
    """As `[updates] keys` takes it."""
    return key.public_key().public_bytes_raw().hex()


def model_release(folder: Path, url: str, **common: Any) -> ModelRelease:
    """Of a directory that `tools.export drafter` wrote, every digest of which is checked. Raises ModelError."""
    facts = read_model(folder, "drafter", verify=True)
    return ModelRelease(files=_files(folder, url, "*"), tokenizer_digest=facts.tokenizer_digest, **common)


def runtime_release(folder: Path, url: str, version: str, **common: Any) -> RuntimeRelease:
    """Of a directory of wheels. Raises ConfigError where it holds none."""
    found = _files(folder, url, "*.whl")
    if not found:
        raise ConfigError("no wheel in it", where=str(folder), remedy="`pip wheel --wheel-dir DIRECTORY .`")
    return RuntimeRelease(files=found, version=version, **common)


def settings_release(settings: Settings, **common: Any) -> SettingsRelease:
    return SettingsRelease(settings=settings, **common)


def _files(folder: Path, url: str, pattern: str) -> tuple[File, ...]:
    base = url.rstrip("/")
    return tuple(
        File(name=path.name, size=path.stat().st_size, sha256=digest(path), url=f"{base}/{quote(path.name)}")
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    )


def next_serial(path: Path, channel: str, kind: str) -> int:
    """One more than the last of this channel and kind, which the file remembers; it is written back.

    Raises ConfigError for a file of something else.
    """
    try:
        serials = msgspec.json.decode(path.read_bytes(), type=dict[str, int]) if path.exists() else {}
    except msgspec.MsgspecError as error:
        raise ConfigError(f"no serials: {error}", where=str(path)) from None
    serial = serials.get(f"{channel}/{kind}", 0) + 1
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode({**serials, f"{channel}/{kind}": serial})))
    part.replace(path)
    return serial


def write_signed(release: AnyRelease, key: Ed25519PrivateKey, path: Path) -> Announcement:
    """Write the manifest and, beside it, its signature. Raises UpdateError for what a board would refuse."""
    manifest = msgspec.json.format(msgspec.json.encode(release))
    parse(manifest)
    signature = key.sign(manifest)
    path.write_bytes(manifest)
    path.with_name(path.name + SIGNATURE).write_bytes(signature)
    return Announcement(manifest, signature)


def read_signed(path: Path, keys: tuple[str, ...] = ()) -> tuple[Announcement, AnyRelease]:
    """A manifest and its signature. keys: those that must have signed it, when any are given.

    Raises ConfigError for files that are missing or misshapen, and what `open_signed` raises.
    """
    try:
        manifest, signature = path.read_bytes(), path.with_name(path.name + SIGNATURE).read_bytes()
    except OSError as error:
        raise ConfigError(f"{error.strerror}", where=str(error.filename), remedy="`release sign` first") from None
    if len(signature) != 64:
        raise ConfigError(f"a signature of {len(signature)} bytes", where=str(path) + SIGNATURE)
    announcement = Announcement(manifest, signature)
    return announcement, open_signed(announcement, keys) if keys else parse(manifest)


def announce(link: MqttLink, announcement: Announcement, release: AnyRelease, timeout_s: float) -> str:
    """Retain the announcement at the broker and return its topic, once the broker has acknowledged it.

    Raises LinkError.
    """
    topic = update_topic(release.channel, release.kind)
    link.wait_up(timeout_s)
    link.publish(topic, encode(announcement), qos=1, retain=True)
    if not link.close(timeout_s):
        raise LinkError(f"{topic} was not acknowledged", remedy="Check the broker's access list, then announce again")
    return topic
