"""`python -m tools.corpus write`: see its `--help`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from cloud.engines.base import Engine, Plan, Work
from edge.drafters.manifest import read as read_manifest
from edge.text import Text
from protocol.errors import ConfigError
from protocol.sampling import Sampling
from tools.corpus import prompts, text
from tools.corpus.text import Written
from tools.exits import reported
from tools.models import PAIRS, prepare

console = Console(stderr=True)


def write_texts(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, batch: int, stop_ids: Collection[int]
) -> Iterator[tuple[int, list[int]]]:
    """(index of the prompt, ids of the greedy text behind it, a stop id last if it came) as each text ends.

    `batch` texts are under way at any time: where one ends, the next prompt takes its place.
    Raises ModelError where a prompt with `tokens` behind it does not fit the engine.
    """
    waiting = iter(range(len(prompts)))
    written: dict[int, list[int]] = {}
    while True:
        while len(written) < batch and (key := next(waiting, None)) is not None:
            engine.open(key, prompts[key], Sampling(), len(prompts[key]) + tokens)
            written[key] = []
        if not written:
            return
        outcome = engine.step(Plan([Work(key, engine.pending(key)) for key in written]))
        for key, ids in outcome.accepted.items():
            written[key] += ids
            if len(written[key]) >= tokens or ids[-1] in stop_ids:
                engine.close(key)
                yield key, written.pop(key)


@click.group()
def main() -> None:
    """Texts that a target writes: for calibration, and for measuring drafters on what they must guess."""


@main.command()
@click.option("--pair", type=click.Choice(sorted(PAIRS)), help="A pair that is fetched and exported once.")
@click.option("--target", type=click.Path(path_type=Path), help="Directory of an exported target, instead.")
@click.option(
    "--prompts", "file", type=click.Path(path_type=Path), default=prompts.OWN, show_default="our own",
    help="One a line, below lines '# topic'; every third topic is held out.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The file to write.")
@click.option("--tokens", type=click.IntRange(2), default=96, show_default=True, help="Of each text, at most.")
@click.option("--batch", type=click.IntRange(1), default=16, show_default=True, help="Texts at a time.")
@click.option("--numerics", type=click.Choice(["exact", "fast"]), default="fast", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def write(
    pair: str | None, target: Path | None, file: Path, out: Path, tokens: int, batch: int, numerics: str, threads: int
) -> None:
    """Write what the target says at T = 0 behind each prompt: a JSON object a line, {"prompt", "text", "split"}.

    A run that was stopped goes on where it was: prompts whose text is in the file are left out.
    """
    if (pair is None) == (target is None):
        raise click.UsageError("give --pair or --target")
    if not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    wanted = prompts.read(file)
    done = {one.prompt for one in text.resume(out)}
    directory = target or prepare(str(pair))[1]
    manifest = read_manifest(directory, "target")
    ours = Text.load(directory, manifest)
    ids = {tuple(ours.chat([{"role": "user", "content": one.text}])): one.split for one in wanted}
    left = [prompt for prompt in ids if prompt not in done]
    if foreign := done - ids.keys():
        raise ConfigError(
            f"{len(foreign)} of its texts are behind other prompts", where=str(out), remedy="name another file"
        )
    columns: tuple[Any, ...] = (
        TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TextColumn("texts, {task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=len(ids), completed=len(ids) - len(left), rate="loading")
        engine = _load(directory, numerics, threads)
        tokens_written = 0
        for key, written in write_texts(engine, left, tokens, batch, manifest.stop_ids):
            text.append(out, Written(left[key], tuple(written), ids[left[key]]))
            tokens_written += len(written)
            bar.update(task, advance=1, rate=f"{tokens_written} tokens")
    for split in ("calibration", "held-out"):
        positions = sum(len(one.text) for one in text.read(out) if one.split == split)
        console.print(f"{split}: {positions} tokens")


def _load(directory: Path, numerics: str, threads: int) -> Engine:
    from cloud.engines.numerics import Numerics
    from cloud.engines.torch_engine import load

    return load(directory, Numerics(mode=numerics), threads=threads)  # type: ignore[arg-type]


if __name__ == "__main__":
    with reported("corpus"):
        main()
