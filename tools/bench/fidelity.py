"""How much of its agreement with the target a drafter keeps when it is quantised, and what that costs in tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from edge.drafters import manifest, runtimes
from protocol.errors import ConfigError, ModelError
from tools import memory
from tools.bench import fidelity_picture, given
from tools.bench.fidelity_kept import Kept
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
from tools.bench.fidelity_subjects import SCHEMES, Exported, Scheme, Simulated, Subject
from tools.bench.record import machine
from tools.corpus import text as corpus
from tools.corpus.text import Written
from tools.export import shortlist
from tools.export.sources import Source

DRAFTS = (4, 8)  # guesses a round
WINDOW = 512  # tokens of the plain text that are read at once
NAMES = [scheme.name for scheme in SCHEMES]

console = Console(stderr=True)


@dataclass
class Row:
    """One drafter. ids: [m] what it may guess from, None for all; facts: what its scores depend on.

    texts: what it scored, the target's texts first, then the plain text's pieces.
    """

    name: str
    compute: str
    facts: tuple[object, ...]
    ids: np.ndarray | None = None
    texts: list[Scored] = field(default_factory=list)
    num_plain: int = 0

    @property
    def written(self) -> list[Scored]:
        return self.texts[: len(self.texts) - self.num_plain]

    @property
    def plain(self) -> list[Scored]:
        return self.texts[len(self.texts) - self.num_plain :]

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


def measure(rows: Sequence[Row], subject: Subject, texts: Sequence[Written]) -> Iterator[None]:
    """Score all texts for rows that differ only in the ids they may guess from; yields at each text."""
    for row in rows:
        row.texts = []
    for one in texts:
        logits = subject.logits(one.prompt, one.text)
        for row in rows:
            row.texts.append(score(logits, one.text, row.ids))
        yield


@click.command()
@given.options
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
@click.option("--keep", "folder", type=click.Path(path_type=Path), help="Where scores are kept, to go on from.")
@click.option("--picture", type=click.Path(path_type=Path), help="An .svg or .png to draw.")
def main(
    pair: str | None, model: str | None, path: Path, plain_path: Path | None, names: tuple[str, ...], group: int,
    exports: tuple[str, ...], sizes: tuple[int, ...], positions: int | None, threads: int, folder: Path | None,
    picture: Path | None,
) -> None:  # fmt: skip
    """Acceptance and perplexity by quantisation, on texts that calibration never saw: one JSON record.

    Everything is compared with the same drafter in 16 bits at the same positions, with the 95 % bound of the paired
    difference. "W4A16" and the like are simulated; --export adds what a board really computes, and each is compared
    with the ones before it too.
    """
    given.check(pair, model)
    torch.set_num_threads(threads)
    memory.keep_freed()
    directories = [_export(argument) for argument in exports]
    with console.status("reading"):
        source = given.read(pair, model)
        written = corpus.sample(path, "held-out", positions, source.vocab_size)
        plain = windows(_encode(source, plain_path)) if plain_path else []
    schemes = [scheme for scheme in SCHEMES if scheme.name in (*(names or NAMES), NAMES[0])]
    simulated = {scheme: [Row(scheme.name, "simulated", (scheme, group))] for scheme in schemes}
    for size in sizes:
        ids = _shortlist(source, path, size)
        simulated[schemes[0]].append(Row(f"16-bit, {size} ids", "simulated", (schemes[0], ids.tobytes()), ids))
    exported = {directory: _row(name, directory, source) for name, directory in directories}
    base, *cut = simulated[schemes[0]]
    rows = [*(together[0] for together in simulated.values()), *exported.values(), *cut]
    kept = Kept(folder, source.origin["sha256"], [*written, *plain])
    for row in rows:
        row.num_plain = len(plain)
        row.texts = kept.find(*row.facts) or []
    _fill(simulated, exported, source, [*written, *plain], kept, group=group, threads=threads)
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
        "rows": [row.figures(base) for row in rows],
        "exports": [
            {"name": later.name, "over": earlier.name, **_points(paired(_hits(later), _hits(earlier)))}
            for earlier, later in combinations(exported.values(), 2)
        ],
    }
    console.print(_table(record))
    if picture:
        fidelity_picture.draw(record, picture)
    click.echo(json.dumps(record))


def _fill(
    simulated: Mapping[Scheme, Sequence[Row]], exported: Mapping[Path, Row], source: Source, texts: Sequence[Written],
    kept: Kept, *, group: int, threads: int,
) -> None:  # fmt: skip
    """Measure and keep every row that has no scores yet."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        missing = {scheme: [row for row in rows if not row.texts] for scheme, rows in simulated.items()}
        left = {directory: row for directory, row in exported.items() if not row.texts}
        task = bar.add_task("", total=len(texts) * (sum(map(len, missing.values())) + len(left)))

        def run(rows: Sequence[Row], subject: Subject) -> None:
            bar.update(task, description=rows[0].name)
            for _ in measure(rows, subject, texts):
                bar.advance(task, len(rows))
            for row in rows:
                kept.save(row.texts, *row.facts)

        if any(missing.values()):
            model = Simulated(source, group)
            for scheme, rows in missing.items():
                if rows:
                    model.use(scheme)
                    run(rows, model)
            del model
        longest = max(len(one.prompt) + len(one.text) for one in texts)
        for directory, row in left.items():
            kind = runtimes.ON_CPU.get(manifest.read(directory, "drafter").runtime, "auto")
            run([row], Exported(runtimes.load(directory, kind, threads=threads, context=longest)))


def _export(argument: str) -> tuple[str, Path]:
    name, _, directory = argument.partition("=")
    if not name or not (Path(directory) / manifest.MANIFEST).is_file():
        raise click.BadParameter(f"{argument!r} is not NAME=DIR of an exported drafter", param_hint="--export")
    return name, Path(directory)


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


def _row(name: str, directory: Path, source: Source) -> Row:
    """Of an exported drafter. Raises ModelError where it has another vocabulary than the one it is compared with."""
    facts = manifest.read(directory, "drafter")
    if facts.vocab_size != source.vocab_size:
        raise ModelError(
            f"its vocabulary has {facts.vocab_size} ids, the drafter's {source.vocab_size}",
            where=str(directory),
            remedy="give exports of this drafter",
        )
    return Row(name, f"{facts.compute}, {facts.runtime}", (facts.runtime, facts.compute, facts.weights_digest))


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
            _interval(points),
            _percent(row["perplexity"]),
            *(f"{rounds[str(draft)]['measured']:.2f}" for draft in DRAFTS),
        ]
        if record["plain_positions"]:
            cells.append(_percent(row["plain_perplexity"]))
        table.add_row(*cells)
    for pair in record["exports"]:
        table.add_row(f"{pair['name']} over {pair['over']}", "", _interval(pair))
    return table


def _interval(points: dict) -> str:
    return f"{points['difference']:+.2f} ± {points['bound_95']:.2f}"


def _percent(ratio: dict | None) -> str:
    return "-" if ratio is None else f"{ratio['value']:.3f} ({ratio['percent']:+.1f} %)"
