"""Makes a trace file: what a target writes alone, and what a drafter would propose at each position of that text.

The target is our own engine, one session and one row a step, with the chat template and the stop ids of the fleet; the
drafter is the board's, as exported. In exact numerics the text is the one that a fleet with this target commits.

At T = 0 the candidates are ranked by the drafter's softmax probability, and `p_target` is that of the target's id.
At T > 0 both sides draw with the noise of (seed, position), so the candidates are the coupled drafter's: its own draw
first, then the others by noised score. Their probabilities are the drafter's after temperature, top-k and top-p,
without the noise, so they need not descend; where fewer survive than asked for, fewer are there. `p_target` is the
probability of the id that the target drew in the same distribution, 0 where it does not survive: how often a drafter
with noise of its own would propose it. The coupled drafter does so at least as often on average: see `acceptance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cloud.engines.numerics import Numerics
from cloud.engines.torch_engine import load as load_target
from edge.drafters import runtimes
from edge.drafters.cached import CachedDrafter
from edge.drafters.manifest import Manifest
from edge.drafters.manifest import read as read_manifest
from edge.text import Text
from protocol.errors import ConfigError, ModelError
from protocol.sampling import Sampling, rank
from tools.demo.reference import decode_alone
from tools.models import PAIRS, prepare
from tools.traces import Trace, save

MIN_TOKENS = 2  # with one token there is nothing to draft from
DECIMALS = 6  # of probabilities: what follows is the numerics' own noise


def trace_text(
    drafter: CachedDrafter,
    prompt: str,
    ids: Sequence[int],
    target: Sequence[int],
    sampling: Sampling,
    num_candidates: int,
) -> Trace:
    """What `drafter` proposes at each position of `target` ([n], at least one) behind `ids`, the prompt's.

    Raises ModelError where the text does not fit the drafter's context.
    """
    draft_ids, draft_p, p_target = [], [], []
    row = drafter.prefill(ids)
    for written in target:
        # All that may be drawn, in the order of `candidates`: the target's id can be anywhere in it.
        ranked, p = rank(drafter.logits(row), row.position + 1, sampling, drafter.info.vocab_size)
        draft_ids.append(tuple(ranked[:num_candidates].tolist()))
        draft_p.append(tuple(p[:num_candidates].round(DECIMALS).tolist()))
        p_target.append(round(float(p[ranked == written].sum()), DECIMALS))
        # A row a pass, as a board drafts: 4-bit kernels for one row and for more give other probabilities.
        (row,) = drafter.extend([(written, row)])
        drafter.keep([row])
    return Trace(prompt, tuple(target), tuple(draft_ids), tuple(draft_p), tuple(p_target), tuple(ids))


def read_pair(drafter: Path, target: Path) -> tuple[Manifest, Manifest]:
    """The manifests of both directories. Raises ModelError where they are no pair."""
    ours, theirs = read_manifest(drafter, "drafter"), read_manifest(target, "target")
    if ours.tokenizer_digest != theirs.tokenizer_digest:
        raise ModelError(
            f"the tokenizer is not that of the drafter in {drafter}",
            where=str(target),
            remedy="give a drafter and a target of one family",
        )
    return ours, theirs


def read_prompts(path: Path) -> list[str]:
    """One prompt a line, empty lines left out. Raises ConfigError where the file cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot be read: {error}", where=str(path)) from error
    return [line.strip() for line in lines if line.strip()]


@click.command()
@click.option("--drafter", type=click.Path(path_type=Path), help="Directory of an exported drafter.")
@click.option("--target", type=click.Path(path_type=Path), help="Directory of an exported target.")
@click.option("--pair", type=click.Choice(sorted(PAIRS)), help="A pair that is fetched and exported once, instead.")
@click.option("--prompt", "prompts", multiple=True, help="A user's message; as many as wanted.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="A file of them, one a line.")
@click.option("--max-tokens", type=click.IntRange(MIN_TOKENS), default=128, show_default=True, help="Of each text.")
@click.option("--candidates", type=click.IntRange(1), default=8, show_default=True, help="Of the drafter, a position.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first text; each next one has the next.")
@click.option("--numerics", type=click.Choice(["exact", "fast"]), default="exact", show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The trace file to write.")
def record(
    drafter: Path | None, target: Path | None, pair: str | None, prompts: tuple[str, ...], file: Path | None,
    max_tokens: int, candidates: int, temperature: float, top_p: float, top_k: int, seed: int, numerics: str,
    threads: int, out: Path,
) -> None:  # fmt: skip
    """Record what a target writes and what a drafter would have proposed, for the twin and the benchmark to replay."""
    if bool(pair) == bool(drafter or target) or (drafter is None) != (target is None):
        raise click.UsageError("give --drafter and --target, or --pair")
    if not out.parent.is_dir():  # said now, not after minutes of writing
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    wanted = [*prompts, *(read_prompts(file) if file else ())]
    if not wanted:
        raise click.UsageError("give a --prompt, or --prompts with a file that holds one")
    samplings = [Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed + i) for i in range(len(wanted))]
    if drafter is None or target is None:
        drafter, target = prepare(str(pair))
    ours, theirs = read_pair(drafter, target)
    text = Text.load(drafter, ours)
    ids = [text.chat([{"role": "user", "content": prompt}]) for prompt in wanted]
    longest, context = max(map(len, ids)) + max_tokens, min(ours.context, theirs.context)
    if longest > context:
        raise ModelError(
            f"the longest prompt and {max_tokens} tokens make {longest}, more than the context of {context}",
            where="prompts",
            remedy="shorten the prompt or ask for fewer tokens",
        )
    console = Console(stderr=True)
    with console.status("loading"):
        engine = load_target(target, Numerics(mode=numerics), threads=threads)  # type: ignore[arg-type]
        model = runtimes.load(drafter, threads=threads, context=longest)
    traces = []
    columns = TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TextColumn("texts"), TimeElapsedColumn()
    with Progress(*columns, console=console) as bar:
        for i in bar.track(range(len(wanted))):
            written = decode_alone(engine, ids[i], samplings[i], max_tokens, sorted(theirs.stop_ids))
            if len(written) < MIN_TOKENS:
                bar.console.print(f"text {i + 1} is left out: the target wrote {len(written)} token")
                continue
            traces.append(trace_text(model, wanted[i], ids[i], written, samplings[i], candidates))
            bar.console.print(f"text {i + 1}: {len(written)} tokens, acceptance {traces[-1].acceptance:.2f}")
    if not traces:
        raise ModelError(
            f"no text of {MIN_TOKENS} tokens or more was written", where=str(target), remedy="give other prompts"
        )
    save(out, traces)
