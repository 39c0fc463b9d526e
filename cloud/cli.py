"""`outrider-cloud`: serve a target, or look at the verifiers of a broker."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from cloud.config import CloudConfig
from link.command import CommandGroup
from link.config import BrokerConfig, load
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import WireError
from protocol.messages import VerifierState, decode

log = logging.getLogger(__name__)

SWITCH_S = 0.0005  # a message that arrives beside a busy thread would wait ten times as long by default

RETAINED_S = 1.0


@click.group(cls=CommandGroup, command="outrider-cloud")
@click.option("-v", "--verbose", is_flag=True, help="Log every detail.")
def main(verbose: bool) -> None:
    """The verifier: certifies the drafts of a fleet with one large model."""
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


@main.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), required=True, help="A TOML file.")
def serve(config_path: Path) -> None:
    """Serve one target until SIGTERM or SIGINT."""
    from cloud.serving import make_engine, make_gateway  # `status` has no need of it

    config = load(config_path, CloudConfig)
    gateway = make_gateway(config, make_engine(config))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    gateway.run()


@main.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="A verifier's TOML file, for its broker."
)
@click.option("--broker", default="127.0.0.1:1883", help="HOST:PORT, where there is no file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def status(config_path: Path | None, broker: str, as_json: bool) -> None:
    """Show the verifiers that a broker knows."""
    if config_path:
        config = load(config_path, CloudConfig).broker
    else:
        host, _, port = broker.rpartition(":")
        config = BrokerConfig(host=host or "127.0.0.1", port=int(port))
    states = read_states(config)
    if as_json:
        import msgspec

        for state in states:
            click.echo(msgspec.json.encode(_as_dict(state)))
        return
    table = Table("verifier", "status", "target", "numerics", "sessions", "step ms")
    for state in states:
        table.add_row(
            state.verifier,
            state.status,
            state.target,
            state.numerics,
            str(state.sessions),
            f"{state.step_us / 1000:.1f}",
        )
    Console().print(table if states else f"No verifier has announced itself at {config.address}.")


def read_states(broker: BrokerConfig) -> list[VerifierState]:
    """The retained states of all verifiers at a broker. Raises LinkError when it cannot be reached."""
    states: dict[str, VerifierState] = {}

    def on_message(topic: str, payload: bytes) -> None:
        try:
            message = decode(payload)
        except WireError:
            return
        if isinstance(message, VerifierState):
            states[topic] = message

    link = MqttLink(
        broker,
        f"outrider-status-{secrets.token_hex(4)}",
        on_message=on_message,
        subscriptions=[(topics.verifier_state_topic("+"), 0)],
    ).start()
    try:
        link.wait_up(broker.connect_timeout_s)
        time.sleep(RETAINED_S)
    finally:
        link.close()
    return sorted(states.values(), key=lambda state: (state.target, state.verifier))


def _as_dict(state: VerifierState) -> dict[str, object]:
    return {field: getattr(state, field) for field in state.__struct_fields__}
