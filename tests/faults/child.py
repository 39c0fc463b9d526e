"""A board or a verifier in a process of its own, with the product's own timers: `python -m tests.faults.child`.

A board writes one text of its stories after the other for ever, and says on stdout what its application is told, each
line with the time by CLOCK_MONOTONIC, which all processes share, and by the wall clock, which a fault may set.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import click

from cloud.gateway import Gateway
from cloud.scheduler import Scheduler
from cloud.verifier import Bounds, Verifier
from edge.board import Board, Stream
from edge.config import DeviceConfig, DrafterConfig, DraftingConfig, EdgeConfig
from link.config import BrokerConfig, TlsConfig
from protocol.errors import OutriderError
from tests.boards import SlowEngine
from tests.faults.stories import NUM_TOKENS, number_of, story
from tests.toys import ToyDrafter

CONTEXT = 1024
LEAK = 8 << 20  # bytes at a time

_leaked: list[bytearray] = []


def say(**what: object) -> None:
    print(json.dumps({"at": time.monotonic(), "wall": time.time(), **what}), flush=True)


def tls_of(folder: Path | None) -> TlsConfig | None:
    return folder and TlsConfig(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


def leak(*_: object) -> None:
    """As a program that grows without bounds."""
    while True:
        _leaked.append(bytearray(os.urandom(1) * LEAK))


@click.group()
def main() -> None:
    sys.setswitchinterval(0.0005)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


@main.command()
@click.option("--host", default="127.0.0.1")
@click.option("--port", type=int, required=True)
@click.option("--name", required=True)
@click.option("--step-s", type=float, required=True)
@click.option("--tls", "tls_folder", type=click.Path(path_type=Path))
def verifier(host: str, port: int, name: str, step_s: float, tls_folder: Path | None) -> None:
    """Serve until it is shot."""
    broker = BrokerConfig(host=host, port=port, tls=tls_of(tls_folder), share_file=tls_folder and tls_folder / "share")
    core = Verifier(name, SlowEngine(step_s=step_s, context=CONTEXT), scheduler=Scheduler(), bounds=Bounds())
    gateway = Gateway(core, broker)
    signal.signal(signal.SIGTERM, lambda *_: gateway.stop())
    say(ready=name)
    gateway.run()


@main.command()
@click.option("--host", default="127.0.0.1")
@click.option("--port", type=int, required=True)
@click.option("--name", required=True)
@click.option("--state", type=click.Path(path_type=Path), required=True)
@click.option("--policy", default="auto")
@click.option("--first", default=0, help="Number of the first story, where the journal has none.")
@click.option("--max-tokens", default=NUM_TOKENS)
@click.option("--tls", "tls_folder", type=click.Path(path_type=Path))
def board(
    host: str, port: int, name: str, state: Path, policy: str, first: int, max_tokens: int, tls_folder: Path | None
) -> None:
    """Write one story after the other; those that a crash cut short first."""
    config = EdgeConfig(
        device=DeviceConfig(name=name, state=state),
        drafter=DrafterConfig(model=Path("none")),
        broker=BrokerConfig(host=host, port=port, tls=tls_of(tls_folder)),
        drafting=DraftingConfig(policy=policy),  # type: ignore[arg-type]
    )
    made = Board(config, ToyDrafter(lambda position: position % 5 == 0, context=CONTEXT)).start()
    signal.signal(signal.SIGUSR1, leak)
    say(ready=name)
    number = first
    for entry in made.journal.entries():
        number = max(number, number_of(entry.request.session) + 1)
        if not entry.end:
            say(session=entry.request.session, resumed=entry.committed)
            write(made.resume(entry), entry.request.session, len(entry.committed))
    while True:
        request = story(name, number, max_tokens)
        try:
            stream = made.open(request)
        except OutriderError as error:
            say(session=request.session, refused=str(error))
            time.sleep(0.5)
            continue
        if number > first:
            made.journal.remove(story(name, number - 1).session)
        write(stream, request.session, 0)
        number += 1


def write(stream: Stream, session: int, base: int) -> None:
    """Say what comes until the text is complete, or why it will not be."""
    assert stream.run is not None
    try:
        for ids in stream:
            say(session=session, base=base, ids=ids, owner=stream.run.window.verifier)
            base += len(ids)
    except OutriderError as error:
        say(session=session, failed=str(error), base=base)
    else:
        say(session=session, finished=base)


if __name__ == "__main__":
    main()
