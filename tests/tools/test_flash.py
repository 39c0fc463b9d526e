"""Flashing: what lies on an image afterwards, file by file with its rights, and the same over a real ssh."""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import shutil
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from edge.config import EdgeConfig
from edge.drafters import manifest
from link.config import load
from protocol.errors import ConfigError, LinkError
from tools.broker import free_port
from tools.flash import plan as plans
from tools.flash.__main__ import main
from tools.flash.agent import glibc, inside
from tools.flash.places import CommandError, over_ssh
from tools.flash.wheels import platforms
from tools.models import ROOT

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----\n"
ACCOUNTS = re.compile(r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?")
USERADD = shutil.which("useradd", path="/usr/sbin:/sbin")
CONFIG = """\
[device]
name = "acme.kitchen"
[broker]
host = "broker.example"
port = 8883
[broker.tls]
ca = "tls/ca.crt"
cert = "tls/board.crt"
key = "tls/board.key"
[drafter]
model = "/var/lib/outrider/models/drafter"
"""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or USERADD is None, reason="files of other users and `useradd` need root"
)


@dataclass
class Bench:
    """What a fleet engineer has on the table, and the image."""

    folder: Path

    def __post_init__(self) -> None:
        self.image = self.folder / "image"
        (self.image / "etc").mkdir(parents=True)
        (self.image / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        (self.image / "etc" / "group").write_text("root:x:0:\n")
        self.config = self.folder / "edge.toml"
        self.config.write_text(CONFIG)
        self.tls = self.folder / "tls"
        self.tls.mkdir()
        for name, content in {"ca.crt": CERTIFICATE, "board.crt": CERTIFICATE, "board.key": KEY}.items():
            (self.tls / name).write_text(content)
        self.model = self.make_model(b"weights")
        self.wheels = self.folder / "wheels"
        self.wheels.mkdir()

    def make_model(self, weights: bytes) -> Path:
        """A directory that passes for a drafter's until somebody runs it."""
        folder = self.folder / "drafter"
        folder.mkdir(exist_ok=True)
        contents = {"model.onnx": b"graph", "model.onnx.data": weights, "tokenizer.json": b"{}", "chat.jinja": b"x"}
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        digests = [hashlib.sha256(one).hexdigest() for one in (b"graph" + weights, b"{}")]
        facts = manifest.Manifest(
            kind="drafter", name="toy", architecture="toy", source={}, weights_digest=digests[0], stop_ids=(),
            tokenizer_digest=digests[1], vocab_size=1, context=1, dtype="float32", chat_template="chat.jinja",
        )  # fmt: skip
        (folder / "manifest.json").write_bytes(msgspec.json.encode(facts))
        return folder

    def make_wheel(self, version: str, **modules: str) -> None:
        """A project's wheel with a package `edge` of such modules."""
        info = f"outrider-{version}.dist-info"
        for old in self.wheels.iterdir():
            old.unlink()
        with zipfile.ZipFile(self.wheels / f"outrider-{version}-py3-none-any.whl", "w") as wheel:
            for name, content in {"__init__": "", **modules}.items():
                wheel.writestr(f"edge/{name}.py", content)
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: outrider\nVersion: {version}\nProvides-Extra: edge\n"
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def flash(self, *arguments: str, to: str | None = None) -> Result:
        given = ["--config", self.config, "--tls", self.tls, "--model", self.model]
        return run(*(["--image", str(self.image)] if to is None else ["--ssh", to]), *map(str, given), *arguments)

    def found(self, below: str) -> dict[str, tuple[str, str, str]]:
        """path -> (mode, owner:group, content or link's target) of files and links; a folder has no content."""
        users = {int(line.split(":")[2]): line.split(":")[0] for line in self.lines("passwd")}
        groups = {int(line.split(":")[2]): line.split(":")[0] for line in self.lines("group")}
        result = {}
        for path in sorted((self.image / below.lstrip("/")).rglob("*")):
            facts = path.lstat()
            content = os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
            owner = f"{users[facts.st_uid]}:{groups[facts.st_gid]}"
            result[f"/{path.relative_to(self.image)}"] = (f"{stat.S_IMODE(facts.st_mode):o}", owner, content)
        return result

    def placed(self) -> dict[str, tuple[str, str, str]]:
        """All below /etc and /var, without the files of the accounts, which `useradd` writes."""
        found = {**self.found("etc"), **self.found("var")}
        return {path: fact for path, fact in found.items() if not ACCOUNTS.fullmatch(path)}

    def lines(self, name: str) -> list[str]:
        return (self.image / "etc" / name).read_text().splitlines()


def run(*arguments: str) -> Result:
    """The command; nobody answers what it asks."""
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def bench(tmp_path) -> Bench:
    return Bench(tmp_path)


def expected(bench: Bench) -> dict[str, tuple[str, str, str]]:
    """All that --config, --tls and --model put into /etc and /var."""
    root, group, service = "root:root", "root:outrider", "outrider:outrider"
    units = ROOT / "board_configs" / "systemd"
    unit = "/etc/systemd/system/outrider-edge.service"
    model = "/var/lib/outrider/models/drafter"
    return {
        "/etc/outrider": ("755", root, ""),
        "/etc/outrider/edge.toml": ("644", root, CONFIG),
        "/etc/outrider/tls": ("750", group, ""),
        "/etc/outrider/tls/ca.crt": ("644", group, CERTIFICATE),
        "/etc/outrider/tls/board.crt": ("644", group, CERTIFICATE),
        "/etc/outrider/tls/board.key": ("640", group, KEY),
        "/etc/systemd": ("755", root, ""),
        "/etc/systemd/system": ("755", root, ""),
        unit: ("644", root, (units / "outrider-edge.service").read_text()),
        "/etc/systemd/system/multi-user.target.wants": ("755", root, ""),
        "/etc/systemd/system/multi-user.target.wants/outrider-edge.service": ("777", root, unit),
        "/var/lib": ("755", root, ""),
        "/var/lib/outrider": ("750", service, ""),
        "/var/lib/outrider/models": ("750", service, ""),
        "/var/lib/outrider/identity": ("700", service, ""),
        model: ("750", service, ""),
        **{f"{model}/{path.name}": ("640", service, path.read_text()) for path in bench.model.iterdir()},
    }


@needs_root
def test_an_image_has_all_that_it_needs_and_the_second_run_does_nothing(bench):
    listed = bench.flash("--dry-run")
    assert listed.exit_code == 0 and not (bench.image / "etc" / "outrider").exists()
    done = bench.flash("--yes")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == listed.stdout + "done\n"
    assert bench.placed() == expected(bench)
    assert any(line.startswith("outrider:") and line.endswith(":/usr/sbin/nologin") for line in bench.lines("passwd"))
    again = bench.flash("--yes")
    assert again.exit_code == 0 and again.stdout.endswith("nothing to do\n")


@needs_root
def test_the_list_names_each_file_and_the_question_has_a_way_out(bench):
    done = bench.flash()  # nobody answers
    assert done.exit_code == 1 and "Do this?" in done.stdout
    assert not (bench.image / "etc" / "outrider").exists()
    for line in (
        "add     user outrider",
        f"write   /etc/outrider/edge.toml, {len(CONFIG)} bytes (0644 root:root)",
        f"write   /etc/outrider/tls/board.key, {len(KEY)} bytes (0640 root:outrider)",
        "write   /var/lib/outrider/models/drafter: 5 files, 0.0 MB",
    ):
        assert line in done.stdout.splitlines()
    assert "start" not in done.stdout, "an image cannot start anything"


@needs_root
def test_a_new_model_replaces_the_old_one_as_a_whole_and_nothing_else(bench):
    assert bench.flash("--yes").exit_code == 0
    old = bench.image / "var/lib/outrider/models/drafter"
    (old / "left.over").write_text("of an earlier one")
    (old / "extra").mkdir()
    (old / "extra" / "file").write_text("x")
    bench.make_model(b"better weights")
    done = bench.flash("--yes")
    assert done.stdout.splitlines()[1:] == [
        "write   /var/lib/outrider/models/drafter: 2 files, 0.0 MB",
        "remove  /var/lib/outrider/models/drafter: extra, left.over",
        "done",
    ]
    assert bench.placed() == expected(bench)


@needs_root
def test_rights_that_somebody_changed_are_put_right(bench):
    assert bench.flash("--yes").exit_code == 0
    key = bench.image / "etc/outrider/tls/board.key"
    key.chmod(0o644)
    assert "board.key" in bench.flash("--yes").stdout
    assert stat.S_IMODE(key.stat().st_mode) == 0o640


@needs_root
def test_links_of_an_image_lead_to_places_of_the_image(bench, tmp_path):
    """As a board would follow them: an absolute link that is followed from outside would write to this machine."""
    trap = tmp_path / "trap"
    trap.mkdir()
    (bench.image / "data").mkdir()
    (bench.image / "var" / "lib").mkdir(parents=True)
    (bench.image / "var" / "lib" / "outrider").symlink_to("/data")
    (bench.image / "etc" / "systemd").symlink_to(str(trap))
    assert bench.flash("--yes").exit_code == 0
    assert not list(trap.iterdir())
    assert (bench.image / str(trap).lstrip("/") / "system" / "outrider-edge.service").is_file()
    assert inside("/image", "/etc/../opt/x") == "/image/opt/x"


@needs_root
@pytest.mark.parametrize("chosen", ["gpu", "unattended"])
def test_a_drop_in_is_put_beside_the_unit(bench, chosen):
    assert bench.flash("--with", chosen, "--yes").exit_code == 0
    folder = bench.found("/etc/systemd/system/outrider-edge.service.d")
    assert list(folder) == [f"/etc/systemd/system/outrider-edge.service.d/{chosen}.conf"]


@needs_root
def test_wheels_become_a_program_that_starts_and_an_older_one_leaves_nothing(bench):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    given = ["--wheels", str(bench.wheels), "--python", version, "--machine", "aarch64", "--yes"]
    bench.make_wheel("1.0", old="", cli="def main(prog_name): print(prog_name, 'one')")
    assert bench.flash(*given).exit_code == 0
    child = "subprocess.run([sys.executable, '-c', 'import edge.new; print(edge.new.NAME)'])"
    bench.make_wheel("2.0", new="NAME = 'child'", cli=f"import subprocess, sys\ndef main(prog_name): {child}")
    done = bench.flash(*given)
    assert done.exit_code == 0, done.stderr
    assert any(line.startswith("remove  /opt/outrider/lib: ") and "old.py" in line for line in done.stdout.splitlines())
    program = bench.image / "opt/outrider"
    assert {path.name for path in (program / "lib").iterdir()} == {"edge", "outrider-2.0.dist-info"}
    assert not (program / "lib/edge/old.py").exists() and (program / "lib/edge/new.py").exists()
    launcher = program / "bin/outrider-edge"
    assert launcher.read_text().startswith(f"#!/usr/bin/python{version}\n") and os.access(launcher, os.X_OK)
    started = subprocess.run([sys.executable, launcher], cwd=bench.image, capture_output=True, text=True)
    assert started.stdout == "child\n", f"what it starts does not find the program: {started.stderr}"
    assert os.readlink(bench.image / "usr/local/bin/outrider-edge") == "/opt/outrider/bin/outrider-edge"
    assert bench.flash(*given).stdout.endswith("nothing to do\n")


def test_a_board_takes_no_wheel_that_is_for_a_newer_c_library():
    assert platforms("aarch64", (2, 31))[0] == "manylinux_2_31_aarch64"
    assert "manylinux_2_17_aarch64" in platforms("aarch64", (2, 31))
    assert "manylinux_2_34_aarch64" in platforms("aarch64")


def test_an_image_tells_its_c_library(tmp_path):
    assert glibc(str(tmp_path), "aarch64") is None
    library = tmp_path / "usr/lib/aarch64-linux-gnu/libc.so.6"
    library.parent.mkdir(parents=True)
    (tmp_path / "lib").symlink_to("/usr/lib")
    library.write_bytes(b"\0GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\n\0")
    assert glibc(str(tmp_path), "aarch64") == [2, 36]


def test_what_the_wheels_lack_is_named(bench):
    bench.make_wheel("1.0", cli="")
    for wheel in bench.wheels.iterdir():
        wheel.rename(wheel.with_name("outrider-1.0-cp39-cp39-win_amd64.whl"))
    done = bench.flash("--wheels", str(bench.wheels), "--python", "3.11", "--machine", "aarch64", "--yes")
    assert done.exit_code == 66 and "outrider[edge]" in done.stderr and "Python 3.11 on aarch64" in done.stderr


def test_a_bad_configuration_stops_before_anything_is_written(bench):
    for bad, named in {
        "[devise]\n": "devise",
        CONFIG.replace('"/var/lib/outrider/models/drafter"', '"/models"'): "/models",
        CONFIG.replace("[broker]\n", 'state = "/data"\n[broker]\n'): "/var/lib/outrider alone",
    }.items():
        bench.config.write_text(bad)
        done = bench.flash("--yes")
        assert done.exit_code == ConfigError.exit_code and named in done.stderr
    assert sorted(path.name for path in bench.image.iterdir()) == ["etc"]


def test_a_model_whose_weights_are_not_the_manifests_is_not_flashed(bench):
    (bench.model / "model.onnx.data").write_bytes(b"rotten")
    done = bench.flash("--yes")
    assert done.exit_code == 66 and "digest" in done.stderr


def test_a_file_that_the_configuration_names_and_nobody_brings_is_noted(bench):
    (bench.tls / "board.key").unlink()
    done = bench.flash("--dry-run")
    assert "note    the configuration names /etc/outrider/tls/board.key, which does not come along" in done.stdout
    assert done.stdout.count("note") == 1


def test_every_board_file_may_be_flashed_as_it_is():
    for path in (ROOT / "board_configs").glob("*.toml"):
        config = load(path, EdgeConfig)
        plans.configuration(path, config, [])
        plans.model(path.parent / "systemd", str(config.drafter.model))


# -- over ssh ---------------------------------------------------------------------------------------------------------


@dataclass
class Sshd:
    """A server on loopback, for root by a key, with a `systemctl` that writes down what it is told."""

    folder: Path
    command: str
    told: Path
    process: subprocess.Popen[bytes]


@pytest.fixture
def sshd(tmp_path) -> Iterator[Sshd]:
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if server is None or not shutil.which("ssh") or os.geteuid() != 0:
        pytest.skip("an ssh server of our own needs openssh-server, openssh-client and root")
    folder = tmp_path / "sshd"
    (folder / "bin").mkdir(parents=True)
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    told = folder / "told"
    systemctl = folder / "bin" / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {told}\n')
    systemctl.chmod(0o755)
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/client.pub\n"
        "StrictModes no\nPermitRootLogin prohibit-password\nUsePAM no\nPidFile none\n"
        f"SetEnv PATH={folder}/bin:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([server, "-D", "-e", "-f", folder / "config"], stderr=open(folder / "log", "wb"))  # noqa: SIM115
    options = f"-F none -p {port} -i {folder}/client -o UserKnownHostsFile={folder}/known -o StrictHostKeyChecking=no"
    deadline = time.monotonic() + 10
    while b"Server listening" not in (folder / "log").read_bytes():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
    yield Sshd(folder, f"ssh {options}", told, process)
    process.terminate()
    process.wait(10)


@needs_root
def test_over_ssh_the_same_files_come_to_lie_in_the_same_way(bench, sshd):
    """On a board whose root is a folder of this machine: all else is as it will be."""
    where = over_ssh("root@127.0.0.1", sshd.command, root=str(bench.image))
    parts = [
        plans.service([]),
        plans.certificates(bench.tls),
        plans.configuration(bench.config, load(bench.config, EdgeConfig), []),
        plans.model(bench.model, plans.MODEL),
    ]
    plan = plans.together(parts)
    facts = where.facts([item.path for item in plan.items], plan.trees)
    assert not where.probe()["user"] and not facts.keys() - {"/etc", "/var"}
    where.apply(plan.missing(facts), plan.stale(facts))
    assert bench.placed() == expected(bench)
    facts = where.facts([item.path for item in plan.items], plan.trees)
    assert not plan.missing(facts) and not plan.stale(facts)
    where.start()
    assert sshd.told.read_text().splitlines() == [
        "daemon-reload",
        "reset-failed outrider-edge.service",
        "restart --no-block outrider-edge.service",
    ]


@needs_root
def test_over_ssh_the_list_tells_the_boards_own_interpreter_and_the_start(bench, sshd):
    done = bench.flash("--ssh-command", sshd.command, "--dry-run", to="root@127.0.0.1")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "start   outrider-edge.service"
    probed = over_ssh("root@127.0.0.1", sshd.command).probe()
    assert probed["python"] == list(sys.version_info[:2]) and probed["machine"] == os.uname().machine
    assert probed["user"] == ("outrider" in {entry.pw_name for entry in pwd.getpwall()})


@needs_root
def test_over_ssh_a_command_of_the_board_runs_as_the_user_it_is_for(sshd):
    board = over_ssh("root@127.0.0.1", sshd.command)
    assert board.must(["id", "-un"], user="nobody") == b"nobody\n"
    assert board.must(["sed", "s/a b/c/"], stdin=b"a b'\n") == b"c'\n"
    with pytest.raises(CommandError, match="/nowhere") as caught:
        board.must(["ls", "/nowhere"])
    assert caught.value.exit_code == 2


def test_a_board_that_ssh_does_not_reach_is_named():
    nobody = over_ssh("root@127.0.0.1", f"ssh -F none -p {free_port()}")
    if not shutil.which("ssh"):
        pytest.skip("ssh is not installed")
    with pytest.raises(LinkError, match="refused"):
        nobody.probe()
    with pytest.raises(LinkError, match="refused"):
        nobody.run(["true"])
