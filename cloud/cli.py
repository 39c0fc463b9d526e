"""`outrider-cloud`: serve a target, look at the verifiers of a broker, or at what their tenants are billed for."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from cloud.config import CloudConfig
from cloud.logs import configure
from link.command import CommandGroup
from link.config import BrokerConfig, load
from protocol.errors import ConfigError

SWITCH_S = 0.0005  # a message that arrives beside a busy thread would wait ten times as long by default


@click.group(cls=CommandGroup, command="outrider-cloud")
@click.option("-v", "--verbose", is_flag=True, help="Log every detail.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def main(context: click.Context, verbose: bool, log_format: str) -> None:
    """The verifier: certifies the drafts of a fleet with one large model."""
    sys.setswitchinterval(SWITCH_S)
    context.obj = partial(configure, log_format, verbose)
    context.obj()


@main.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help="A TOML file.")
@click.option("--replicas", type=click.IntRange(min=1), help="How many verifiers; `least` of [replicas] if absent.")
@click.option("--ray", "with_ray", is_flag=True, help="A fleet of replicas under Ray: docs/cluster.md.")
@click.option("--address", help="Of a Ray cluster that runs; without it one is started on this machine.")
@click.pass_obj
def serve(
    configure_logs: Callable[[], None], config_path: Path, replicas: int | None, with_ray: bool, address: str | None
) -> None:
    """Serve one target until SIGTERM or SIGINT."""
    if with_ray:
        from cloud import cluster

        read = partial(read_for_replicas, config_path, replicas)
        cluster.serve(read(), address=address, reload=read, configure_logs=configure_logs)
        return
    if replicas is not None or address is not None:
        raise ConfigError(
            "--replicas and --address are of a fleet under Ray",
            where="command line",
            remedy="Add --ray, or start this command once for each replica: they share the broker's sessions",
        )
    from cloud.serving import make_engine, make_gateway  # `status` has no need of it
    from cloud.watch import Watch

    config = load(config_path, CloudConfig)
    with Watch(config) as watch:
        gateway = make_gateway(config, make_engine(config), watch)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: gateway.stop())
        gateway.run()


def read_for_replicas(path: Path, replicas: int | None) -> CloudConfig:
    """The configuration at `path`, for so many replicas at least. Raises ConfigError."""
    config = load(path, CloudConfig)
    if replicas is None:
        return config
    most = max(replicas, config.replicas.most or 0)
    asked = msgspec.structs.replace(config.replicas, least=replicas, most=most)
    return msgspec.structs.replace(config, replicas=asked)


@main.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="A verifier's TOML file, for its broker."
)
@click.option("--broker", default="127.0.0.1:1883", help="HOST:PORT, where there is no file.")
@click.option("--http", "urls", multiple=True, help="A verifier's endpoint, for live figures; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def status(config_path: Path | None, broker: str, urls: tuple[str, ...], as_json: bool) -> None:
    """Show the verifiers that a broker knows, and what they are doing."""
    from cloud.status import as_dicts, read_live, read_states, tables

    if config_path:
        at = load(config_path, CloudConfig).all_brokers
    else:
        host, _, port = broker.rpartition(":")
        at = [BrokerConfig(host=host or "127.0.0.1", port=int(port))]
    states = list({state.verifier: state for one in at for state in read_states(one)}.values())
    live, failed = read_live(urls)
    if as_json:
        for line in as_dicts(states, live):
            click.echo(msgspec.json.encode(line))
    elif states or live:
        Console().print(*tables(states, live))
    else:
        click.echo(f"No verifier has announced itself at {', '.join(one.address for one in at)}.")
    if failed:
        raise failed[0]


@main.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="A TOML file with `[metering] directory`."
)
@click.option("--dir", "directories", type=click.Path(path_type=Path), multiple=True, help="The same; may be repeated.")
@click.option("--day", default="", help="UTC, as 2026-11-29, or a month as 2026-11; everything where absent.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def usage(config_path: Path | None, directories: tuple[Path, ...], day: str, as_json: bool) -> None:
    """Show what tenants and devices are billed for: docs/metering.md."""
    from cloud.records import Records
    from cloud.usage_report import check_day, report, table

    configured = load(config_path, CloudConfig).metering.directory if config_path else None
    if configured is not None:
        directories = (*directories, configured)
    if not directories:
        raise ConfigError("no directory", where="usage", remedy="Name it by --dir, or a file that does by --config.")
    records = Records.read(directories, until=check_day(day))
    if as_json:
        click.echo(msgspec.json.encode(report(records, day)))
        return
    Console().print(table(records, day))
    if records.unreadable:
        click.echo(f"{records.unreadable} lines were torn and are not counted: docs/metering.md", err=True)
