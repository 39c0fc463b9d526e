"""`python -m tools.flash --image DIR | --ssh HOST`: says what it will do to a board to be, then does it."""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import click

from edge.config import EdgeConfig
from edge.drafters import manifest
from link.config import convert, read_toml
from protocol.errors import ConfigError, OutriderError
from tools.flash import plan as plans
from tools.flash.agent import UNIT, USER
from tools.flash.places import Place, image, over_ssh
from tools.flash.plan import Item, Plan
from tools.flash.wheels import unpack

FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
DROP_INS = sorted(path.stem for path in plans.UNITS.glob("*.conf"))


@click.command()
@click.option("--image", "folder", type=FOLDER, help="A mounted root file system.")
@click.option("--ssh", "host", help="A running board, as `ssh` names it: root, or a user for whom `sudo -n` works.")
@click.option("--ssh-command", default="ssh", show_default=True, help="With options of its own, as `ssh -p 2222`.")
@click.option("--config", "config", type=click.Path(path_type=Path), help="The board's TOML file.")
@click.option("--tls", type=FOLDER, help=f"A folder of certificates, keys and passwords, for {plans.TLS}.")
@click.option("--wheels", type=FOLDER, help="A folder of wheels: the project's and all that it needs on the board.")
@click.option("--model", type=FOLDER, help="A directory of `tools.export drafter`, for where the configuration says.")
@click.option("--with", "drop_ins", type=click.Choice(DROP_INS), multiple=True, help="A drop-in of the service.")
@click.option("--python", help="The board's, as 3.11, where it cannot be told.")
@click.option("--machine", help="The board's, as aarch64, where it cannot be told.")
@click.option("--dry-run", is_flag=True, help="Stop after the list.")
@click.option("--yes", is_flag=True, help="Do not ask, for scripts.")
def main(folder: Path | None, host: str | None, ssh_command: str, dry_run: bool, yes: bool, **given: Any) -> None:
    """Put configuration, certificates, program, model and service onto a board, without a network.

    What is there already is left; run it again after a failure or for a new version.
    """
    try:
        if (folder is None) == (host is None):
            raise click.UsageError("Give either --image or --ssh.")
        place = image(folder) if folder else over_ssh(str(host), ssh_command)
        with ExitStack() as stack:
            _flash(place, stack, given, dry_run=dry_run, yes=yes)
    except OutriderError as error:
        click.echo(f"flash: {error}", err=True)
        sys.exit(error.exit_code)


def _flash(place: Place, stack: ExitStack, given: dict[str, Any], *, dry_run: bool, yes: bool) -> None:
    config = _read(given["config"]) if given["config"] else None
    if given["model"]:
        manifest.read(given["model"], "drafter", verify=True)
    probed = place.probe()
    plan = _plan(given, config, probed, stack)
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
    if not yes:
        click.confirm("Do this?", abort=True)
    place.apply(missing, stale)
    if place.running:
        place.start()
    click.echo("done")


def _read(path: Path) -> EdgeConfig:
    """The configuration as the board will read it: relative paths are of the folder where it then lies."""
    return convert(read_toml(path), EdgeConfig, where=str(path), folder=Path(plans.ETC))


def _plan(given: dict[str, Any], config: EdgeConfig | None, probed: dict[str, Any], stack: ExitStack) -> Plan:
    parts = [plans.service(given["drop_ins"])]
    if given["tls"]:
        parts.append(plans.certificates(given["tls"]))
    if config is not None:
        coming = [item.path for part in parts for item in part.items]
        parts.append(plans.configuration(given["config"], config, coming))
    if given["model"]:
        to = str(config.drafter.model) if config else plans.MODEL
        parts.append(plans.model(given["model"], to))
    if given["wheels"]:
        python, machine = _version(given["python"] or probed["python"]), given["machine"] or probed["machine"]
        if python is None or machine is None:
            raise ConfigError("which Python the board has cannot be told", remedy="Say `--python` and `--machine`.")
        out = stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-flash-"))
        parts.append(plans.program(unpack(given["wheels"], Path(out), python, machine), python))
    return plans.together(parts)


def _version(given: str | list[int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    try:
        major, minor = given.split(".") if isinstance(given, str) else given
        return int(major), int(minor)
    except ValueError:
        raise ConfigError(f"{given!r} is no version", where="--python", remedy="Say it as 3.11") from None


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


if __name__ == "__main__":
    main()
