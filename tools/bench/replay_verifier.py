"""The verifier's process in a replay: the gateway and the verifier that serve a target, over an engine that waits."""

from __future__ import annotations

import logging
import secrets
import signal
import sys
from pathlib import Path

import click

from cloud.cli import SWITCH_S
from cloud.config import LimitsConfig, SchedulerConfig
from cloud.gateway import Gateway
from cloud.probe import probe
from cloud.verifier import Verifier
from tools.bench.timed import TimedEngine, scripts_of
from tools.player import place
from tools.twin.replay import StepTime


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--ca", type=click.Path(path_type=Path))
@click.option("--traces", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--texts", type=int, default=0)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--step-s", type=float, required=True)
@click.option("--prefill-row-s", type=float, required=True)
def main(
    port: int, ca: Path | None, files: tuple[Path, ...], texts: int, prompt_tokens: int, step_s: float,
    prefill_row_s: float,
) -> None:  # fmt: skip
    """Serve the traces' texts until SIGTERM."""
    sys.setswitchinterval(SWITCH_S)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    engine = TimedEngine(scripts_of(files, texts, prompt_tokens), StepTime(step_s=step_s, prefill_row_s=prefill_row_s))
    scheduler, limits = SchedulerConfig(), LimitsConfig()
    verifier = Verifier(
        f"v{secrets.token_hex(5)}",
        engine,
        scheduler=scheduler.scheduler(),
        bounds=limits.bounds(),
        version="replay",
        cost=probe(engine, scheduler.probe_s, limits.draft_rows),
    )
    gateway = Gateway(verifier, place(port, ca))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    gateway.run()


if __name__ == "__main__":
    main()
