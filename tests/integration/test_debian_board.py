"""From a bare Debian root to an enrolled, drafting board: a root made from this machine's own mirror, the one command
that the documentation names, and then systemd as process 1 in it, a broker with certificates and a verifier with the
real target. After a reboot it is all there again.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load
from edge.drafters import manifest
from edge.text import Text
from protocol.sampling import Sampling
from tests.box import Box, why_not
from tests.certified import DEVICE, CertifiedFleet
from tools.broker import find_mosquitto, free_port
from tools.demo.reference import decode_alone
from tools.flash.plan import IDENTITY
from tools.flash.wheels import gather
from tools.models import ROOT

MESSAGES = [{"role": "user", "content": "Write three sentences about the sea."}]
NUM_TOKENS = 32
SOURCES = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]


def lacking(folder: Path) -> str:
    """What the test cannot do without and this machine does not have, "" where nothing."""
    if shutil.which("mmdebstrap") is None:
        return "mmdebstrap is not installed"
    if find_mosquitto() is None:
        return "mosquitto is not installed"
    if why := why_not(folder):
        return why
    try:
        suite, files = own_mirror()
        (site, *_) = re.findall(r"https?://\S+", re.sub("#.*", "", files[0].read_text()))
        urllib.request.urlopen(f"{site.rstrip('/')}/dists/{suite}/InRelease", timeout=20).close()
    except (OSError, ValueError, IndexError) as error:
        return f"no Debian mirror: {error}"
    return ""


def own_mirror() -> tuple[str, list[Path]]:
    """(this machine's release, the files of apt that name it)."""
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "none")
    files = [path for path in SOURCES if path.suffix in (".list", ".sources") and path.is_file()]
    return suite, [path for path in files if re.search(rf"\s{suite}\s", path.read_text())]


@dataclass
class Bench:
    """What a fleet engineer has, and the root."""

    folder: Path
    drafter: Path
    target: Path

    def __post_init__(self) -> None:
        self.fleet = CertifiedFleet(self.folder, free_port(), free_port())
        self.root = self.folder / "root"
        self.root.mkdir()
        # In memory: a package manager waits for the disk at every turn.
        subprocess.run(["mount", "-t", "tmpfs", "root", self.root], check=True)
        self.api_port, self.metrics_port = free_port(), free_port()
        self.verifier: subprocess.Popen[bytes] | None = None
        self.box: Box | None = None

    def start_cloud(self) -> None:
        self.fleet.provision("init", "test")
        self.fleet.provision("issue", "verifier", "one", "--out", str(self.folder / "verifier"))
        self.fleet.configure()
        self.fleet.start()
        config = self.folder / "cloud.toml"
        config.write_text(
            f'[engine]\nmodel = "{self.target}"\nthreads = 1\n[http]\nport = {self.metrics_port}\n'
            f'[broker]\nport = {self.fleet.port}\nshare_file = "verifier/share"\n'
            '[broker.tls]\nca = "verifier/ca.pem"\ncert = "verifier/cert.pem"\nkey = "verifier/key.pem"\n'
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with open(self.folder / "verifier.log", "wb") as log:
            self.verifier = subprocess.Popen(
                [sys.executable, "-m", "cloud", "serve", "--config", str(config)], cwd=ROOT, env=environment, stderr=log
            )

    def commission(self, *where: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tools.commission", DEVICE, "--yes", *where]
        command += ["--model", str(self.drafter), "--wheels", str(self.folder / "wheels")]
        command += ["--ca", str(self.folder / "ca")]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def make(self) -> subprocess.CompletedProcess[str]:
        suite, sources = own_mirror()
        mirror = [word for path in sources for word in ("--sources", str(path))]
        broker = f"127.0.0.1:{self.fleet.port}"
        root = ["--root", str(self.root), "--debian", suite, *mirror]
        return self.commission(*root, "--hardware", "generic-x86", "--broker", broker)

    def again(self) -> subprocess.CompletedProcess[str]:
        """On the running board, which is reached as ssh would; with the configuration that it has."""
        assert self.box is not None
        ssh, config = self.folder / "ssh", self.folder / "edge.toml"
        config.write_bytes((self.root / "etc/outrider/edge.toml").read_bytes())
        ssh.write_text(f'#!/bin/sh\nshift 3\nexec {shlex.join(self.box.enter)} sh -c "$1"\n')
        ssh.chmod(0o755)
        return self.commission("--ssh", "root@kitchen", "--ssh-command", str(ssh), "--config", str(config))

    def accepted(self) -> float:
        """Guesses of this board that the verifier has committed, as of a second ago or so."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        return sum(float(one) for one in re.findall(r"^outrider_accepted_tokens_total\{.*\} (\S+)", text, re.M))

    def has_drafted(self, before: float = 0.0) -> bool:
        """Whether the verifier comes to tell of more accepted guesses than `before`."""
        deadline = time.monotonic() + 10
        while self.accepted() <= before:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def chat(self, **options: object) -> str:
        """What the board answers an application, once it is up and sees a verifier."""
        url = f"http://127.0.0.1:{self.api_port}/v1/chat/completions"
        body = {"messages": MESSAGES, "max_tokens": NUM_TOKENS, **options}
        deadline = time.monotonic() + 60
        while True:
            try:
                answer = httpx.post(url, json=body, timeout=60)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return answer.json()["choices"][0]["message"]["content"]
            said = answer.text if answer is not None else "nobody listens"
            assert self.box is not None
            assert time.monotonic() < deadline, f"{said}\n{self.box.journal()}"
            time.sleep(0.2)

    def close(self) -> None:
        if self.box is not None:
            self.box.close()
        if self.verifier is not None:
            self.verifier.kill()
            self.verifier.wait()
        if self.fleet.process is not None:
            self.fleet.stop()
        subprocess.run(["umount", "--lazy", self.root], check=True)


@pytest.fixture(scope="module")
def bench(tmp_path_factory, smollm2) -> Iterator[Bench]:
    if why := lacking(tmp_path_factory.mktemp("try")):
        if os.environ.get("OUTRIDER_REQUIRE_MODELS"):
            pytest.fail(why)
        pytest.skip(why)
    made = Bench(tmp_path_factory.mktemp("debian"), *smollm2)
    try:
        made.start_cloud()
        here = sys.version_info[:2]
        gather(made.folder / "wheels", here, platform.machine())
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def commissioned(bench) -> Bench:
    done = bench.make()
    assert done.returncode == 0, done.stdout + done.stderr
    (bench.folder / "said").write_text(done.stdout)
    return bench


@pytest.fixture(scope="module")
def booted(commissioned) -> Bench:
    """The root as process 1 finds it, on this machine's network."""
    config = commissioned.root / "etc/outrider/edge.toml"
    config.write_text(f"{config.read_text()}\n[api]\nport = {commissioned.api_port}\n")
    commissioned.box = Box(commissioned.folder, f'mount --bind {commissioned.root} "$root"\n', network=True)
    return commissioned


@pytest.fixture(scope="module")
def expected(smollm2) -> str:
    """The target's own text."""
    text = Text.load(smollm2[0], manifest.read(smollm2[0], "drafter"))
    engine = load(smollm2[1], Numerics(mode="exact"), threads=1)
    return text.decode(decode_alone(engine, text.chat(MESSAGES), Sampling(), NUM_TOKENS, sorted(text.stop_ids)))


def test_a_bare_root_becomes_an_enrolled_board_whose_check_passes(commissioned):
    said = (commissioned.folder / "said").read_text()
    assert "2 packages  install python3, systemd-sysv" in said and f"{DEVICE}: enrolled until" in said
    assert "FAIL" not in said and "ok   verifier: " in said and "does not come along" not in said
    key = commissioned.root / IDENTITY.lstrip("/") / "board.key"
    owner = commissioned.root.joinpath("var/lib/outrider").stat().st_uid
    assert (key.stat().st_mode & 0o777, key.stat().st_uid) == (0o600, owner) and owner != 0
    kept = [path.read_bytes() for path in (commissioned.folder / "ca").rglob("*") if path.is_file()]
    assert key.read_bytes() not in kept, "the key stays on the board"


def test_it_boots_and_drafts_and_the_text_is_the_targets_alone(booted, expected):
    assert booted.chat() == expected
    assert booted.has_drafted()
    assert booted.box.show("ActiveState") == "active" and booted.box.show("NRestarts") == "0"


def test_the_same_again_on_the_running_board_changes_nothing(booted):
    booted.box.until("ActiveState", "active")
    before, service = snapshot(booted.root), booted.box.pid()
    done = booted.again()
    assert done.returncode == 0, done.stderr
    assert "root@kitchen: nothing to do" in done.stdout and "ok   verifier: " in done.stdout
    assert snapshot(booted.root) == before and booted.box.pid() == service


def snapshot(root: Path) -> dict[str, tuple[int, int, bytes]]:
    """Of all that the board lives by: owner, mode, content."""
    found = {}
    for folder in ("etc", "opt", "usr/local", "var/lib/outrider/identity"):
        for path in (root / folder).rglob("*"):
            if path.is_file() and not path.is_symlink():
                found[str(path)] = path.stat().st_uid, path.stat().st_mode, path.read_bytes()
    return found


def test_it_comes_back_by_itself_from_a_reboot(booted, expected):
    assert booted.chat() == expected
    booted.box.run("systemctl", "reboot")
    booted.box.process.wait(60)
    booted.box.boot()
    before = booted.accepted()
    assert booted.chat() == expected
    assert booted.has_drafted(before)
    report = json.loads(booted.box.run("runuser", "-u", "outrider", "--", "outrider-edge", "check", "--json"))
    assert report["exit_code"] == 0, report
