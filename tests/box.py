"""A machine of its own, made of namespaces: systemd as process 1 over a root of ours."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from pathlib import Path

from tools.flash.agent import UNIT

SYSTEMD = Path("/lib/systemd/systemd")
BOOT = Path(__file__).parent / "integration" / "boot.sh"
NAMESPACES = ["--pid", "--fork", "--kill-child", "--cgroup", "--uts", "--ipc", "--mount"]


def why_not(folder: Path) -> str:
    """What this machine lacks to boot a root, "" where nothing. folder: an empty one."""
    if os.geteuid() != 0 or not SYSTEMD.exists() or not shutil.which("unshare"):
        return "booting a root needs root, systemd and unshare"
    allowed = f"mount -t overlay o -o lowerdir=/,upperdir={folder}/u,workdir={folder}/w {folder}"
    tried = f"mount -t tmpfs t {folder} && mkdir {folder}/u {folder}/w && {allowed} && mount -t cgroup2 c {folder}"
    if subprocess.run(["unshare", "--mount", "--net", "sh", "-c", tried], capture_output=True).returncode:
        return "this machine lets nobody mount overlays and control groups"
    return ""


class Box:
    """A booted root. Commands run in it as root.

    folder: for its log and mounts; prepare: a script that mounts the root at $root; network: whether it shares this
    machine's, else it has a loopback of its own; target: what systemd starts, its default when absent.
    """

    def __init__(self, folder: Path, prepare: str, *, network: bool = False, target: str = "") -> None:
        self.folder, self.network, self.target = folder, network, target
        self.cgroup = f"outrider-test-{os.getpid()}-{folder.name}"
        self.mount, self.prepare = folder / "mount", folder / "prepare"
        self.mount.mkdir()
        self.prepare.write_text(f"#!/bin/sh\nset -e\nroot=$1\n{prepare}")
        self.prepare.chmod(0o755)
        self.log = open(folder / "log", "w")  # noqa: SIM115 (closed at the end)
        self.boot()

    def boot(self) -> None:
        namespaces = NAMESPACES if self.network else [*NAMESPACES, "--net"]
        inner = ["unshare", *namespaces, "sh", str(BOOT), str(self.mount), str(self.prepare)]
        inner += [f"--unit={self.target}"] if self.target else []
        self.process = subprocess.Popen(self._with_cgroups(f'echo $$ > "$at/cgroup.procs"; exec {shlex.join(inner)}'),
                                        stdout=self.log, stderr=self.log)  # fmt: skip
        self.init = self._find_init()

    def _with_cgroups(self, then: str) -> list[str]:
        """Run `then` where $at is our own control group."""
        script = f'mount -t cgroup2 c {self.mount}; at={self.mount}/{self.cgroup}; mkdir -p "$at"; {then}'
        return ["unshare", "--mount", "sh", "-ec", script]

    def _find_init(self) -> int:
        """systemd's process id, once it is process 1 of its own."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            for child in children:
                if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                    return int(child)
            time.sleep(0.1)
        raise AssertionError(f"systemd did not start: {(self.folder / 'log').read_text()[-2000:]}")

    @property
    def enter(self) -> list[str]:
        """What a command in the box is put behind."""
        path = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return ["nsenter", "-t", str(self.init), "-m", "-p", "-u", "-i", "-n", "-C", "--", "env", "-i", path]

    def run(self, *command: str) -> str:
        return subprocess.run([*self.enter, *command], capture_output=True, text=True, timeout=30).stdout.strip()

    def show(self, name: str) -> str:
        return self.run("systemctl", "show", "--value", "-p", name, UNIT)

    def pid(self) -> int:
        """Of the service's main process, in the box."""
        return int(self.show("MainPID") or 0)

    def until(self, name: str, value: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while (found := self.show(name)) != value:
            gone = self.show("ActiveState") == "failed"
            assert time.monotonic() < deadline and not gone, f"{name} is {found!r}, not {value!r}\n{self.journal()}"
            time.sleep(0.1)

    def journal(self, *options: str) -> str:
        return self.run("journalctl", "--no-pager", "-u", UNIT, "-n", "100", *options)

    def close(self) -> None:
        """As if the power went."""
        self.process.kill()  # and with it, by --kill-child, all that lives in there
        self.process.wait()
        tidy = 'sleep 0.5; find "$at" -depth -type d -exec rmdir {} +'
        subprocess.run(self._with_cgroups(tidy), check=False, capture_output=True)
        self.log.close()
