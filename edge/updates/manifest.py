"""The manifest of a release: typed, signed with Ed25519 over its exact bytes, and compared with the board it reaches.

The bytes are JSON. A field that this runtime does not know is refused, never skipped: it may be a restriction.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from edge.updates.errors import CompatibilityError, FormatError, SignatureError
from edge.updates.settings import Settings
from protocol.messages import Announcement, decode
from protocol.messages import Name as ChannelName
from protocol.topics import RELEASE_KINDS

Kind: TypeAlias = Literal["model", "runtime", "settings"]
KINDS: tuple[Kind, ...] = RELEASE_KINDS  # type: ignore[assignment]

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Version: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){0,3}\Z")]

RESERVED = "release.json"  # where the store keeps the announcement, beside the release's own files
PART = ".part"  # what is not whole yet


class File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """name: in the release's directory, which has no folders; size: bytes; sha256: hex; url: where it is fetched."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}\Z")]
    size: Annotated[int, Meta(ge=0, le=1 << 40)]
    sha256: Digest
    url: Annotated[str, Meta(pattern=r"^https://[^\s]+\Z", max_length=2000)]


class Release(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", omit_defaults=True
):
    """What all kinds say.

    release: its name, the same through all stages of a rollout; serial: grows with every manifest of a channel and
    kind; channel: what boards listen to; boards: kinds of board that it is for, all when empty; least_version: of the
    runtime that may take it; percent: of the fleet, see `is_in_stage`.
    """

    format: Literal[1] = 1
    release: Name
    serial: Annotated[int, Meta(ge=1, lt=1 << 53)]
    channel: ChannelName
    boards: tuple[Name, ...] = ()
    least_version: Version = "0"
    percent: Annotated[float, Meta(ge=0, le=100)] = 100.0

    @property
    def kind(self) -> Kind:
        return self.__struct_config__.tag  # type: ignore[return-value]


class ModelRelease(Release, frozen=True, kw_only=True, tag="model"):
    """A directory of `tools.export drafter`. tokenizer_digest: SHA-256 of its tokenizer.json, in hex."""

    files: Annotated[tuple[File, ...], Meta(min_length=1, max_length=64)]
    tokenizer_digest: Digest


class RuntimeRelease(Release, frozen=True, kw_only=True, tag="runtime"):
    """Wheels, unpacked one over the other. version: what the runtime in them says of itself."""

    files: Annotated[tuple[File, ...], Meta(min_length=1, max_length=64)]
    version: Version


class SettingsRelease(Release, frozen=True, kw_only=True, tag="settings"):
    settings: Settings


AnyRelease: TypeAlias = ModelRelease | RuntimeRelease | SettingsRelease
_decoder = msgspec.json.Decoder(AnyRelease)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a release is compared with. device: `tenant.board`; board: which kind of board it is; channel; version: of
    the runtime; tokenizer_digest: of the drafter in use.
    """

    device: str
    board: str
    channel: str
    version: str
    tokenizer_digest: str


def files(release: AnyRelease) -> tuple[File, ...]:
    return () if isinstance(release, SettingsRelease) else release.files


def content_digest(release: AnyRelease) -> str:
    """Of what is installed, in hex: the same whatever name, stage and addresses it is announced with."""
    parts = sorted((file.name, file.size, file.sha256) for file in files(release))
    settings = release.settings if isinstance(release, SettingsRelease) else None
    return hashlib.sha256(msgspec.json.encode([release.kind, parts, settings], order="deterministic")).hexdigest()


def parse(manifest: bytes) -> AnyRelease:
    """The manifest's bytes as a typed release. Raises FormatError."""
    try:
        release = _decoder.decode(manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FormatError(
            f"not a manifest that this runtime reads: {error}", remedy="Update the runtime first"
        ) from error
    names = [file.name for file in files(release)]
    if len(set(names)) < len(names) or any(name == RESERVED or name.endswith(PART) for name in names):
        raise FormatError(f"a file's name occurs twice, ends in `{PART}` or is `{RESERVED}`", where=release.release)
    if isinstance(release, RuntimeRelease) and not all(name.endswith(".whl") for name in names):
        raise FormatError("a runtime's files are wheels", where=release.release)
    return release


def open_signed(announcement: Announcement, keys: Iterable[str]) -> AnyRelease:
    """The release that an announcement holds, after one of `keys` (raw Ed25519 public keys in hex) has verified it.

    Raises SignatureError, and only then FormatError: nothing unsigned is parsed.
    """
    # A board starts without it, and most never see a release.
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    for key in keys:
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(announcement.signature, announcement.manifest)
            return parse(announcement.manifest)
        except InvalidSignature:
            continue
    raise SignatureError(
        "the manifest is not signed by a key of `[updates] keys`",
        remedy="Sign it with `python -m tools.release sign`, or give the board the new public key first",
    )


def open_payload(payload: bytes, keys: Iterable[str]) -> AnyRelease:
    """Of an announcement's own bytes, as they travelled. Raises WireError, SignatureError, FormatError."""
    message = decode(payload)
    if not isinstance(message, Announcement):
        raise FormatError(f"a {type(message).__name__} is no announcement")
    return open_signed(message, keys)


def check_channel(release: AnyRelease, facts: Facts) -> None:
    """Raises CompatibilityError for a manifest of another channel, which whoever may publish here could have copied."""
    if release.channel != facts.channel:
        raise CompatibilityError(
            f"for channel {release.channel}, this board listens to {facts.channel}", where=release.release
        )


def check_fits(release: AnyRelease, facts: Facts) -> None:
    """Raises CompatibilityError, naming what differs."""
    where = release.release
    if release.boards and facts.board not in release.boards:
        raise CompatibilityError(f"for {', '.join(release.boards)}, this is a {facts.board}", where=where)
    if _numbers(facts.version) < _numbers(release.least_version):
        raise CompatibilityError(
            f"needs runtime {release.least_version}, this is {facts.version}",
            where=where,
            remedy="Announce the runtime first",
        )
    if isinstance(release, ModelRelease) and release.tokenizer_digest != facts.tokenizer_digest:
        raise CompatibilityError(
            f"tokenizer {release.tokenizer_digest[:12]} is not {facts.tokenizer_digest[:12]}, the one in use",
            where=where,
            remedy="Export it from the same family, or flash the board for another target",
        )


def is_in_stage(device: str, release: str, percent: float) -> bool:
    """Whether a board is among the first `percent` of the fleet for this release: by a hash of both names, so that
    each release begins with other boards, and a wider stage holds the narrower one.
    """
    place = int.from_bytes(hashlib.sha256(f"{release}\0{device}".encode()).digest()[:8], "big")
    return place * 100 < percent * (1 << 64)


def _numbers(version: str) -> tuple[int, ...]:
    """Of `1.2.3rc1` the numbers before any letter, without zeros at the end."""
    match = re.match(r"[0-9]+(\.[0-9]+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else [0]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
