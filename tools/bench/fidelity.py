"""How much of its agreement with the target a drafter keeps when it is quantised, and what that costs in tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from edge.drafters import manifest, runtimes
from protocol.errors import ConfigError, ModelError
from tools import models
from tools.bench import fidelity_picture
from tools.bench.fidelity_scores import (
    Difference,
    Scored,
    acceptance,
    formula,
    paired,
    perplexity,
    score,
    tokens_a_round,
)
from tools.bench.fidelity_subjects import SCHEMES, Exported, Simulated, Subject
from tools.bench.record import machine
from tools.corpus import text as corpus
from tools.corpus.text import Written
from tools.export import shortlist, sources
from tools.export.sources import Source

DRAFTS = (4, 8)  # guesses a round
WINDOW = 512  # tokens of the plain text that are read at once
NAMES = [scheme.name for scheme in SCHEMES]

console = Console(stderr=True)


@dataclass
class Row:
    """What one drafter scored. plain: of the plain text, empty where none was given."""

    name: str
    compute: str
    written: list[Scored] = field(default_factory=list)
    plain: list[Scored] = field(default_factory=list)

    def figures(self, base: Row) -> dict[str, object]:
        """For the record; differences are from `base`, the drafter that is not quantised."""
        alpha = acceptance(self.written)
        found: dict[str, object] = {
            "name": self.name,
            "compute": self.compute,
            "acceptance": round(alpha, 4),
            "acceptance_points": _points(paired(_hits(self), _hits(base))),
            "perplexity": _ratio(perplexity(self.written), perplexity(base.written)),
            "tokens_a_round": {
                str(draft): {
                    "measured": round(tokens_a_round(self.written, draft), 3),
                    "formula": round(formula(alpha, draft), 3),
                }
                for draft in DRAFTS
            },
        }
        if self.plain:
            found["plain_perplexity"] = _ratio(perplexity(self.plain), perplexity(base.plain))
        return found


def _hits(row: Row) -> list[np.ndarray]:
    return [text.hits for text in row.written]


def _points(difference: Difference) -> dict[str, float]:
    return {"difference": round(100 * difference.mean, 2), "bound_95": round(100 * difference.bound, 2)}


def _ratio(ours: float, theirs: float) -> dict[str, float] | None:
    """None where the drafter has no probability for some token of the text."""
    return None if math.isinf(ours) else {"value": round(ours, 4), "percent": round(100 * (ours / theirs - 1), 2)}


def windows(ids: Sequence[int]) -> list[Written]:
    """A plain text cut into pieces, the first token of each its prompt."""
    pieces = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    return [Written(tuple(piece[:1]), tuple(piece[1:]), "held-out") for piece in pieces if len(piece) > 1]


def measure(
    rows: Sequence[Row],
    subject: Subject,
    ids: Sequence[np.ndarray | None],
    written: Sequence[Written],
    plain: Sequence[Written],
) -> Iterator[None]:
    """Score all texts into `rows`, each with the ids [m] that it may guess from, None for all; yields at each text."""
    for texts, plain_text in ((written, False), (plain, True)):
        for one in texts:
            logits = subject.logits(one.prompt, one.text)
            for row, allowed in zip(rows, ids, strict=True):
                (row.plain if plain_text else row.written).append(score(logits, one.text, allowed))
            yield


@click.command()
@click.option("--pair", type=click.Choice(sorted(models.PAIRS)), help="The drafter of this pair, fetched once.")
@click.option("--model", help="Another one: a directory, a hub id or a GGUF file, as `tools.export` takes it.")
@click.option(
    "--corpus", "path", type=click.Path(path_type=Path), required=True,
    help="What its target writes, by `tools.corpus write`; the held-out texts of it are measured.",
)  # fmt: skip
@click.option("--text", "plain_path", type=click.Path(path_type=Path), help="Any text, for a perplexity beside it.")
@click.option("--scheme", "names", multiple=True, type=click.Choice(NAMES), help="Only these, beside 16-bit.")
@click.option("--group", type=click.IntRange(8), default=32, show_default=True, help="Weights and activations a scale.")
@click.option(
    "--export", "exports", multiple=True, metavar="NAME=DIR", help="An exported drafter, as a board computes it."
)
@click.option(
    "--shortlist", "sizes", multiple=True, type=click.IntRange(1), help="Guess only from so many ids, with 16 bits."
)
@click.option("--positions", type=click.IntRange(1), help="Stop after so many of the target's tokens.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--picture", type=click.Path(path_type=Path), help="An .svg or .png to draw.")
def main(
    pair: str | None, model: str | None, path: Path, plain_path: Path | None, names: tuple[str, ...], group: int,
    exports: tuple[str, ...], sizes: tuple[int, ...], positions: int | None, threads: int, picture: Path | None,
) -> None:  # fmt: skip
    """Acceptance and perplexity by quantisation, on texts that calibration never saw: one JSON record.

    Everything is compared with the same drafter in 16 bits at the same positions, with the 95 % bound of the paired
    difference. "W4A16" and the like are simulated; --export adds what a board really computes.
    """
    if (pair is None) == (model is None):
        raise click.UsageError("give --pair or --model")
    torch.set_num_threads(threads)
    directories = [_export(argument) for argument in exports]
    with console.status("reading"):
        source = sources.read(model or str(models.fetch(models.PAIRS[str(pair)].drafter)))
        written = _first(corpus.read(path, "held-out"), positions)
        _check(source, written, path)
        plain = windows(_encode(source, plain_path)) if plain_path else []
        subject = Simulated(source, group)
    lists = [_shortlist(source, path, size) for size in sizes]
    schemes = [scheme for scheme in SCHEMES if scheme.name in (*(names or NAMES), NAMES[0])]
    rows = [Row(scheme.name, "simulated") for scheme in schemes]
    cut = [Row(f"16-bit, {size} ids", "simulated") for size in sizes]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        steps = len(written) + len(plain)
        task = bar.add_task("", total=steps * (len(rows) + len(directories)))
        for scheme, row in zip(schemes, rows, strict=True):
            bar.update(task, description=row.name)
            subject.use(scheme)
            together = [row, *(cut if row is rows[0] else ())]
            for _ in measure(together, subject, [None, *lists][: len(together)], written, plain):
                bar.advance(task)
        del subject
        for name, directory in directories:
            bar.update(task, description=name)
            drafter = _load(directory, source, threads, max(len(one.prompt) + len(one.text) for one in written + plain))
            row = Row(name, f"{drafter.info.compute}, {manifest.read(directory, 'drafter').runtime}")
            rows.append(row)
            for _ in measure([row], Exported(drafter), [None], written, plain):
                bar.advance(task)
    record = {
        "benchmark": "fidelity",
        "machine": machine(),
        "drafter": source.name,
        "source": source.origin,
        "corpus": path.name,
        "texts": len(written),
        "positions": sum(len(one.text) for one in written),
        "plain_text": plain_path and plain_path.name,
        "plain_positions": sum(len(one.text) for one in plain),
        "group": group,
        "rows": [row.figures(rows[0]) for row in [*rows, *cut]],
    }
    console.print(_table(record))
    if picture:
        fidelity_picture.draw(record, picture)
    click.echo(json.dumps(record))


def _export(argument: str) -> tuple[str, Path]:
    name, _, directory = argument.partition("=")
    if not name or not (Path(directory) / manifest.MANIFEST).is_file():
        raise click.BadParameter(f"{argument!r} is not NAME=DIR of an exported drafter", param_hint="--export")
    return name, Path(directory)


def _first(texts: Sequence[Written], positions: int | None) -> list[Written]:
    """Whole texts, until so many tokens are together."""
    if positions is None:
        return list(texts)
    ends = np.cumsum([len(one.text) for one in texts])
    return list(texts[: int(np.searchsorted(ends, positions)) + 1])


def _check(source: Source, written: Sequence[Written], path: Path) -> None:
    highest = max(max(one.prompt + one.text) for one in written)
    if highest >= source.vocab_size:
        raise ConfigError(
            f"id {highest} is not in the drafter's vocabulary of {source.vocab_size}",
            where=str(path),
            remedy="give the corpus of a target of the drafter's family",
        )


def _encode(source: Source, path: Path) -> list[int]:
    from tokenizers import Tokenizer

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from error
    return list(Tokenizer.from_str(source.tokenizer.decode()).encode(text, add_special_tokens=False).ids)


def _shortlist(source: Source, path: Path, size: int) -> np.ndarray:
    """Chosen on the texts that are not measured."""
    counts = corpus.counts(corpus.read(path, "calibration"), source.vocab_size)
    return shortlist.choose(counts, source.vocab_size, size, shortlist.always(source))


def _load(directory: Path, source: Source, threads: int, context: int) -> runtimes.CachedDrafter:
    facts = manifest.read(directory, "drafter")
    if facts.vocab_size != source.vocab_size:
        raise ModelError(
            f"its vocabulary has {facts.vocab_size} ids, the drafter's {source.vocab_size}",
            where=str(directory),
            remedy="give exports of this drafter",
        )
    return runtimes.load(directory, threads=threads, context=context)


def _table(record: dict) -> Table:
    table = Table(title=f"{record['drafter']}: {record['positions']} positions of {record['texts']} texts")
    table.add_column("drafter")
    columns = ["acceptance", "points", "perplexity", *(f"E[A], {draft}" for draft in DRAFTS)]
    for heading in columns + ["plain text"] * bool(record["plain_positions"]):
        table.add_column(heading, justify="right")
    for row in record["rows"]:
        points, rounds = row["acceptance_points"], row["tokens_a_round"]
        cells = [
            f"{row['name']} ({row['compute']})",
            f"{row['acceptance']:.3f}",
            f"{points['difference']:+.2f} ± {points['bound_95']:.2f}",
            _percent(row["perplexity"]),
            *(f"{rounds[str(draft)]['measured']:.2f}" for draft in DRAFTS),
        ]
        if record["plain_positions"]:
            cells.append(_percent(row["plain_perplexity"]))
        table.add_row(*cells)
    return table


def _percent(ratio: dict | None) -> str:
    return "-" if ratio is None else f"{ratio['value']:.3f} ({ratio['percent']:+.1f} %)"
