"""What belongs on a board and where: pure, but for reading the files that are to go there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from edge.config import EdgeConfig
from protocol.errors import ConfigError
from tools.flash.agent import UNIT, USER
from tools.models import ROOT

UNITS = ROOT / "board_configs" / "systemd"
SYSTEM = "/etc/systemd/system"
ETC = "/etc/outrider"
TLS = f"{ETC}/tls"
PROGRAM = "/opt/outrider"
COMMAND = f"{PROGRAM}/bin/outrider-edge"
IN_PATH = "/usr/local/bin/outrider-edge"
STATE = "/var/lib/outrider"
IDENTITY = f"{STATE}/identity"
MODEL = f"{STATE}/models/drafter"

LAUNCHER = """\
#!/usr/bin/python{version}
import os
import sys
from pathlib import Path

lib = str(Path(__file__).resolve().parent.parent / "lib")
sys.path.insert(0, lib)
os.environ["PYTHONPATH"] = lib  # for a release's test, and for the board that begins again
# What was flashed stays as it is. Root leaves no files where the service could not replace them.
sys.pycache_prefix = "{state}/pycache"
sys.dont_write_bytecode = os.geteuid() == 0
from edge.cli import main

main(prog_name="outrider-edge")
"""


@dataclass(frozen=True, slots=True)
class Item:
    """One path of the board. source: a file's content, or where it is; None for a folder; link: what a link points to.

    owner: `user:group`.
    """

    path: str
    mode: int
    owner: str = "root:root"
    source: Path | bytes | None = None
    link: str = ""

    @property
    def kind(self) -> str:
        return "link" if self.link else "folder" if self.source is None else "file"

    @property
    def size(self) -> int:
        if isinstance(self.source, bytes):
            return len(self.source)
        return self.source.stat().st_size if self.source else 0

    def read(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes() if self.source else b""

    def is_there(self, fact: Mapping[str, Any] | None) -> bool:
        """Whether the board has it already. fact: as the agent tells it."""
        if fact is None or fact["kind"] != self.kind:
            return False
        if self.link:
            return bool(fact["content"] == self.link)
        if (fact["mode"], fact["owner"]) != (self.mode, self.owner):
            return False
        return self.kind == "folder" or fact["content"] == hashlib.sha256(self.read()).hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """items: folders before what is in them; trees: folders that hold nothing but items; notes: for a person."""

    items: list[Item] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def missing(self, facts: Mapping[str, Mapping[str, Any]]) -> list[Item]:
        """What has to be written."""
        return [item for item in self.items if not item.is_there(facts.get(item.path))]

    def stale(self, facts: Iterable[str]) -> list[str]:
        """What lies in a tree and does not belong there; of a folder that goes as a whole only its own name."""
        wanted = {item.path for item in self.items}
        found = sorted(path for path in facts if self.tree_of(path) and path not in wanted)
        gone = set(found)
        return [path for path in found if not any(str(above) in gone for above in PurePosixPath(path).parents)]

    def tree_of(self, path: str) -> str:
        return next((tree for tree in self.trees if path.startswith(tree + "/")), "")


def service(drop_ins: Iterable[str]) -> Plan:
    """The unit, enabled, and drop-ins beside it; those that are there already stay. And the folders it lives in."""
    folder = f"{SYSTEM}/{UNIT}.d"
    items = [
        Item(ETC, 0o755),
        Item(STATE, 0o750, f"{USER}:{USER}"),
        Item(IDENTITY, 0o700, f"{USER}:{USER}"),
        Item(f"{SYSTEM}/{UNIT}", 0o644, source=UNITS / UNIT),
        Item(f"{SYSTEM}/multi-user.target.wants/{UNIT}", 0o777, link=f"{SYSTEM}/{UNIT}"),
        *(Item(f"{folder}/{name}.conf", 0o644, source=UNITS / f"{name}.conf") for name in drop_ins),
    ]
    return Plan(items)


def configuration(path: Path, config: EdgeConfig, coming: Iterable[str]) -> Plan:
    """The board's file, with a note for each file that it names and that does not come along.

    Raises ConfigError for a state directory that the service may not write to.
    """
    if config.device.state != Path(STATE):
        raise ConfigError(
            f"the service may write to {STATE} alone, not to {config.device.state}",
            where=f"{path}: [device] state",
            remedy="Leave it out.",
        )
    tls = config.broker.tls
    named = [config.broker.password_file, *((tls.ca, tls.cert, tls.key) if tls else ())]
    named_here = {str(one) for one in named if one is not None}
    notes = [f"the configuration names {one}, which does not come along" for one in sorted(named_here - set(coming))]
    return Plan([Item(f"{ETC}/edge.toml", 0o644, source=path.read_bytes())], notes=notes)


def certificates(folder: Path) -> Plan:
    """All files of a folder; what is not public is readable by the service's group alone."""
    items = [Item(TLS, 0o750, f"root:{USER}")]
    for path in sorted(folder.iterdir()):
        if path.is_file():
            public = is_public(path.read_bytes())
            items.append(Item(f"{TLS}/{path.name}", 0o644 if public else 0o640, f"root:{USER}", path))
    return Plan(items)


def is_public(content: bytes) -> bool:
    """Whether a file holds certificates or revocations, and no key or password."""
    known = b"-----BEGIN CERTIFICATE-----" in content or b"-----BEGIN X509 CRL-----" in content
    return known and b"PRIVATE KEY" not in content


def model(folder: Path, to: str) -> Plan:
    """A drafter's directory, as a whole."""
    if not PurePosixPath(to).is_relative_to(STATE) or PurePosixPath(to) == PurePosixPath(STATE):
        raise ConfigError(
            f"the model would go to {to}", where="[drafter] model", remedy=f"Name a directory below {STATE}"
        )
    owner = f"{USER}:{USER}"
    above = [str(one) for one in PurePosixPath(to).parents if PurePosixPath(STATE) in one.parents]
    items = [Item(one, 0o750, owner) for one in reversed(above)]
    return Plan([*items, *tree(folder, to, owner, folder_mode=0o750, file_mode=0o640)], [to])


def program(unpacked: Path, python: tuple[int, int]) -> Plan:
    """Unpacked wheels and what starts them, by hand too. python: the board's version, which they are for."""
    launcher = LAUNCHER.format(version=".".join(map(str, python)), state=STATE).encode()
    items = [
        Item(PROGRAM, 0o755),
        Item(f"{PROGRAM}/bin", 0o755),
        Item(COMMAND, 0o755, source=launcher),
        Item(IN_PATH, 0o777, link=COMMAND),
    ]
    return Plan([*items, *tree(unpacked, f"{PROGRAM}/lib", "root:root")], [f"{PROGRAM}/lib"])


def tree(folder: Path, to: str, owner: str, *, folder_mode: int = 0o755, file_mode: int = 0o644) -> list[Item]:
    """A folder with all that is in it; what may be executed still may. Links in it are followed."""
    items = [Item(to, folder_mode, owner)]
    for path in sorted(folder.rglob("*")):
        at = f"{to}/{path.relative_to(folder).as_posix()}"
        if path.is_dir():
            items.append(Item(at, folder_mode, owner))
        else:
            executable = path.stat().st_mode & 0o100
            items.append(Item(at, file_mode | (0o111 & (file_mode >> 2) if executable else 0), owner, path))
    return items


def together(plans: Iterable[Plan]) -> Plan:
    whole = Plan()
    for one in plans:
        whole.items.extend(one.items)
        whole.trees.extend(one.trees)
        whole.notes.extend(one.notes)
    return whole
