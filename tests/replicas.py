"""A fleet of toy replicas under Ray in a process of its own, for a test to shoot: `python -m tests.replicas`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import click

from cloud import cluster
from cloud.config import CloudConfig, EngineConfig, ReplicasConfig
from cloud.engines.base import Outcome, Plan
from cloud.gateway import Gateway
from cloud.logs import configure
from cloud.scheduler import Scheduler
from cloud.usage import Observer
from cloud.verifier import Bounds, Verifier
from tests.boards import SlowEngine, broker_at


class OneAtATime(SlowEngine):
    """A toy engine whose time is its rows': sessions queue. It fails while there is a file `sick`."""

    def __init__(self, *, row_s: float, sick: Path) -> None:
        super().__init__(step_s=0.0, context=8000)
        self._row_s, self._sick = row_s, sick

    def step(self, plan: Plan) -> Outcome:
        if self._sick.exists():
            raise RuntimeError("sick")
        self.step_s = self._row_s * sum(work.rows + len(work.draft) for work in plan.work)
        return super().step(plan)


@contextmanager
def toy_gateway(row_s: float, rows: int, config: CloudConfig, pulse: Observer) -> Iterator[Gateway]:
    """The model's folder stands for what happens: the engine fails while a file there has the verifier's name."""
    assert config.verifier
    engine = OneAtATime(row_s=row_s, sick=config.engine.model / config.verifier)
    verifier = Verifier(
        config.verifier, engine, scheduler=Scheduler(rows=rows), bounds=Bounds(sessions=256), observers=[pulse]
    )
    yield Gateway(verifier, config.broker)


@click.group()
def main() -> None:
    pass


@main.command()
def head() -> None:
    """A Ray cluster on this machine until stdin ends; says its address."""
    with cluster.connected(None) as ray:
        print(ray.get_runtime_context().gcs_address, flush=True)
        sys.stdin.read()


@main.command()
@click.option("--port", type=int, required=True)
@click.option("--address", required=True)
@click.option("--model", type=click.Path(path_type=Path), required=True)
@click.option("--least", type=int, default=3)
@click.option("--most", type=int, default=3)
@click.option("--row-s", type=float, default=0.004)
@click.option("--rows", type=int, default=64)
@click.option("--settle-s", type=float, default=60.0)
@click.option("--hang-s", type=float, default=20.0)
def serve(
    port: int, address: str, model: Path, least: int, most: int, row_s: float, rows: int, settle_s: float, hang_s: float
) -> None:
    """Serve until SIGTERM."""
    configure("text")
    replicas = ReplicasConfig(
        least=least,
        most=most,
        cpus=0.1,
        queue_low_s=0.01,
        queue_high_s=0.06,
        settle_s=settle_s,
        hang_s=hang_s,
        drain_s=5.0,
    )
    config = CloudConfig(engine=EngineConfig(model=model), broker=broker_at(port), replicas=replicas)
    cluster.serve(config, address=address, make=partial(toy_gateway, row_s, rows))


if __name__ == "__main__":
    main()
