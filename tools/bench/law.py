"""The law on a real pair: how often coupled drafts are what the target draws, beside what no coupling can exceed.

The target writes texts by coupled sampling; the drafter reads them token by token. At each position the figures compare
the drafter's draw with the target's, and the two distributions p and q that they are drawn from:

    1 - TV = sum min(p, q)                                   no coupling agrees more often
    (1 - TV) / (1 + TV)                                      Gumbel noise agrees at least so often, arXiv 2408.07978
    sum over i of 1 / sum over j of max(p_j/p_i, q_j/q_i)    just how often it does, arXiv 1809.04052
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cloud.engines.kv import Slab
from cloud.engines.model import Forward, load_model
from cloud.engines.numerics import Numerics, numerics_id
from cloud.engines.ragged import Span
from cloud.sampling import choose_rows
from edge.drafters import manifest, runtimes
from edge.drafters.cached import CachedDrafter
from edge.text import Text
from protocol.errors import ModelError
from protocol.sampling import Sampling, choose
from tools.bench.record import machine
from tools.models import prepare

POSITIONS = 4096  # of each setting, at least
SESSIONS = 16  # texts that the target writes in one pass
LENGTH = 192  # tokens of a text at most: many texts tell more than long ones
CHAIN = 64  # rows of a pass of the drafter
RESAMPLES = 10_000
SETTINGS = (Sampling(temperature=1.0), Sampling(temperature=0.8, top_p=0.95))

PROMPTS = (
    "Write a Python function that merges overlapping intervals, with a docstring and tests.",
    "Explain how a bicycle stays upright, for a curious twelve-year-old.",
    "Write a thread-safe LRU cache in Java and explain each method.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Implement Dijkstra's algorithm in C++ with a priority queue.",
    "What caused the fall of the Western Roman Empire? Discuss several views.",
    "Write a SQL schema for a small library with loans and reservations, and three useful queries.",
    "Describe the taste and making of sourdough bread in detail.",
    "Write a Rust program that counts word frequencies in a file given on the command line.",
    "Give advice to someone who moves to a foreign country for work, in several paragraphs.",
    "Write a React component for a searchable, sortable table with pagination.",
    "Explain how vaccines train the immune system.",
    "Write a Bash script that backs up a folder, keeps seven copies and logs what it does.",
    "Compare living in a big city with living in a small village.",
    "Implement a binary search tree in Go with insert, delete and in-order traversal.",
    "Write a speech for the opening of a new public park.",
    "Write a Python class for matrices with addition, multiplication and determinant.",
    "Explain the water cycle and why it matters for farming.",
    "Write a JavaScript function that debounces another function, and explain closures with it.",
    "Write a review of an imaginary science-fiction novel.",
    "Write a C function that parses a line of CSV with quoted fields.",
    "How did the printing press change Europe?",
    "Write a Python script that downloads a web page and lists its links by domain.",
    "Write a dialogue between a chess teacher and an impatient student.",
    "Implement a rate limiter with the token bucket algorithm in Python.",
    "Explain how interest rates influence house prices.",
    "Write a Kotlin function that validates e-mail addresses without regular expressions, with tests.",
    "Describe a walk through a forest in autumn.",
    "Write a TypeScript event emitter with typed events.",
    "Explain the difference between climate and weather, with examples.",
    "Write a Haskell solution to the eight queens problem and explain it.",
    "Plan a three-day trip to the mountains for a family with two children.",
)

Floats = NDArray[np.float64]
Logits = NDArray[np.float32]
Report = Callable[[str, int], None]


@dataclass(slots=True)
class Sample:
    """A text that the target writes. prompt: its tokens; logits: [vocab] of each token behind them;
    evaluated: tokens that lie in the slab."""

    prompt: int
    ids: list[int]
    sampling: Sampling
    slab: Slab
    evaluated: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


class Position(NamedTuple):
    """The figures of one position. coupled, top_1: whether the coupled and the likeliest draft are what the target drew
    (0 or 1); expected: how often coupled drafts are, at these two distributions."""

    coupled: float
    top_1: float
    expected: float
    one_minus_tv: float
    lower_bound: float


def measure(
    drafter_dir: Path,
    target_dir: Path,
    *,
    threads: int,
    positions: int = POSITIONS,
    sessions: int = SESSIONS,
    length: int = LENGTH,
    settings: Sequence[Sampling] = SETTINGS,
    report: Report = lambda task, positions: None,
) -> dict[str, Any]:
    """Figures of each setting over at least `positions` positions, the target writing `sessions` texts in a pass.

    The bar: at T = 1 the mean of `coupled_minus_one_minus_tv` is within 0.03. report: called with what was done, and
    for how many positions more. Raises ModelError for a directory that cannot be used, or where the tokenizers differ.
    """
    ours, theirs = manifest.read(drafter_dir, "drafter"), manifest.read(target_dir, "target")
    if ours.tokenizer_digest != theirs.tokenizer_digest:
        raise ModelError(
            f"its tokenizer {ours.tokenizer_digest[:12]} is not the target's {theirs.tokenizer_digest[:12]}",
            where=str(drafter_dir),
            remedy="Export a drafter of the target's own family",
        )
    torch.set_num_threads(threads)
    numerics = Numerics(mode="fast")
    writer = Writer(load_model(target_dir, theirs.dtype, numerics), Text.load(target_dir, theirs), theirs.vocab_size)
    drafter = runtimes.load(drafter_dir, threads=threads)
    measured = []
    for sampling in settings:
        name = f"T {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"
        started = time.perf_counter()
        figures = []
        for text in writer.write(sampling, positions, sessions, length, partial(report, f"{name}: target writes")):
            figures.append(np.array(list(compare(drafter, text))))  # [positions, figures]
            report(f"{name}: drafter reads", len(figures[-1]))
        measured.append(
            {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "positions": sum(map(len, figures)),
                "texts": len(figures),
                **summarise(figures),
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    return {
        "drafter": {
            "model": ours.name,
            "compute": ours.compute,
            "quantisation": ours.quantisation,
            "provider": drafter.info.provider,
        },
        "target": {"model": theirs.name, "numerics": numerics_id(numerics, theirs.dtype)},
        "threads": threads,
        "sessions": sessions,
        "text_tokens": length,
        "settings": measured,
    }


class Writer:
    """The target, as its engine computes in fast numerics, with the logits that each token was drawn from."""

    def __init__(self, forward: Forward, text: Text, vocab: int) -> None:
        self._forward = forward
        self._vocab = vocab
        self._stop_ids = text.stop_ids
        self._prompts = [text.chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]

    def write(
        self, sampling: Sampling, positions: int, sessions: int, length: int, report: Callable[[int], None]
    ) -> Iterator[Sample]:
        """Texts in the order in which they end: at a stop id, at `length` tokens, or when all together have
        `positions`. `sessions` of them are written at once, each with a seed of its own; the prompts take turns.
        """
        running: list[Sample] = []
        numbers = itertools.count()
        written = 0
        while written < positions:
            running += [self._open(next(numbers), sampling, length) for _ in range(sessions - len(running))]
            self._write_token(running)
            written += len(running)
            report(len(running))
            ended = [len(text.logits) == length or text.ids[-1] in self._stop_ids for text in running]
            yield from itertools.compress(running, ended)
            running = [text for text, end in zip(running, ended, strict=True) if not end]
        yield from running

    def _open(self, number: int, sampling: Sampling, length: int) -> Sample:
        prompt = self._prompts[number % len(self._prompts)]
        own = msgspec.structs.replace(sampling, seed=sampling.seed + number)
        return Sample(len(prompt), list(prompt), own, self._forward.new_slab(len(prompt) + length, 0))

    def _write_token(self, texts: Sequence[Sample]) -> None:
        """Draw the next token of each text, all in one pass."""
        ids: list[int] = []
        spans: list[Span] = []
        for text in texts:
            new = text.ids[text.evaluated :]
            spans.append(Span(text.slab, len(ids), text.evaluated, len(new), ()))
            ids += new
        logits = self._forward(spans, ids, [span.start + span.rows - 1 for span in spans])[:, : self._vocab]
        drawn = choose_rows(logits, [len(text.ids) for text in texts], [text.sampling for text in texts])
        for text, row, id in zip(texts, logits, drawn, strict=True):
            text.logits.append(row.clone())  # a view would keep the rows of all texts
            text.evaluated = len(text.ids)
            text.ids.append(id)


def compare(drafter: CachedDrafter, text: Sample) -> Iterator[Position]:
    """The figures of each position that the target wrote."""
    positions = range(text.prompt, len(text.ids))
    for position, theirs, ours in zip(positions, text.logits, read(drafter, text), strict=True):
        p = distribution(theirs.float().numpy(), text.sampling)
        q = distribution(ours, text.sampling)
        shared = float(np.minimum(p, q).sum())
        yield Position(
            coupled=float(choose(ours, position, text.sampling) == text.ids[position]),
            top_1=float(ours.argmax() == text.ids[position]),
            expected=agreement(p, q),
            one_minus_tv=shared,
            lower_bound=shared / (2.0 - shared),
        )


def read(drafter: CachedDrafter, text: Sample) -> Iterator[Logits]:
    """The drafter's logits [vocab] of each position that the target wrote, each valid until the next is asked for."""
    row = drafter.prefill(text.ids[: text.prompt])
    yield drafter.logits(row)
    for start in range(text.prompt, len(text.ids) - 1, CHAIN):
        chain = text.ids[start : min(start + CHAIN, len(text.ids) - 1)]
        rows = drafter.extend([(id, i - 1 if i else row) for i, id in enumerate(chain)])
        yield from map(drafter.logits, rows)
        drafter.keep(rows)
        row = rows[-1]


def distribution(logits: Logits, sampling: Sampling) -> Floats:
    """Probabilities [vocab] after temperature (above 0), top-k and top-p.

    Apart from `protocol.sampling`, so that a mistake there is not measured against itself.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    mass = np.exp(scaled - scaled.max())
    if sampling.top_k or sampling.top_p < 1.0:
        heavy = np.flatnonzero(mass > 2.0**-33) if sampling.top_p < 1.0 else np.arange(mass.size)  # weight 0 is cut
        order = heavy[np.argsort(-mass[heavy], kind="stable")][: sampling.top_k or None]
        before = mass[order].cumsum() - mass[order]
        kept = order[before < sampling.top_p * mass[order].sum()]
        left = np.zeros_like(mass)
        left[kept] = mass[kept]
        mass = left
    return mass / mass.sum()


def agreement(p: Floats, q: Floats) -> float:
    """How often draws from p and q [vocab] that share their Gumbel noise are equal.

    In ascending order of p/q the maxima in the formula are q's before i and p's from i on.
    """
    shared = (p > 0) & (q > 0)
    only_p, only_q = p[~shared].sum(), q[~shared].sum()
    p, q = p[shared], q[shared]
    order = np.argsort(p / q)
    p, q = p[order], q[order]
    from_here = only_p + p[::-1].cumsum()[::-1]
    before = only_q + q.cumsum() - q
    return float((1.0 / (from_here / p + before / q)).sum())


def summarise(texts: Sequence[Floats]) -> dict[str, Any]:
    """Mean and interval of every figure and of their differences; texts: the figures [positions, figures] of each.

    A difference is taken position by position. That of expected and 1 - TV holds no noise of drawing.
    """
    figures = {name: [text[:, i] for text in texts] for i, name in enumerate(Position._fields)}
    for one, other in (("coupled", "one_minus_tv"), ("coupled", "expected"), ("expected", "one_minus_tv")):
        pairs = zip(figures[one], figures[other], strict=True)
        figures[f"{one}_minus_{other}"] = [a - b for a, b in pairs]
    return {
        name: {
            "mean": round(float(np.concatenate(values).mean()), 4),
            "interval_95": [round(end, 4) for end in interval(values)],
        }
        for name, values in figures.items()
    }


def interval(values: Sequence[Floats]) -> tuple[float, float]:
    """95 % interval of the mean over all positions, from the values [positions] of each text.

    By bootstrap over texts, because positions of one text are alike.
    """
    sums = np.array([text.sum() for text in values])
    sizes = np.array([text.size for text in values])
    drawn = np.random.default_rng(1).integers(len(values), size=(RESAMPLES, len(values)))  # [resamples, texts]
    low, high = np.quantile(sums[drawn].sum(1) / sizes[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


@click.command()
@click.option(
    "--drafter", type=click.Path(path_type=Path), help="Directory of the drafter; the Qwen pair's by default."
)
@click.option("--target", type=click.Path(path_type=Path), help="Directory of the target; the Qwen pair's by default.")
@click.option("--threads", default=2, show_default=True)
@click.option("--positions", default=POSITIONS, show_default=True, help="Of each setting, at least.")
def main(drafter: Path | None, target: Path | None, threads: int, positions: int) -> None:
    """Print acceptance and 1 - TV of a pair as one JSON record."""
    if drafter is None or target is None:
        prepared = prepare("qwen-coder")
        drafter, target = drafter or prepared[0], target or prepared[1]
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(task: str, more: int) -> None:
            if task not in tasks:
                tasks[task] = progress.add_task(task, total=positions)
            progress.advance(tasks[task], more)

        record = measure(drafter, target, threads=threads, positions=positions, report=report)
    click.echo(json.dumps({"benchmark": "law", "machine": machine(), **record}))


if __name__ == "__main__":
    main()
