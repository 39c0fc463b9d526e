"""The board's process in a replay: the board and the drafting loop as shipped, over a drafter that waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from edge.drafters.base import Drafter
from protocol.sampling import Sampling
from tools.bench.timed import TimedDrafter, scripts_of
from tools.boards import BoardTiming
from tools.player import perform, place
from tools.twin.replay import Script


class Replayed:
    """What `perform` plays: the traces' texts by their number."""

    sampling = Sampling()
    stop_ids: Sequence[int] = ()

    def __init__(self, model: Path, scripts: Sequence[Script], board: BoardTiming) -> None:
        self.model = model
        self._timed = TimedDrafter(scripts, board)
        self.drafter: Drafter = self._timed

    def prompt(self, text: int) -> Sequence[int]:
        return self._timed.rehearse(text).prompt


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--ca", type=click.Path(path_type=Path))
@click.option("--state", type=click.Path(path_type=Path), required=True)
@click.option("--traces", "files", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--texts", type=int, default=0)
@click.option("--prompt-tokens", type=int, required=True)
@click.option("--pass-s", type=float, required=True)
@click.option("--row-share", type=float, required=True)
@click.option("--prefill-tokens-per-s", type=float, required=True)
def main(
    port: int, ca: Path | None, state: Path, files: tuple[Path, ...], texts: int, prompt_tokens: int, pass_s: float,
    row_share: float, prefill_tokens_per_s: float,
) -> None:  # fmt: skip
    """Play what the parent asks for on stdin."""
    scripts = scripts_of(files, texts, prompt_tokens)
    board = BoardTiming(pass_s, row_share, prefill_tokens_per_s)
    perform(Replayed(files[0], scripts, board), place(port, ca), state)


if __name__ == "__main__":
    main()
