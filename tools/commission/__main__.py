"""`python -m tools.commission TENANT.BOARD --root DIR | --ssh HOST`: all steps to a drafting board, in one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from edge.config import EdgeConfig
from edge.drafters import manifest
from edge.enroll import PUBLIC, identity_paths, read_file, write_file
from protocol.errors import ConfigError
from protocol.topics import check_device
from tools.boards import NAMES
from tools.commission import identity, root
from tools.commission.settings import PORT, settings
from tools.exits import reported
from tools.flash.__main__ import DROP_INS, FOLDER
from tools.flash.agent import USER
from tools.flash.flash import Parts, flash, read
from tools.flash.places import image, over_ssh
from tools.flash.plan import COMMAND
from tools.flash.wheels import gather
from tools.provision.folder import Folder

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
WAIT_S = 10  # of `check`, for the broker and then for a verifier


@dataclass(frozen=True, slots=True)
class Step:
    """name, what: for the list; do: the work."""

    name: str
    what: str
    do: Callable[[], None]


@click.command()
@click.argument("board")
@click.option("--root", "folder", type=PATH, help="A Debian root: an image mounted there, or where to make one.")
@click.option("--ssh", "host", help="A running board, as `ssh` names it: root, or a user for whom `sudo -n` works.")
@click.option("--ssh-command", default="ssh", show_default=True, help="With options of its own, as `ssh -p 2222`.")
@click.option("--debian", metavar="SUITE", help="Make that Debian where --root is empty, as `bookworm`.")
@click.option("--sources", multiple=True, help="For --debian: mirror, line or file of sources, as mmdebstrap takes it.")
@click.option("--hardware", type=click.Choice(NAMES), help="The file of board_configs/ to start from.")
@click.option("--broker", help=f"HOST or HOST:PORT, {PORT} when absent.")
@click.option("--config", type=FILE, help="A configuration that is whole, instead of --hardware and --broker.")
@click.option("--model", type=FOLDER, required=True, help="A directory of `tools.export drafter`.")
@click.option("--wheels", type=FOLDER, help="Gathered before, for a machine without a network.")
@click.option("--with", "drop_ins", type=click.Choice(DROP_INS), multiple=True, help="A drop-in of the service.")
@click.option("--ca", type=FOLDER, envvar="OUTRIDER_CA", help="The authority's folder, where it is at hand.")
@click.option("--again", is_flag=True, help="Enrol it anew; what has its name loses its certificate.")
@click.option("--request", type=PATH, help="Write the board's request there, for an authority elsewhere.")
@click.option("--code-file", type=FILE, help="Its one-time code, for --request.")
@click.option("--answer", type=FILE, help="What the authority answered.")
@click.option("--later", is_flag=True, help="Do not enrol: on the running board, with --ssh.")
@click.option("--dry-run", is_flag=True, help="Stop after the list.")
@click.option("--yes", is_flag=True, help="Do not ask, for scripts.")
def main(board: str, dry_run: bool, yes: bool, **given: Any) -> None:
    """From a bare Debian root, or a running board, to BOARD (tenant.board), enrolled and drafting.

    What is done already is left; run it again after a failure, for a new version, or to renew its certificate.
    """
    with reported("commission"), ExitStack() as stack:
        steps = Commission(check_device(board), given, stack).steps()
        for number, step in enumerate(steps, 1):
            click.echo(f"{number} {step.name:<10}{step.what}")
        if dry_run:
            return
        if not yes:
            click.confirm("Do this?", abort=True)
        for number, step in enumerate(steps, 1):
            click.echo(f"-- {number} {step.name}")
            step.do()


class Commission:
    """One board's. given: the command's options. What can be looked at beforehand is, and raises OutriderError."""

    def __init__(self, device: str, given: dict[str, Any], stack: ExitStack) -> None:
        self.device, self.given = device, given
        self.scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-commission-")))
        self.root: Path | None = given["folder"]
        if (self.root is None) == (given["host"] is None):
            raise click.UsageError("Give either --root or --ssh.")
        if self.root is not None and os.geteuid() != 0:
            raise ConfigError("a root file system is root's", where=str(self.root), remedy="Run it as root.")
        if sum(map(bool, (given["request"], given["answer"], given["later"]))) > 1:
            raise click.UsageError("Give one of --request, --answer, --later.")
        self.place = image(self.root) if self.root is not None else over_ssh(given["host"], given["ssh_command"])
        self.config_path = self._config_path()
        self.config = self._config()
        self.parts = Parts(
            config=self.config_path,
            model=given["model"],
            wheels=given["wheels"],
            drop_ins=given["drop_ins"],
            enrolled=True,
        )
        manifest.read(given["model"], "drafter", verify=True)

    def _config_path(self) -> Path:
        given = self.given
        if (given["config"] is None) != bool(given["hardware"] and given["broker"]):
            raise click.UsageError("Give either --config, or --hardware and --broker.")
        if given["config"] is not None:
            return Path(given["config"])
        host, _, port = given["broker"].partition(":")
        if port and not port.isdigit():
            raise click.UsageError(f"--broker {given['broker']}: say it as HOST:PORT.")
        path = self.scratch / "edge.toml"
        path.write_text(settings(given["hardware"], self.device, host, int(port or PORT)))
        return path

    def _config(self) -> EdgeConfig:
        config = read(self.config_path)
        if config.device.name != self.device:
            raise ConfigError(
                f"is for {config.device.name}, not for {self.device}", where=f"{self.config_path}: [device] name"
            )
        identity_paths(config.broker.tls)
        return config

    # -- the steps ------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        found = self._root_steps(self.root) if self.root is not None else []
        if self.parts.wheels is None:
            found.append(Step("wheels", "gather what the board needs from pip's index", self._gather))
        what = f"configuration, program, model and service, to {self.place.name}"
        found.append(Step("flash", what, lambda: flash(self.place, self.parts)))
        found.append(self._identity_step())
        if not (self.given["request"] or self.given["later"]):
            found.append(Step("check", f"`outrider-edge check` as the user {USER}", self._check))
        return found

    def _root_steps(self, folder: Path) -> list[Step]:
        suite = self.given["debian"]
        if suite is not None and root.is_empty(folder):
            make = Step(
                "root", f"make Debian {suite} at {folder}", lambda: root.make(folder, suite, self.given["sources"])
            )
            packages, steps = list(root.NEEDS.values()), [make]
        else:
            root.check(folder)
            packages, steps = root.lacks(folder), []
        if packages:
            lines = f"install {', '.join(packages)}"
            steps.append(Step("packages", lines, lambda: root.install(self.place, root.lacks(folder))))
        return steps

    def _identity_step(self) -> Step:
        given = self.given
        if given["later"]:
            return Step("identity", "later, on the running board: the same again, with --ssh", lambda: None)
        if given["request"]:
            if given["code_file"] is None:
                raise click.UsageError("--request needs --code-file.")
            return Step("identity", f"key made on the board, request to {given['request']}", self._request)
        if given["answer"]:
            return Step(
                "identity", f"answer {given['answer']} installed", lambda: self._install(read_file(given["answer"]))
            )
        if given["ca"]:
            Folder(given["ca"]).authority()
            return Step("identity", f"{self.device} by the authority in {given['ca']}", self._enrol)
        raise click.UsageError("Give one of --ca, --request, --answer, --later.")

    def _gather(self) -> None:
        probed = self.place.probe()
        facts = probed["python"], probed["machine"], probed["glibc"]
        if None in facts:
            raise ConfigError(
                "which Python the board has cannot be told", where=self.place.name, remedy="Say `--wheels`."
            )
        python, machine, glibc = facts
        folder = gather(self.scratch / "wheels", tuple(python), machine, tuple(glibc))
        self.parts = replace(self.parts, wheels=folder)

    def _enrol(self) -> None:
        folder, now = Folder(self.given["ca"]), datetime.now(timezone.utc).replace(microsecond=0)
        tls = self.config.broker.tls
        assert tls is not None
        self._install(identity.answer(self.place, self.device, tls, folder, now, again=self.given["again"]))

    def _request(self) -> None:
        code = self.given["code_file"].read_text().strip()
        write_file(self.given["request"], identity.request(self.place, code), PUBLIC)
        click.echo(f"take {self.given['request']} to `python -m tools.provision sign`, then run this with --answer")

    def _install(self, answer: bytes) -> None:
        tls = self.config.broker.tls
        assert tls is not None
        said, changed = identity.install(self.place, tls, answer)
        click.echo(said)
        if changed and self.place.running:
            self.place.start()

    def _check(self) -> None:
        done = self.place.run([COMMAND, "check", "--wait-s", str(WAIT_S)], user=USER)
        click.echo(done.stdout.decode(), nl=False)
        click.echo(done.stderr.decode(), nl=False, err=True)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
