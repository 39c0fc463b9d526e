"""A board's configuration to check, and what was found."""

from __future__ import annotations

from pathlib import Path

from edge.checks import Finding, Report
from tools.broker import free_port


def config(folder: Path, *, drafter: str = "/nowhere", board: str = "", broker: str = "") -> Path:
    path = folder / "edge.toml"
    port = "" if "port" in broker else f"port = {free_port()}\n"
    path.write_text(
        f'[device]\nname = "acme.board-1"\nstate = "{folder}/state"\n[board]\n{board}\n'
        f'[drafter]\nmodel = "{drafter}"\nthreads = 1\n[broker]\n{port}{broker}\n'
    )
    return path


def found(report: Report, name: str) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.name == name]
    return finding
