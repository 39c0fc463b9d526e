"""A board or a verifier of toys in a process of its own, so that a test can shoot it: `python -m tests.boards`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from cloud.engines.base import Outcome, Plan
from cloud.gateway import Gateway
from cloud.meter import Meter
from cloud.scheduler import Scheduler
from cloud.usage import Observer
from cloud.verifier import Bounds, Verifier
from edge.board import Board
from edge.config import DeviceConfig, DrafterConfig, DraftingConfig, EdgeConfig, TimingConfig
from edge.session import Request
from link.config import BrokerConfig
from protocol.sampling import Sampling
from tests.toys import TARGET, ToyDrafter, ToyEngine

PROMPT = tuple(range(3, 20))
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)
TIMING = TimingConfig(open_s=1.0, repair_s=0.3, silence_s=1.5, acknowledge_s=0.1)


class SlowEngine(ToyEngine):
    """A toy engine whose steps take the time that they say."""

    def step(self, plan: Plan) -> Outcome:
        started = time.monotonic()
        outcome = super().step(plan)
        time.sleep(max(0.0, self.step_s - (time.monotonic() - started)))
        return outcome


def broker_at(port: int) -> BrokerConfig:
    return BrokerConfig(port=port, backoff_max_s=0.3)


def make_gateway(
    port: int, name: str, *, step_s: float = 0.004, observers: Sequence[Observer] = (), **bounds: float
) -> Gateway:
    made = Bounds(**bounds)  # type: ignore[arg-type]
    engine = SlowEngine(step_s=step_s)
    verifier = Verifier(name, engine, scheduler=Scheduler(), bounds=made, observers=observers)
    return Gateway(verifier, broker_at(port))


def make_board(port: int, name: str, state: Path, *, policy: str = "chain", good: int = 5) -> Board:
    """good: its drafter is wrong at one position in so many."""
    config = EdgeConfig(
        device=DeviceConfig(name=name, state=state),
        drafter=DrafterConfig(model=Path("none")),
        broker=broker_at(port),
        drafting=DraftingConfig(policy=policy),  # type: ignore[arg-type]
        timing=TIMING,
    )
    return Board(config, ToyDrafter(lambda position: position % good == 0, context=2000))


def make_request(
    session: int, *, sampling: Sampling = SAMPLED, max_tokens: int = 100, patience_s: float = 0.0
) -> Request:
    return Request(session, TARGET, PROMPT, sampling, max_tokens, patience_s=patience_s)


@click.group()
def main() -> None:
    pass


@main.command()
@click.option("--port", type=int)
@click.option("--name")
@click.option("--step-s", type=float, default=0.004)
@click.option("--usage", type=click.Path(path_type=Path), help="Where to meter.")
def serve(port: int, name: str, step_s: float, usage: Path | None) -> None:
    """A verifier until it is shot; says when it is up."""
    observers = [Meter(usage, name, TARGET, flush_s=0.3)] if usage else []
    gateway = make_gateway(port, name, step_s=step_s, observers=observers)
    gateway.link.subscribe("none/of/ours")
    print(json.dumps({"serving": name}), flush=True)
    gateway.run()


@main.command()
@click.option("--port", type=int)
@click.option("--name")
@click.option("--state", type=click.Path(path_type=Path))
@click.option("--session", type=int)
@click.option("--max-tokens", type=int)
def chat(port: int, name: str, state: Path, session: int, max_tokens: int) -> None:
    """Go on with the journal's session, or begin one; a line of ids for each that is verified."""
    board = make_board(port, name, state).start()
    entries = board.journal.unfinished()
    stream = board.resume(entries[0]) if entries else board.open(make_request(session, max_tokens=max_tokens))
    for ids in stream:
        print(json.dumps(ids), flush=True)
    board.close()


if __name__ == "__main__":
    main()
