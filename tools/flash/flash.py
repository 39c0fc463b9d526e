"""One flashing: what the board has, what it needs, the list of it, and then the work."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import click

from edge.config import EdgeConfig
from edge.drafters import manifest
from link.config import convert, read_toml
from protocol.errors import ConfigError
from tools.flash import plan as plans
from tools.flash.agent import UNIT, USER
from tools.flash.places import Place
from tools.flash.plan import Item, Plan
from tools.flash.wheels import unpack


@dataclass(frozen=True, slots=True)
class Parts:
    """What goes onto the board; what is None stays as it is there. config, tls, wheels, model, drop_ins: as the
    command's options; python, machine: the board's, where they cannot be told; enrolled: whether the board makes its
    own identity later, so that its files are not missed.
    """

    config: Path | None = None
    tls: Path | None = None
    wheels: Path | None = None
    model: Path | None = None
    drop_ins: tuple[str, ...] = ()
    python: tuple[int, int] | None = None
    machine: str | None = None
    enrolled: bool = False


def flash(place: Place, parts: Parts, *, dry_run: bool = False, ask: bool = False) -> None:
    """Say what will be done, and do it unless this is a rehearsal. Raises OutriderError."""
    with ExitStack() as stack:
        _flash(place, parts, stack, dry_run=dry_run, ask=ask)


def _flash(place: Place, parts: Parts, stack: ExitStack, *, dry_run: bool, ask: bool) -> None:
    config = read(parts.config) if parts.config else None
    if parts.model:
        manifest.read(parts.model, "drafter", verify=True)
    probed = place.probe()
    plan = _plan(parts, config, probed, stack)
    facts = place.facts([item.path for item in plan.items], plan.trees)
    missing, stale = plan.missing(facts), plan.stale(facts)
    for note in plan.notes:
        click.echo(f"note    {note}")
    if not missing and not stale:
        click.echo(f"{place.name}: nothing to do")
        return
    click.echo(f"{place.name}:")
    for line in listing(plan, missing, stale, add_user=not probed["user"], start=place.running):
        click.echo(line)
    if dry_run:
        return
    if ask:
        click.confirm("Do this?", abort=True)
    place.apply(missing, stale)
    if place.running:
        place.start()
    click.echo("done")


def read(path: Path) -> EdgeConfig:
    """The configuration as the board will read it: relative paths are of the folder where it then lies."""
    return convert(read_toml(path), EdgeConfig, where=str(path), folder=Path(plans.ETC))


def _plan(parts: Parts, config: EdgeConfig | None, probed: dict[str, Any], stack: ExitStack) -> Plan:
    found = [plans.service(parts.drop_ins)]
    if parts.tls:
        found.append(plans.certificates(parts.tls))
    if config is not None:
        assert parts.config is not None
        coming = [item.path for part in found for item in part.items]
        if parts.enrolled and config.broker.tls:
            coming += [str(path) for path in (config.broker.tls.ca, config.broker.tls.cert, config.broker.tls.key)]
        found.append(plans.configuration(parts.config, config, coming))
    if parts.model:
        to = str(config.drafter.model) if config else plans.MODEL
        found.append(plans.model(parts.model, to))
    if parts.wheels:
        python, machine = parts.python or _pair(probed["python"]), parts.machine or probed["machine"]
        if python is None or machine is None:
            raise ConfigError("which Python the board has cannot be told", remedy="Say `--python` and `--machine`.")
        out = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-flash-"))
        unpacked = unpack(parts.wheels, Path(out), python, machine, _pair(probed["glibc"]))
        found.append(plans.program(unpacked, python))
    return plans.together(found)


def _pair(version: list[int] | None) -> tuple[int, int] | None:
    return (version[0], version[1]) if version else None


def listing(plan: Plan, missing: list[Item], stale: list[str], *, add_user: bool, start: bool) -> list[str]:
    """What will be done, a line each; what is in a tree is counted."""
    lines = [f"add     user {USER}"] if add_user else []
    for tree in plan.trees:
        inside = [item for item in missing if plan.tree_of(item.path) == tree and item.kind == "file"]
        if inside:
            size = sum(item.size for item in inside) / 1e6
            lines.append(f"write   {tree}: {len(inside)} files, {size:.1f} MB")
    for item in missing:
        if not plan.tree_of(item.path):
            what = f" -> {item.link}" if item.link else f", {item.size} bytes" if item.source is not None else "/"
            rights = "" if item.link else f" ({item.mode:04o} {item.owner})"
            lines.append(f"write   {item.path}{what}{rights}")
    for tree in plan.trees:
        if gone := [path for path in stale if plan.tree_of(path) == tree]:
            names = ", ".join(PurePosixPath(path).name for path in gone[:5])
            more = f" and {len(gone) - 5} more" if len(gone) > 5 else ""
            lines.append(f"remove  {tree}: {names}{more}")
    return [*lines, f"start   {UNIT}"] if start else lines
