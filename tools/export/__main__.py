"""`python -m tools.export target|drafter|litert|tokenizer MODEL OUT`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from protocol.errors import ConfigError
from tools import memory
from tools.corpus import text
from tools.exits import reported
from tools.export import calibration_text, litert, qdq, sources, write
from tools.export import shortlist as choosing
from tools.export.quantised import Options

console = Console(stderr=True)


@click.group()
def main() -> None:
    """Export MODEL (a Hugging Face directory or hub id, or a .gguf file) into the directory OUT."""
    # The search works in pieces that fit one core's cache; threads that wait for each other cost ten times as much
    # on a busy machine.
    torch.set_num_threads(1)
    memory.keep_freed()
    transformers.utils.logging.disable_progress_bar()


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """What both commands take."""
    for decorator in (
        click.option("--force", is_flag=True, help="Replace an earlier export in OUT."),
        click.argument("out", type=click.Path(path_type=Path)),
        click.argument("model"),
    ):
        command = decorator(command)
    return command


@main.command()
@common
@click.option("--dtype", type=click.Choice(sorted(write.DTYPES)), default="float32", show_default=True)
def target(model: str, out: Path, dtype: str, force: bool) -> None:
    """The model that decides the text, as transformers loads it."""
    write.check_free(out, force)
    source = _read(model)
    with console.status("writing"):
        manifest = write.write_target(source, out, dtype, force)
    _report(out, manifest)


@main.command()
@common
@click.option(
    "--runtime", type=click.Choice(["native", "onnx", "tensorrt"]), default="native", show_default=True,
    help="What computes it.",
)  # fmt: skip
@click.option("--bits", type=click.Choice([4, 8]), default=4, show_default=True, help="Bits of the layers' matrices.")
@click.option("--group", type=click.Choice([16, 32, 64, 128]), help="Weights a scale: 32, for tensorrt 128.")
@click.option("--head-bits", type=click.Choice([4, 8]), default=8, show_default=True, help="Bits of the head.")
@click.option(
    "--embedding-bits", type=click.Choice([4, 8]), help="Bits of an embedding of its own; else it is the head, if tied."
)
@click.option("--symmetric", is_flag=True, help="No zero points: a little smaller, drafts agree less.")
@click.option(
    "--accuracy-level", type=click.Choice([1, 4]), default=4, show_default=True,
    help="Of MatMulNBits: 4 computes with int8 activations, 1 with float32.",
)  # fmt: skip
@click.option("--shortlist", type=click.IntRange(1), help="Ids that the head is computed for; wants --corpus.")
@click.option(
    "--corpus", type=click.Path(path_type=Path), help="What the target writes, by `tools.corpus write`: chooses them."
)
@click.option("--context", type=click.IntRange(min=16), help="Tokens; by default what the model takes.")
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    help="Text that the target wrote, from `python -m tools.corpus write`.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    default=32768,
    show_default=True,
    help="Of that text, at most, spread evenly.",
)
@click.option("--threads", type=click.IntRange(min=1), help="That calibration uses; by default one a core.")
@click.option(
    "--work", type=click.Path(path_type=Path), help="Where calibrated layers are kept; by default OUT.calibration."
)
def drafter(
    model: str,
    out: Path,
    force: bool,
    group: int | None,
    shortlist: int | None,
    corpus: Path | None,
    calibrate: Path | None,
    tokens: int,
    threads: int | None,
    work: Path | None,
    **options: Any,
) -> None:
    """A small model with quantised weights, for the board."""
    for_tensorrt = options["runtime"] == "tensorrt"
    if for_tensorrt:
        _check_for_tensorrt(group)
    if (shortlist is None) != (corpus is None):
        raise click.UsageError("--shortlist and --corpus belong together")
    write.check_free(out, force)
    source = _read(model)
    head_ids = _choose(source, shortlist, corpus) if shortlist and corpus else None
    learned_on = calibration_text.read(calibrate, source.config.vocab_size, tokens) if calibrate else None
    if learned_on:
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    columns = TextColumn("quantising"), BarColumn(), MofNCompleteColumn(), TextColumn("layers"), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if for_tensorrt:
            chosen = qdq.options(group or qdq.GROUP, options["context"])
        else:
            chosen = Options(group=group or Options.group, **options)
        manifest = write.write_drafter(
            source, out, chosen, force, progress, head_ids=head_ids, corpus=learned_on, workdir=work
        )
    _report(out, manifest)


@main.command("litert")
@common
@click.option("--tflite", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Its converted file.")
@click.option("--recipe", type=click.Choice(litert.RECIPES), default=litert.RECIPES[0], show_default=True)
@click.option("--context", type=click.IntRange(min=72), default=1024, show_default=True, help="Tokens.")
def to_litert(model: str, out: Path, tflite: Path | None, recipe: str, context: int, force: bool) -> None:
    """A small model as a .tflite file, converted by litert-torch or given with --tflite."""
    write.check_free(out, force)
    source = _read(model)
    with tempfile.TemporaryDirectory(prefix="outrider-litert-") as work:
        if tflite is None:
            write.write_target(source, Path(work, "source"))
            tflite = litert.convert(Path(work, "source"), Path(work, "converted"), recipe, context)
        manifest = write.write_litert(source, tflite, out, force)
    _report(out, manifest)


@main.command()
@click.option("--force", is_flag=True, help="Replace an earlier export in OUT.")
@click.argument("exported", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def tokenizer(exported: Path, out: Path, force: bool) -> None:
    """The tokenizer alone of an EXPORTED target or drafter, for a board too small for a model."""
    write.check_free(out, force)
    _report(out, write.write_tokenizer(exported, out, force))


def _check_for_tensorrt(group: int | None) -> None:
    """Raises ConfigError for what its engines cannot be made of."""
    if group not in (None, 64, 128):
        raise ConfigError(f"groups of {group} with --runtime tensorrt", where="--group", remedy="choose 128 or 64")
    context = click.get_current_context()
    for name in ("bits", "head_bits", "embedding_bits", "symmetric", "accuracy_level"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(
                "is not for --runtime tensorrt",
                where=f"--{name.replace('_', '-')}",
                remedy="leave it out: its weights are symmetric and of four bits",
            )


def _read(model: str) -> sources.Source:
    with console.status(f"reading {model}"):
        return sources.read(model)


def _choose(source: sources.Source, size: int, corpus: Path) -> np.ndarray:
    """On the texts that nothing is measured on."""
    counts = text.counts(text.read(corpus, "calibration"), source.vocab_size)
    return choosing.choose(counts, source.vocab_size, size, choosing.always(source))


def _report(out: Path, manifest: write.Manifest) -> None:
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    console.print(f"{manifest.kind} {manifest.name}: {size:.0f} MB in {out}", soft_wrap=True)


if __name__ == "__main__":
    with reported("export"):
        main()
