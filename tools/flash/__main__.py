"""`python -m tools.flash --image DIR | --ssh HOST`: says what it will do to a board to be, then does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tools.exits import reported
from tools.flash import plan as plans
from tools.flash.flash import Parts, flash
from tools.flash.places import image, over_ssh
from tools.flash.wheels import version

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
@click.option("--python", type=version, help="The board's, as 3.11, where it cannot be told.")
@click.option("--machine", help="The board's, as aarch64, where it cannot be told.")
@click.option("--dry-run", is_flag=True, help="Stop after the list.")
@click.option("--yes", is_flag=True, help="Do not ask, for scripts.")
def main(folder: Path | None, host: str | None, ssh_command: str, dry_run: bool, yes: bool, **given: Any) -> None:
    """Put configuration, certificates, program, model and service onto a board, without a network.

    What is there already is left; run it again after a failure or for a new version.
    """
    if (folder is None) == (host is None):
        raise click.UsageError("Give either --image or --ssh.")
    with reported("flash"):
        place = image(folder) if folder else over_ssh(str(host), ssh_command)
        flash(place, Parts(**given), dry_run=dry_run, ask=not yes)


if __name__ == "__main__":
    main()
