"""The board's process with real models: the prompts of the demo, drafted by an exported drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from edge.drafters import manifest, runtimes
from edge.drafters.base import Drafter
from edge.text import Text
from protocol.sampling import Sampling
from tools.demo.prompts import PROMPTS
from tools.player import perform, place


class Prompts:
    """What `perform` plays: PROMPTS by their number, as the model's chat template puts them."""

    def __init__(self, model: Path, sampling: Sampling, *, threads: int) -> None:
        self.model, self.sampling = model, sampling
        self.drafter: Drafter = runtimes.load(model, threads=threads)
        self._text = Text.load(model, manifest.read(model, "drafter"))
        self.stop_ids: Sequence[int] = sorted(self._text.stop_ids)

    def prompt(self, text: int) -> Sequence[int]:
        return self._text.chat([{"role": "user", "content": PROMPTS[text]}])


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--ca", type=click.Path(path_type=Path))
@click.option("--state", type=click.Path(path_type=Path), required=True)
@click.option("--drafter", type=click.Path(path_type=Path), required=True)
@click.option("--threads", type=int, default=1)
@click.option("--temperature", type=float, default=0.0)
@click.option("--top-p", type=float, default=1.0)
def main(
    port: int, ca: Path | None, state: Path, drafter: Path, threads: int, temperature: float, top_p: float
) -> None:
    """Play what the parent asks for on stdin."""
    sampling = Sampling(temperature=temperature, top_p=top_p)
    perform(Prompts(drafter, sampling, threads=threads), place(port, ca), state)


if __name__ == "__main__":
    main()
