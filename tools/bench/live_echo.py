"""The live benchmark's peer: a link as shipped that sends back what comes, to the device that it came from."""

from __future__ import annotations

import logging
import sys
import threading

import click

from edge.cli import SWITCH_S
from link.config import BrokerConfig
from link.mqtt import MqttLink

CALL, ECHO = "call", "echo"


@click.command()
@click.option("--port", type=int, required=True)
def main(port: int) -> None:
    """Echo until stdin ends."""
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    ready = threading.Event()

    def on_message(topic: str, payload: bytes) -> None:
        link.publish(f"{ECHO}{topic.removeprefix(CALL)}", payload)

    link = MqttLink(
        BrokerConfig(port=port),
        "live-echo",
        on_message=on_message,
        on_state=lambda up, reason: ready.set() if up else None,
        subscriptions=[(f"{CALL}/+", 0)],
    ).start()
    ready.wait(10.0)
    click.echo("serving ", err=True)
    sys.stdin.read()
    link.close()


if __name__ == "__main__":
    main()
