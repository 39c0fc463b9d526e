"""`python -m tools.provision`: the fleet's offline authority. Exit codes: docs/provisioning.md."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path, PurePosixPath

import click
import msgspec

from edge.enroll import PRIVATE
from link.command import CommandGroup
from protocol.errors import ConfigError
from protocol.topics import check_name
from tools.provision import office
from tools.provision.folder import Folder
from tools.provision.register import Role

path_type = click.Path(path_type=Path)
days = click.IntRange(min=1)
port_type = click.IntRange(1, 65535)


def _rehearse(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    ctx.obj.rehearsing = wanted


rehearsal = click.option(
    "--dry-run",
    is_flag=True,
    expose_value=False,
    callback=_rehearse,
    help="Check everything, list what would be written, write nothing.",
)
board_days = click.option("--days", type=days, default=730, show_default=True, help="How long certificates are good.")


@click.group(cls=CommandGroup, command="tools.provision")
@click.option(
    "--ca",
    "ca_path",
    type=path_type,
    default="ca",
    show_default=True,
    envvar="OUTRIDER_CA",
    help="The authority's folder.",
)
@click.pass_context
def main(ctx: click.Context, ca_path: Path) -> None:
    """Identities of a fleet, and what its broker lets each of them say."""
    ctx.obj = Folder(ca_path)


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


def _finish(folder: Folder, *said: str) -> None:
    written = folder.finish()
    if folder.rehearsing:
        for path in written:
            click.echo(f"would write {path}")
    for line in said:
        click.echo(f"would say: {line}" if folder.rehearsing else line)


@main.command()
@click.argument("fleet")
@rehearsal
@click.pass_obj
def init(folder: Folder, fleet: str) -> None:
    """Make the authority of FLEET."""
    with folder.held():
        said = office.init(folder, fleet, _now())
        _finish(folder, said)


@main.command()
@click.argument("board")
@click.option("--tenant", required=True)
@click.option("--hours", type=days, default=168, show_default=True, help="How long the code is good.")
@click.option("--again", is_flag=True, help="A new code, for a board that has one or is enrolled.")
@click.option("--code-file", type=path_type, help="Write the code there, and do not show it.")
@rehearsal
@click.pass_obj
def add(folder: Folder, board: str, tenant: str, hours: int, again: bool, code_file: Path | None) -> None:
    """Name BOARD of a tenant, and give out its one-time enrolment code."""
    device = f"{check_name(tenant, 'tenant')}.{check_name(board, 'board')}"
    with folder.held():
        code, said = office.add(folder, device, _now(), timedelta(hours=hours), again=again)
        if code and code_file is not None:
            folder.put(code_file, code + "\n", PRIVATE)
            said = f"{said}, is in {code_file}"
        elif code and not folder.rehearsing:
            said = f"{said}: {code}"
        _finish(folder, said)


@main.command()
@click.argument("request", type=path_type)
@click.option("--out", type=path_type, required=True, help="Where to write the answer for the board.")
@board_days
@rehearsal
@click.pass_obj
def sign(folder: Folder, request: Path, out: Path, days: int) -> None:
    """Answer a board's REQUEST, made by `outrider-edge enroll`."""
    with folder.held():
        answer, said = office.sign(folder, folder.read(request), str(request), _now(), timedelta(days=days))
        folder.put(out, answer)
        _finish(folder, said)


@main.command()
@click.argument("boards", nargs=-1)
@click.option("--out", type=path_type, required=True, help="Folder for the answers, TENANT.BOARD.json.")
@click.option("--force", is_flag=True, help="Also those that are good for long.")
@board_days
@rehearsal
@click.pass_obj
def renew(folder: Folder, boards: tuple[str, ...], out: Path, force: bool, days: int) -> None:
    """New certificates for BOARDS, tenant.board each, or for all that end soon; nothing is needed from them."""
    with folder.held():
        answers, said = office.renew(folder, boards, _now(), timedelta(days=days), force=force)
        for name, answer in answers.items():
            folder.put(out / f"{name}.json", answer)
        _finish(folder, *said)


@main.command()
@click.argument("name")
@click.option("--role", type=click.Choice(["board", "verifier", "operator", "broker"]), default="board")
@rehearsal
@click.pass_obj
def revoke(folder: Folder, name: str, role: Role) -> None:
    """End all certificates of NAME, a board's tenant.board; the broker must be given its files anew."""
    with folder.held():
        said = office.revoke(folder, role, name, _now())
        _finish(folder, said)


@main.command()
@click.argument("role", type=click.Choice(["verifier", "operator"]))
@click.argument("name")
@click.option("--out", type=path_type, required=True, help="Folder for key, certificate, authority.")
@board_days
@rehearsal
@click.pass_obj
def issue(folder: Folder, role: Role, name: str, out: Path, days: int) -> None:
    """Key and certificate of a machine in the cloud that runs verifiers, or of a person who watches."""
    with folder.held():
        said = office.issue(folder, role, name, out, _now(), timedelta(days=days))
        _finish(folder, said)


@main.command()
@click.option("--out", type=path_type, help="File to write; stdout when absent.")
@rehearsal
@click.pass_obj
def acl(folder: Folder, out: Path | None) -> None:
    """The broker's access list."""
    text = office.access(folder, _now())
    if out is None:
        click.echo(text, nl=False)
        return
    folder.put(out, text, PRIVATE)
    _finish(folder)


@main.command("broker-config")
@click.argument("hosts", nargs=-1, required=True)
@click.option("--out", type=path_type, required=True, help="Folder for all that the broker reads.")
@click.option("--at", type=str, help="Where that folder will lie on the broker's machine; as --out when absent.")
@click.option("--state", default="/var/lib/mosquitto", show_default=True, help="Where the broker keeps its state.")
@click.option(
    "--port",
    "ports",
    type=port_type,
    multiple=True,
    default=[8883],
    show_default=True,
    help="MQTT over TLS; say it again for another, such as 443.",
)
@click.option("--websockets-port", type=port_type, help="MQTT over WebSocket; not with mosquitto 2.0.")
@click.option("--mosquitto", type=click.Choice(["2.0", "2.1"]), default="2.0", show_default=True, help="Its version.")
@click.option("--connections", type=days, default=4096, show_default=True, help="Most at one listener.")
@click.option("--days", type=days, default=730, show_default=True, help="How long its certificate is good.")
@rehearsal
@click.pass_obj
def broker_config(
    folder: Folder,
    hosts: tuple[str, ...],
    out: Path,
    at: str | None,
    state: str,
    ports: tuple[int, ...],
    websockets_port: int | None,
    mosquitto: str,
    connections: int,
    days: int,
) -> None:
    """Configuration, certificate, access and revocation list of the broker that clients reach as HOSTS."""
    if websockets_port is not None and mosquitto == "2.0":
        raise ConfigError(
            "mosquitto 2.0 reads no revocation list for WebSocket over TLS, and ends after a reload",
            where="--websockets-port",
            remedy="Use --port 443, which passes HTTP proxies too, or --mosquitto 2.1",
        )
    with folder.held():
        said = office.broker(
            folder,
            out,
            hosts,
            _now(),
            timedelta(days=days),
            at=PurePosixPath(at or out.absolute()),
            state=PurePosixPath(state),
            ports=ports,
            websockets_port=websockets_port,
            connections=connections,
        )
        _finish(folder, said)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def inventory(folder: Folder, as_json: bool) -> None:
    """Everybody, one line each: role, name, state, end, serial."""
    for line in office.inventory(folder, _now()):
        if as_json:
            click.echo(msgspec.json.encode(line))
        else:
            ends = f"{line.ends:%Y-%m-%d}" if line.ends else "-"
            click.echo(f"{line.role:<9} {line.name:<32} {line.state:<9} {ends:<11} {line.serial}")


if __name__ == "__main__":
    main(prog_name="tools.provision")
