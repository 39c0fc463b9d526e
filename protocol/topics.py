"""Topics of one broker, made and parsed in one place.

outrider/v1/<device>/open/<target or verifier>   a device asks for a session
outrider/v1/<device>/draft/<verifier>            what a device says to the owner of its session
outrider/v1/<device>/verdict                     what verifiers say to a device
outrider/v1/<device>/state                       retained, a device's state
outrider/v1/verifiers/<verifier>/state           retained, a verifier's state
outrider/v1/updates/<channel>/<kind>             retained, the newest release of a model, a runtime or settings
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from protocol.errors import WireError

PREFIX = "outrider/v1"
VERIFIERS = "verifiers"
UPDATES = "updates"
RELEASE_KINDS = ("model", "runtime", "settings")

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_DEVICE = re.compile(r"[A-Za-z0-9_-]{1,64}\.[A-Za-z0-9_-]{1,64}")


class Topic(NamedTuple):
    """A parsed topic. device: `tenant.board`, or "" for a verifier's state and releases; kind: open, draft, verdict,
    state, verifier or update; name: the target, verifier or channel, or "".
    """

    device: str
    kind: str
    name: str = ""


def check_name(name: str, what: str) -> str:
    """A target's or verifier's name, fit for one topic level. Raises WireError."""
    if not _NAME.fullmatch(name):
        raise WireError(f"{what} {name!r} is not 1 to 64 letters, digits, `-` or `_`")
    return name


def check_device(device: str) -> str:
    """A device's name, `tenant.board`. Raises WireError."""
    if not _DEVICE.fullmatch(device):
        raise WireError(
            f"device {device!r} is not `tenant.board`",
            remedy="Both parts are 1 to 64 letters, digits, `-` or `_`, with one dot between them",
        )
    return device


def tenant_of(device: str) -> str:
    return device.partition(".")[0]


def open_topic(device: str, name: str) -> str:
    return f"{PREFIX}/{device}/open/{name}"


def draft_topic(device: str, verifier: str) -> str:
    return f"{PREFIX}/{device}/draft/{verifier}"


def verdict_topic(device: str) -> str:
    return f"{PREFIX}/{device}/verdict"


def device_state_topic(device: str) -> str:
    return f"{PREFIX}/{device}/state"


def verifier_state_topic(verifier: str) -> str:
    return f"{PREFIX}/{VERIFIERS}/{verifier}/state"


def update_topic(channel: str, kind: str) -> str:
    """kind: one of RELEASE_KINDS, or `+` for all of a channel."""
    return f"{PREFIX}/{UPDATES}/{channel}/{kind}"


def shared_open_filter(target: str, secret: str = "") -> str:
    """The shared subscription of all verifiers of one target. secret: part of its name, where a broker would deal opens
    to anybody who knew the name.
    """
    group = f"{target}-{secret}" if secret else target
    return f"$share/{group}/{open_topic('+', target)}"


@lru_cache(maxsize=4096)
def parse(topic: str) -> Topic:
    """Raises WireError for anything that is not one of ours."""
    if topic.startswith(PREFIX + "/"):
        levels = topic[len(PREFIX) + 1 :].split("/")
        match levels:
            case [kind, verifier, "state"] if kind == VERIFIERS and _NAME.fullmatch(verifier):
                return Topic("", "verifier", verifier)
            case [kind, channel, release] if kind == UPDATES and release in RELEASE_KINDS and _NAME.fullmatch(channel):
                return Topic("", "update", channel)
            case [device, ("open" | "draft") as kind, name] if _DEVICE.fullmatch(device) and _NAME.fullmatch(name):
                return Topic(device, kind, name)
            case [device, ("verdict" | "state") as kind] if _DEVICE.fullmatch(device):
                return Topic(device, kind)
    raise WireError(f"topic {topic[:120]!r} is not of this protocol")
