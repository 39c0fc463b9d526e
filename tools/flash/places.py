"""Where a board's files go: the folder of a mounted image, or a running board over ssh. Both by the same agent."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from protocol.errors import ConfigError, LinkError, OutriderError
from tools.flash import agent
from tools.flash.plan import Item

SSH_FAILED = 255  # its own exit status, apart from the command's
CANNOT_RUN = 126  # what `chroot` ends with where the kernel does not take the program
ENTER = Path(__file__).with_name("enter.sh")
NAMESPACES = ["unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child"]


class CommandError(OutriderError):
    """A command on the board, or in its root, that failed; ends with the command's own code."""

    def __init__(self, what: str, where: str, code: int, remedy: str = "") -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.exit_code = code


class Place:
    """One board to be. name: for a person; command: what runs Python there with such arguments, where the agent is to
    work; enter: what runs a command of the board's own, as one of its users; root: its root file system, as Python sees
    it there; running: whether it can start a service now.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[list[str]], list[str]],
        enter: Callable[[list[str], str], list[str]],
        root: str,
        *,
        running: bool,
    ) -> None:
        self.name, self.running = name, running
        self._command, self._enter, self._root = command, enter, root

    def probe(self) -> dict[str, Any]:
        return self._ask("probe")

    def facts(self, paths: Iterable[str], trees: Iterable[str]) -> dict[str, Any]:
        """What is at paths and below trees; see `agent.one_fact`."""
        asked = json.dumps({"paths": list(paths), "trees": list(trees)}).encode()
        return self._ask("facts", lambda stdin: stdin.write(asked))

    def apply(self, items: Iterable[Item], removed: list[str]) -> None:
        self._ask("apply", lambda stdin: pack(items, removed, stdin))

    def start(self) -> None:
        self._ask("start")

    def run(self, command: list[str], *, user: str = "root", stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """A command of the board's own. Raises LinkError where ssh fails, ConfigError where this machine cannot run
        programs of that root, or may not enter it.
        """
        done = subprocess.run(self._enter(command, user), input=stdin, capture_output=True)
        what = _last(done.stderr) or f"ended with {done.returncode}"
        if done.returncode == SSH_FAILED:
            raise LinkError(what, where=self.name, remedy=REACH)
        if done.returncode == CANNOT_RUN:
            raise ConfigError(
                f"its programs do not run on this machine: {what}",
                where=self.name,
                remedy="Do on the running board, with --ssh, what has to run there; for packages alone install"
                " `qemu-user-static` and `binfmt-support`.",
            )
        if done.returncode and what.startswith("unshare:"):
            raise ConfigError(what, where=self.name, remedy="Run it as root.")
        return done

    def must(self, command: list[str], *, user: str = "root", stdin: bytes = b"") -> bytes:
        """What a command says that has to end well. Raises CommandError too."""
        done = self.run(command, user=user, stdin=stdin)
        if done.returncode:
            raise CommandError(_last(done.stderr) or f"`{command[0]}` failed", self.name, done.returncode)
        return done.stdout

    def _ask(self, verb: str, feed: Callable[[IO[bytes]], object] = lambda stdin: None) -> dict[str, Any]:
        """Run the agent. Raises LinkError where ssh fails, OutriderError where the agent does."""
        source = Path(agent.__file__).read_text()
        command = self._command(["-c", source, verb, self._root])
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin
            with suppress(BrokenPipeError):  # it has ended; its last words say why
                feed(process.stdin)
                process.stdin.close()
            process.stdin = None
            said, errors = process.communicate()
        if process.returncode == 0:
            found: dict[str, Any] = json.loads(said)
            return found
        what = _last(errors) or f"ended with {process.returncode}"
        if process.returncode == SSH_FAILED:
            raise LinkError(what, where=self.name, remedy=REACH)
        raise OutriderError(what, where=self.name, remedy=_remedy(what))


REACH = "Check that `ssh` reaches it without a password."


def _last(said: bytes) -> str:
    """The last line, which says what ended it."""
    return next(reversed(said.decode(errors="replace").strip().splitlines()), "")


def _remedy(what: str) -> str:
    if "Permission denied" in what or "Operation not permitted" in what or "password is required" in what:
        return "Run it as root, or where `sudo -n` works."
    if "python3" in what:
        return "The board needs python3."
    return ""


def image(folder: Path) -> Place:
    """A mounted root file system."""
    root = str(folder.resolve())

    def enter(command: list[str], user: str) -> list[str]:
        return [*NAMESPACES, "sh", str(ENTER), root, f"{user}:{user}", *command]

    return Place(f"the image at {root}", lambda arguments: [sys.executable, *arguments], enter, root, running=False)


def over_ssh(host: str, ssh: str = "ssh", root: str = "/") -> Place:
    """A running board. ssh: the command, with options of its own; root: the board's, where it is not the machine's."""

    def remote(by_root: list[str], by_others: list[str]) -> list[str]:
        script = f'if [ "$(id -u)" = 0 ]; then exec {shlex.join(by_root)}; else exec {shlex.join(by_others)}; fi'
        return [*shlex.split(ssh), "-o", "BatchMode=yes", host, script]

    def command(arguments: list[str]) -> list[str]:
        return remote(["python3", *arguments], ["sudo", "-n", "python3", *arguments])

    def enter(command: list[str], user: str) -> list[str]:
        return remote(["runuser", "-u", user, "--", *command], ["sudo", "-n", "-u", user, "--", *command])

    return Place(host, command, enter, root, running=root == "/")


def pack(items: Iterable[Item], removed: list[str], out: IO[bytes]) -> None:
    """The stream that `agent.apply` takes."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as stream:
        _add(stream, tarfile.TarInfo(agent.REMOVED), json.dumps(removed).encode())
        for item in items:
            info = tarfile.TarInfo(item.path.lstrip("/"))
            info.mode = item.mode
            info.uname, info.gname = item.owner.split(":")
            if item.link:
                info.type, info.linkname = tarfile.SYMTYPE, item.link
            elif item.source is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(item.source, Path):
                with open(item.source, "rb") as file:
                    info.size = item.size
                    stream.addfile(info, file)
                continue
            _add(stream, info, item.read())


def _add(stream: tarfile.TarFile, info: tarfile.TarInfo, content: bytes) -> None:
    info.size = len(content)
    stream.addfile(info, io.BytesIO(content))
