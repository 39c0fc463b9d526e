"""Where a drafter needs its bits: one kind of matrix at a time is rounded, the others stay as the source has them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tools import memory
from tools.bench import given
from tools.bench.record import machine
from tools.corpus import text as corpus
from tools.corpus.text import Written
from tools.export.forward import Decoder, plain
from tools.export.quantise import dequantise
from tools.export.quantised import EMBEDDING, HEAD, KV, Options, head, round_plainly
from tools.export.sources import Source

Matrices = Mapping[str, torch.Tensor]

KINDS = {
    "values": ("v_proj.weight",),
    "keys": ("k_proj.weight",),
    "queries": ("q_proj.weight",),
    "attention's output": ("o_proj.weight",),
    "gate": ("gate_proj.weight",),
    "up": ("up_proj.weight",),
    "down": ("down_proj.weight",),
    "head": (HEAD,),
    "embedding": (EMBEDDING,),
}
ALL = tuple(end for ends in KINDS.values() for end in ends)
TOGETHER = {"all": ALL, "all but keys and values": tuple(end for end in ALL if end not in KV)}
TOKENS = 2048  # at a time: whole texts, laid end to end
ROWS = 256  # that logits are made for at once

console = Console(stderr=True)


@dataclass(frozen=True)
class Moved:
    """What rounding did. kl: mean Kullback-Leibler divergence from the source's distribution, nats a token; nll: mean
    minus the natural logarithm of the probability of what was written; given_nll: as the source has it.
    """

    kl: float
    nll: float
    given_nll: float


class Model:
    """A source's forward pass with any matrices in place of its own, over texts that stay the same."""

    def __init__(self, source: Source, texts: Sequence[Written]) -> None:
        self._decoder, self._vocab, self._texts = Decoder(source.config, source.weights), source.vocab_size, texts
        self.matrices = {name: value.float() for name, value in source.weights.items() if value.dim() == 2}
        self.matrices[HEAD] = head(self.matrices)
        self._before = list(self._hidden(self.matrices))

    def moved(self, matrices: Matrices) -> Moved:
        """With these in place of the source's own."""
        kl = nll = given_nll = 0.0
        count = 0
        for (hidden, written), (before, _) in zip(self._hidden(matrices), self._before, strict=True):
            for ours, theirs, ids in zip(hidden.split(ROWS), before.split(ROWS), written.split(ROWS), strict=True):
                said, meant = self._logs(ours, matrices), self._logs(theirs, self.matrices)
                nll -= float(said.gather(1, ids[:, None]).double().sum())
                given_nll -= float(meant.gather(1, ids[:, None]).double().sum())
                kl += float(meant.sub(said).mul_(meant.exp_()).double().sum())
                count += len(ids)
        return Moved(kl / count, nll / count, given_nll / count)

    def _logs(self, hidden: torch.Tensor, matrices: Matrices) -> torch.Tensor:
        """Logarithms of the probabilities, [rows, vocab]."""
        return (hidden @ matrices[HEAD][: self._vocab].T).log_softmax(-1)

    def _hidden(self, matrices: Matrices) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What the head multiplies before each written token, [rows, hidden], and these tokens [rows], part by part."""
        for part in _parts(self._texts):
            ids = [torch.tensor([*one.prompt, *one.text]) for one in part]
            embedded = matrices[EMBEDDING][torch.cat(ids)]
            lengths = [len(text) for text in ids]
            made = self._decoder.hidden(embedded, lengths, plain(matrices)).split(lengths)
            rows = [text[len(one.prompt) - 1 : -1] for text, one in zip(made, part, strict=True)]
            yield torch.cat(rows), torch.tensor([id for one in part for id in one.text])


def _parts(texts: Sequence[Written]) -> Iterator[list[Written]]:
    part: list[Written] = []
    for one in texts:
        part.append(one)
        if sum(len(text.prompt) + len(text.text) for text in part) >= TOKENS:
            yield part
            part = []
    if part:
        yield part


def rounded(matrices: Matrices, ends: tuple[str, ...], bits: int, group: int) -> dict[str, torch.Tensor]:
    """All matrices, those whose names end so rounded plainly, as the native runtime would hold them."""
    options = Options(runtime="native", group=group)
    return {
        name: dequantise(round_plainly(matrix, bits, options)) if name.endswith(ends) else matrix
        for name, matrix in matrices.items()
    }


@click.command()
@given.options
@click.option(
    "--corpus", "path", type=click.Path(path_type=Path), required=True,
    help="What its target writes, by `tools.corpus write`; the texts that calibration sees are measured.",
)  # fmt: skip
@click.option("--bits", type=click.Choice(["4", "8"]), default="4", show_default=True)
@click.option("--group", type=click.IntRange(8), default=32, show_default=True, help="Weights that share a scale.")
@click.option("--positions", type=click.IntRange(1), help="Stop after so many of the target's tokens.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@torch.no_grad()
def main(
    pair: str | None, model: str | None, path: Path, bits: str, group: int, positions: int | None, threads: int
) -> None:
    """How far the distribution moves when one kind of matrix is rounded: one JSON record."""
    given.check(pair, model)
    torch.set_num_threads(threads)
    memory.keep_freed()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        kinds = {**KINDS, **TOGETHER}
        task = bar.add_task("as it is", total=len(kinds) + 1)  # with the source itself
        source = given.read(pair, model)
        texts = corpus.sample(path, "calibration", positions, source.vocab_size)
        subject = Model(source, texts)
        rows = []
        for kind, ends in kinds.items():
            bar.update(task, description=kind, advance=1)
            moved = subject.moved(rounded(subject.matrices, ends, int(bits), group))
            rows.append(
                {
                    "kind": kind,
                    "weights": sum(one.numel() for name, one in subject.matrices.items() if name.endswith(ends)),
                    "kl": round(moved.kl, 6),
                    "perplexity_percent": round(100 * math.expm1(moved.nll - moved.given_nll), 3),
                }
            )
        bar.update(task, advance=1)
    record = {
        "benchmark": "sensitivity",
        "machine": machine(),
        "drafter": source.name,
        "source": source.origin,
        "corpus": path.name,
        "positions": sum(len(one.text) for one in texts),
        "bits": int(bits),
        "group": group,
        "perplexity": round(math.exp(moved.given_nll), 4),
        "rows": rows,
    }
    click.echo(json.dumps(record))
