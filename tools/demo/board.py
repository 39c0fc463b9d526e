"""The board's process with real models: the prompts of the demo, drafted by an exported drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from edge.drafters import manifest, runtimes
from edge.drafters.base import Drafter
from edge.drafters.mixed import MixedDrafter
from edge.text import Text
from protocol.sampling import Sampling
from tools.demo.prompts import PROMPTS
from tools.player import perform, place
from tools.traces import load


class Prompts:
    """What `perform` plays: prompts by their number, as the model's chat template puts them."""

    def __init__(
        self, model: Path, sampling: Sampling, *, threads: int, prompts: Sequence[str] = PROMPTS, suffix: bool = True
    ) -> None:
        self.model, self.sampling, self._prompts = model, sampling, prompts
        drafter = runtimes.load(model, threads=threads)
        self.drafter: Drafter = MixedDrafter(drafter) if suffix else drafter
        self._text = Text.load(model, manifest.read(model, "drafter"))
        self.stop_ids: Sequence[int] = sorted(self._text.stop_ids)

    def prompt(self, text: int) -> Sequence[int]:
        return self._text.chat([{"role": "user", "content": self._prompts[text]}])


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--ca", type=click.Path(path_type=Path))
@click.option("--state", type=click.Path(path_type=Path), required=True)
@click.option("--drafter", type=click.Path(path_type=Path), required=True)
@click.option("--threads", type=int, default=1)
@click.option("--temperature", type=float, default=0.0)
@click.option("--top-p", type=float, default=1.0)
@click.option("--prompts", type=click.Path(path_type=Path), help="Of a trace file instead of the demo's.")
@click.option("--suffix/--no-suffix", default=True, help="Whether what was written before is guessed too.")
def main(
    port: int, ca: Path | None, state: Path, drafter: Path, threads: int, temperature: float, top_p: float,
    prompts: Path | None, suffix: bool,
) -> None:  # fmt: skip
    """Play what the parent asks for on stdin."""
    sampling = Sampling(temperature=temperature, top_p=top_p)
    asked = [trace.prompt for trace in load(prompts)] if prompts else PROMPTS
    repertoire = Prompts(drafter, sampling, threads=threads, prompts=asked, suffix=suffix)
    perform(repertoire, place(port, ca), state)


if __name__ == "__main__":
    main()
