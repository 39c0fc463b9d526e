"""`python -m tools.release key|sign|announce|status`."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path
from typing import Any

import click
import msgspec

from edge.updates.manifest import AnyRelease, content_digest
from edge.updates.settings import Settings
from link.command import CommandGroup
from link.config import BrokerConfig, Section, load
from link.mqtt import MqttLink
from protocol.errors import LinkError
from protocol.messages import Announcement
from tools.release import fleet, manifests

file_path = click.Path(path_type=Path)
folder_path = click.Path(path_type=Path, exists=True, file_okay=False)


@click.group(cls=CommandGroup, command="release")
def main() -> None:
    """Sign releases of models, runtimes and settings, and announce them to boards. See docs/updates.md."""


@main.command()
@click.argument("path", type=file_path)
def key(path: Path) -> None:
    """Make a key: the private half into PATH, the public one, for `[updates] keys`, on stdout."""
    click.echo(manifests.make_key(path))


@main.group()
def sign() -> None:
    """Write a signed manifest."""


def common(command: Any) -> Any:
    """What all kinds take."""
    for decorator in (
        click.option("--key", "key_path", type=file_path, required=True, help="The private key."),
        click.option(
            "--out", type=file_path, required=True, help="The manifest; its signature goes beside it, `.sig`."
        ),
        click.option("--release", "name", required=True, help="The same name through all stages of a rollout."),
        click.option("--channel", default="stable", show_default=True),
        click.option("--serial", type=click.IntRange(min=1), help="By default the next one of --serials."),
        click.option("--serials", type=file_path, default=Path("serials.json"), show_default=True),
        click.option("--board", "boards", multiple=True, help="A kind of board that it is for; all when absent."),
        click.option("--least-version", default="0", show_default=True, help="Of the runtime that may take it."),
        click.option(
            "--percent", type=click.FloatRange(0, 100), default=100.0, show_default=True, help="Of the fleet."
        ),
    ):
        command = decorator(command)
    return command


class Shared(msgspec.Struct, frozen=True):
    """The options of `common`."""

    key_path: Path
    out: Path
    name: str
    channel: str
    serial: int | None
    serials: Path
    boards: tuple[str, ...]
    least_version: str
    percent: float

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "release": self.name,
            "serial": self.serial or manifests.next_serial(self.serials, self.channel, kind),
            "channel": self.channel,
            "boards": self.boards,
            "least_version": self.least_version,
            "percent": self.percent,
        }


@sign.command()
@click.argument("directory", type=folder_path)
@click.option("--url", required=True, help="https:// address of the directory that the files are served from.")
@common
def model(directory: Path, url: str, **options: Any) -> None:
    """The drafter in DIRECTORY."""
    shared = Shared(**options)
    _write(manifests.model_release(directory, url, **shared.fields("model")), shared)


@sign.command()
@click.argument("directory", type=folder_path)
@click.option("--url", required=True, help="https:// address of the directory that the wheels are served from.")
@click.option("--version", required=True, help="What the runtime in them says of itself.")
@common
def runtime(directory: Path, url: str, version: str, **options: Any) -> None:
    """The wheels in DIRECTORY."""
    shared = Shared(**options)
    _write(manifests.runtime_release(directory, url, version, **shared.fields("runtime")), shared)


@sign.command()
@click.option("--patience-s", type=float)
@click.option("--policy", type=click.Choice(["auto", "chain", "tree", "sync", "none"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--data-cap-mb", type=int)
@common
def settings(patience_s: float | None, policy: Any, log_level: Any, data_cap_mb: int | None, **options: Any) -> None:
    """Settings; what is left out is as in the board's own file."""
    shared = Shared(**options)
    changed = Settings(patience_s=patience_s, policy=policy, log_level=log_level, data_cap_mb=data_cap_mb)
    _write(manifests.settings_release(changed, **shared.fields("settings")), shared)


def _write(release: AnyRelease, shared: Shared) -> None:
    manifests.write_signed(release, manifests.load_key(shared.key_path), shared.out)
    click.echo(f"{release.kind} {release.release}, serial {release.serial}, digest {content_digest(release)[:12]}")


class ReleaseConfig(Section, frozen=True):
    """The file of `announce` and `status`: the broker, and the user there that may write below `outrider/v1/updates/`
    and read the boards' states.
    """

    broker: BrokerConfig = BrokerConfig()


config_option = click.option(
    "--config", "config_path", type=file_path, required=True, help="TOML with a `[broker]` section."
)


@main.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object: the states by device.")
@click.option("--wait-s", type=float, default=10.0, show_default=True, help="For the broker.")
def status(config_path: Path, as_json: bool, wait_s: float) -> None:
    """Which board runs what, and how many run each release."""
    states = fleet.device_states(load(config_path, ReleaseConfig).broker, wait_s)
    if as_json:
        click.echo(msgspec.json.encode(states))
        return
    for device, state in states.items():
        drafter = f"{state.drafter} {state.drafter_digest[:12]}".strip()
        click.echo("  ".join(filter(None, [device, state.status, state.version, drafter, state.releases])))
    for what, boards in sorted(fleet.count(states).items()):
        click.echo(f"{boards:6} {what}")


@main.command()
@click.argument("manifest", type=file_path)
@config_option
@click.option("--public-key", "keys", multiple=True, help="One that boards trust; the signature is checked first.")
@click.option("--wait-s", type=float, default=10.0, show_default=True)
def announce(manifest: Path, config_path: Path, keys: tuple[str, ...], wait_s: float) -> None:
    """Retain a signed MANIFEST at the broker and at those that stand by, in place of the one before."""
    announcement, release = manifests.read_signed(manifest, keys)
    for place in load(config_path, ReleaseConfig).broker.places:
        topic = _announce(place, announcement, release, wait_s)
        click.echo(f"{release.release}, serial {release.serial}: {topic} at {place.address}")


def _announce(config: BrokerConfig, announcement: Announcement, release: AnyRelease, wait_s: float) -> str:
    refused = threading.Event()
    link = MqttLink(
        config,
        f"outrider-release-{secrets.token_hex(3)}",
        on_message=lambda topic, payload: None,
        on_puback=lambda topic, reason: refused.set() if reason >= 0x80 else None,
    ).start()
    topic = manifests.announce(link, announcement, release, wait_s)
    if refused.is_set():
        raise LinkError(
            f"{topic} was refused", where=config.address, remedy="Let this user write it in the broker's access list"
        )
    return topic


if __name__ == "__main__":
    main()
