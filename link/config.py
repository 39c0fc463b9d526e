"""Typed configuration for boards and cloud: a TOML file into frozen structs, every mistake named by file and key."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, inspect

from link.tunnel import Proxy
from protocol.errors import ConfigError, OutriderError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every configuration section: by keyword, frozen (say `frozen=True` again), unknown keys are errors."""


@contextmanager
def named_by_section() -> Iterator[None]:
    """Around checks in a section's `__post_init__`: what they raise will name the section."""
    try:
        yield
    except OutriderError as error:
        raise ValueError(f"{error.what}. {error.remedy}" if error.remedy else error.what) from None


class TlsConfig(Section, frozen=True):
    """TLS to the broker. ca: PEM file of trusted authorities, the system's when absent; cert, key: the client's own."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("`cert` and `key` belong together")


class BrokerConfig(Section, frozen=True):
    """Where the MQTT broker is and how to speak to it.

    keepalive_s: a silent connection is given up after at most twice this; connect_timeout_s: for TCP, TLS and the
    broker's answer each; backoff_max_s: longest pause between two attempts.
    max_packet_bytes: largest packet either way, lowered to what the broker announces.
    max_queued_messages, max_queued_bytes: what may wait at QoS 1; backlog_bytes: what may wait at QoS 0 for a socket
    that is full. When one overflows, its oldest message is dropped.
    topic_aliases: topics that the broker may shorten in what it sends; 0 where it cannot be trusted with that, as
    rumqttd, which binds an alias to a subscription with wildcards, so that messages arrive under each other's topics.
    transport, path: plain MQTT, or MQTT in a WebSocket at that path; proxy: an HTTP proxy on the way,
    "http://user:password@host:port".
    standby: other brokers, "host" or "host:port", with all else as here: tried in this order after the first, and then
    again from there, by who needs one; a verifier is at all of them (docs/brokers.md).
    share_file: for verifiers; its first line is the secret in the name of the subscription that they share, the same
    for all (docs/provisioning.md).
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    tls: TlsConfig | None = None
    transport: Literal["tcp", "websocket"] = "tcp"
    path: Annotated[str, Meta(pattern=r"^/[!-~]*$")] = "/mqtt"
    proxy: str | None = None
    standby: tuple[str, ...] = ()
    username: str | None = None
    password_file: Path | None = None
    client_id: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    keepalive_s: Annotated[int, Meta(ge=1, le=3600)] = 20
    connect_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    backoff_max_s: Annotated[float, Meta(ge=0.1, le=600)] = 30.0
    max_packet_bytes: Annotated[int, Meta(ge=1024, le=256 << 20)] = 1 << 20
    max_queued_messages: Annotated[int, Meta(ge=1)] = 256
    max_queued_bytes: Annotated[int, Meta(ge=1024)] = 8 << 20
    backlog_bytes: Annotated[int, Meta(ge=1024)] = 128 << 10
    topic_aliases: Annotated[int, Meta(ge=0, le=65535)] = 0
    share_file: Path | None = None

    def __post_init__(self) -> None:
        if self.password_file is not None and self.username is None:
            raise ValueError("`password_file` needs a `username`")
        if self.proxy is not None:
            Proxy.parse(self.proxy)
        for place in self.standby:
            _host_and_port(place, self.port)

    @property
    def places(self) -> tuple[BrokerConfig, ...]:
        """This broker and those that stand by, a configuration for each."""
        found = [(self.host, self.port), *(_host_and_port(place, self.port) for place in self.standby)]
        return tuple(msgspec.structs.replace(self, host=host, port=port, standby=()) for host, port in found)

    @property
    def way(self) -> Proxy | None:
        """The proxy to go through."""
        return None if self.proxy is None else Proxy.parse(self.proxy)

    @property
    def authority(self) -> str:
        """Host and port as HTTP writes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else self.address

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


def _host_and_port(place: str, port: int) -> tuple[str, int]:
    """Of "host", "host:port" or "[IPv6]:port"; `port` where none is named. Raises ValueError."""
    try:
        parts = urlsplit(f"//{place}")
        found = parts.port or port
    except ValueError:
        parts = urlsplit("")
    if not parts.hostname or parts.netloc != place or "@" in place:
        raise ValueError(f"`standby` has {place!r}, which is not host or host:port")
    return parts.hostname, found


def load(path: str | Path, type: type[T]) -> T:
    """Read a TOML file into `type`, a tree of `Section`s.

    A relative path in a field of type pathlib.Path is taken from the file's folder, and `~` is expanded.
    Raises ConfigError naming file, section and key.
    """
    return convert(read_toml(path), type, where=str(path), folder=Path(path).parent)


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConfigError naming it."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file", where=str(path), remedy="Name an existing TOML file.") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 at byte {error.start}", where=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not valid TOML: {error}", where=str(path)) from None


def convert(data: dict[str, Any], type: type[T], *, where: str, folder: Path) -> T:
    """What `load` does after parsing. where: how errors name the source; folder: base of relative paths."""

    def decode(wanted: Any, value: Any) -> Any:
        if wanted is Path:
            if not isinstance(value, str) or not value:
                raise ValueError("Expected a path as a non-empty `str`")
            return folder.absolute() / Path(value).expanduser()
        raise NotImplementedError(f"configuration type {wanted}")

    try:
        return msgspec.convert(data, type, dec_hook=decode)
    except msgspec.ValidationError as error:
        what, remedy = _explain(str(error), type)
    except OutriderError as error:
        what, remedy = str(error), ""
    raise ConfigError(what, where=where, remedy=remedy)


def _explain(message: str, type: Any) -> tuple[str, str]:
    """msgspec's message as (what is wrong with section and key, what to do)."""
    match = re.fullmatch(r"(?P<text>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", message, re.DOTALL)
    text, path = (match["text"], match["path"] or "") if match else (message, "")
    keys = re.findall(r"\.([^.\[\]]+)|(\[[^\]]*\])", path)
    names = [name or index for name, index in keys]
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", text):
        known = _keys_at(type, names)
        near = difflib.get_close_matches(unknown[1], known, n=1)
        what = f"{_section(names)}unknown key `{unknown[1]}`; known: {', '.join(known)}"
        return what, f"Did you mean `{near[0]}`?" if near else ""
    if missing := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{_section(names)}missing key `{missing[1]}`", ""
    if _keys_at(type, names):  # the section as a whole is wrong, not one key
        return f"{_section(names)}{text}", ""
    return f"{_section(names[:-1])}`{names[-1]}`: {text}", ""


def _section(names: list[str]) -> str:
    return f"[{'.'.join(names)}] ".replace(".[", "[") if names else ""


def _keys_at(type: Any, names: list[str]) -> list[str]:
    """Keys of the section that `names` lead to, none where they lead to a value."""
    found = [inspect.type_info(type)]
    for name in [*names, None]:
        found = [one for info in found for one in (info.types if isinstance(info, inspect.UnionType) else (info,))]
        if name is None:
            break
        below: list[Any] = []
        for info in found:
            if isinstance(info, inspect.StructType):
                below += [field.type for field in info.fields if field.encode_name == name]
            elif isinstance(info, inspect.ListType | inspect.VarTupleType):
                below.append(info.item_type)
            elif isinstance(info, inspect.DictType):
                below.append(info.value_type)
        found = below
    return [field.encode_name for info in found if isinstance(info, inspect.StructType) for field in info.fields]
