"""What tests of identities share: an authority's folder, boards with their files, and commands run as from a shell."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
from click.testing import CliRunner, Result

from edge.cli import main as edge_cli
from tools.provision import office
from tools.provision.__main__ import main as provision_cli
from tools.provision.folder import Folder

NOW = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
DAY = timedelta(days=1)
LIFE = 730 * DAY


def run(command: click.Command, *words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


def made(path: Path) -> Folder:
    """An authority, made at NOW."""
    folder = Folder(path)
    with folder.held():
        office.init(folder, "test", NOW)
        folder.finish()
    return folder


def code_for(folder: Folder, device: str, now: datetime = NOW, *, again: bool = False) -> str:
    code, _ = office.add(folder, device, now, 7 * DAY, again=again)
    folder.finish()
    return code


def enrol(folder: Folder, device: str, request: bytes, now: datetime = NOW) -> bytes:
    """The answer to `request`, written down."""
    answer, _ = office.sign(folder, request, f"{device}'s request", now, LIFE)
    folder.finish()
    return answer


class BoardFiles:
    """A board's own files, with `outrider-edge enroll` at them."""

    def __init__(self, home: Path, device: str) -> None:
        self.home, self.device = home, device
        home.mkdir(parents=True)
        self.config = home / "edge.toml"
        self.config.write_text(
            f'[device]\nname = "{device}"\n[drafter]\nmodel = "drafter"\n'
            '[broker.tls]\nca = "id/ca.pem"\ncert = "id/cert.pem"\nkey = "id/key.pem"\n'
        )
        self.key, self.cert = home / "id" / "key.pem", home / "id" / "cert.pem"
        self.request_path = home / "request.json"

    def ask(self, code: str) -> bytes:
        """The request's bytes."""
        (self.home / "code").write_text(code + "\n")
        result = run(
            edge_cli,
            "enroll",
            "--config",
            self.config,
            "--code-file",
            self.home / "code",
            "--request",
            self.request_path,
        )
        assert result.exit_code == 0, result.output
        return self.request_path.read_bytes()

    def install(self, answer: bytes) -> Result:
        path = self.home / "answer.json"
        path.write_bytes(answer)
        return run(edge_cli, "enroll", "--config", self.config, "--answer", path)


def provision(folder: Path, *words: object) -> Result:
    return run(provision_cli, "--ca", folder, *words)


def tree(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below `path`, with its mode; the lock, which holds nothing, aside."""
    return {
        str(one.relative_to(path)): (one.read_bytes(), one.stat().st_mode & 0o777)
        for one in path.rglob("*")
        if one.is_file() and one.name != ".lock"
    }
