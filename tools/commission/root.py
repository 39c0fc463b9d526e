"""The root file system itself: made where that is asked for, and given what a board needs of Debian."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from protocol.errors import ConfigError
from tools.flash.agent import inside
from tools.flash.places import CommandError, Place

NEEDS = {"/usr/bin/python3": "python3", "/sbin/init": "systemd-sysv"}  # a path, and the package that brings it
RELEASE = "/etc/debian_version"


def is_empty(root: Path) -> bool:
    """Whether a root may be made there; a file system that was just made has `lost+found`."""
    return not root.exists() or all(path.name == "lost+found" for path in root.iterdir())


def check(root: Path) -> None:
    """Raises ConfigError where this is no Debian, or a relative of it."""
    if not os.path.exists(inside(str(root), RELEASE)):
        raise ConfigError(
            f"has no {RELEASE}",
            where=str(root),
            remedy="Mount the image's root file system there, or say `--debian bookworm` to make one.",
        )


def make(root: Path, suite: str, sources: Sequence[str]) -> None:
    """The smallest Debian that can install packages. sources: as mmdebstrap takes them. Raises ConfigError where
    mmdebstrap is not there, CommandError where it fails.
    """
    command = ["mmdebstrap", "--variant=minbase", suite, str(root), *sources]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("is not installed", where="mmdebstrap", remedy="apt-get install mmdebstrap") from None
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["mmdebstrap failed"]
        raise CommandError(words[0], str(root), done.returncode, "Empty that folder, then run it again.")


def lacks(root: Path) -> list[str]:
    """The packages that have to come."""
    return [package for path, package in NEEDS.items() if not os.path.lexists(inside(str(root), path))]


def install(place: Place, packages: Sequence[str]) -> None:
    """From the root's own sources, without what they merely recommend. Raises CommandError."""
    place.must(["apt-get", "-qq", "update"])
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "--yes"]
    place.must([*quiet, "--no-install-recommends", "install", *packages])
    place.must(["apt-get", "clean"])
