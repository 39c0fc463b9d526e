"""`python -m tools.bench drafter`: drafters beside their rivals in one process, in turns.

Ours as a board uses them, ONNX Runtime alone on the same graph, llama.cpp on the same model in Q4_0, and memory itself:
what share of its bandwidth a pass reaches.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from edge.drafters import manifest
from edge.drafters.container import gives_huge_pages
from protocol.errors import OutriderError
from protocol.sampling import Sampling
from tools.bench.bandwidth import Stream
from tools.bench.process import memory_mib
from tools.bench.record import machine, ms
from tools.bench.rivals import BURST, CHAIN, CONTEXT, GREEDY, REST_S, ROWS, Ours, Rival, Spec
from tools.models import FOLDER, PAIRS, fetch, prepare

SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=1)
LLAMA = "llama.cpp"


def measure(specs: Sequence[Spec], *, threads: int, rounds: int) -> dict[str, object]:
    """Every rival's passes, chains and choosing, in turns: medians over the rounds.

    Raises OutriderError where one of them cannot be had.
    """
    rivals = {spec.name: spec.make(threads) for spec in specs}
    stream = Stream(threads)
    wall: dict[tuple[str, str], list[float]] = {}
    cpu: dict[tuple[str, str], list[float]] = {}
    speeds: list[float] = []
    for turn in range(1 + rounds):  # the first only warms caches
        for name, rival in rivals.items():
            for part, count, work in _parts(rival):
                rival.ready()
                time.sleep(REST_S)
                began, began_cpu = time.perf_counter(), time.process_time()
                work()
                if turn:
                    wall.setdefault((name, part), []).append((time.perf_counter() - began) / count)
                    cpu.setdefault((name, part), []).append((time.process_time() - began_cpu) / count)
        time.sleep(REST_S)
        speeds.append(stream.bytes_per_s())
    stream.close()
    limit = statistics.median(speeds[1:])
    found = {name: _figures(rival, name, wall, cpu, limit) for name, rival in rivals.items()}
    return {
        "threads": threads,
        "rounds": rounds,
        "prompt_tokens": CONTEXT,
        "bandwidth_gb_s": {"median": round(limit / 1e9, 2), "best": round(max(speeds) / 1e9, 2)},
        "rivals": found,
        "ratios": _ratios(found),
    }


def _parts(rival: Rival) -> list[tuple[str, int, Callable[[], object]]]:
    """(what, how many of it, the work)."""
    parts: list[tuple[str, int, Callable[[], object]]] = []
    for rows in ROWS:
        parts.append((f"pass {rows}", BURST, partial(rival.burst, rows)))
    parts.append(("token", CHAIN, rival.chain))
    if isinstance(rival, Ours):
        parts.append(("choose T=0", 1, partial(rival.choose, GREEDY)))
        parts.append(("choose T=0.8 top-p 0.95", 1, partial(rival.choose, SAMPLED)))
    return parts


def _figures(
    rival: Rival,
    name: str,
    wall: Mapping[tuple[str, str], list[float]],
    cpu: Mapping[tuple[str, str], list[float]],
    limit: float,
) -> dict[str, object]:
    took = {part: statistics.median(times) for (whose, part), times in wall.items() if whose == name}
    return {
        **rival.about,
        "ms": {part: ms(seconds) for part, seconds in took.items()},
        "cpu_ms": {part: ms(statistics.median(times)) for (whose, part), times in cpu.items() if whose == name},
        "tokens_per_s": round(1 / took["token"], 1),
        "read_mb": round(rival.read_bytes / 1e6, 1),
        "share_of_bandwidth": round(rival.read_bytes / took["pass 1"] / limit, 3),
    }


def _ratios(found: Mapping[str, dict]) -> dict[str, float]:
    """Ours over bare ONNX Runtime (times; the bar is 1.10), choosing over a pass (0.15), and how many times as fast as
    llama.cpp each of ours is.
    """
    ratios: dict[str, float] = {}
    for name, figures in found.items():
        took = figures["ms"]
        if bare := found.get(f"{name} bare"):
            for rows in ROWS:
                ratios[f"{name}: pass over bare, {rows} rows"] = took[f"pass {rows}"] / bare["ms"][f"pass {rows}"]
        for what in took:
            if what.startswith("choose"):
                ratios[f"{name}: {what} over pass"] = took[what] / took["pass 1"]
        if (theirs := found.get(LLAMA)) and figures is not theirs:
            for part in ("token", *(f"pass {rows}" for rows in ROWS)):
                ratios[f"{name}: speed over {LLAMA}, {part}"] = theirs["ms"][part] / took[part]
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


def named(directory: Path) -> dict[str, Path]:
    """An export by its runtime's name."""
    return {manifest.read(directory, "drafter").runtime: directory}


def specs_of(exports: Mapping[str, Path], gguf: Path | None) -> list[Spec]:
    """Ours, each beside its bare graph where it has one, and llama.cpp."""
    specs: list[Spec] = []
    for name, directory in exports.items():
        specs.append(Spec(name, "ours", directory))
        if manifest.read(directory, "drafter").runtime == "onnx":
            specs.append(Spec(f"{name} bare", "bare", directory))
    return [*specs, Spec(LLAMA, "llama.cpp", gguf)] if gguf else specs


def settled(specs: Sequence[Spec], threads: int) -> tuple[list[Spec], list[dict[str, object]]]:
    """The rivals with llama.cpp in the setting that is fastest at so many threads, and what its settings took."""
    found: list[Spec] = []
    told: list[dict[str, object]] = []
    for spec in specs:
        if spec.kind == "llama.cpp":
            from tools.bench.llama import fastest

            setting, told = fastest(spec.path, threads)
            spec = replace(spec, **asdict(setting))
        found.append(spec)
    return found, told


def weigh(spec: Spec, threads: int) -> dict[str, float]:
    """MiB that a fresh process takes with this rival alone, when it has drafted a while."""
    asked = json.dumps({**asdict(spec), "path": str(spec.path)})
    command = [sys.executable, "-m", "tools.bench.drafter", asked, str(threads)]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode:
        raise OutriderError(told.stderr.strip()[-1000:], where=f"the process of {spec.name}")
    found: dict[str, float] = json.loads(told.stdout.splitlines()[-1])
    return found


def _weighed(asked: str, threads: str) -> None:
    before = memory_mib(os.getpid())
    fields = json.loads(asked)
    rival = Spec(**{**fields, "path": Path(fields["path"])}).make(int(threads))
    rival.ready()
    rival.chain()
    rival.burst(max(ROWS))
    after = memory_mib(os.getpid())
    click.echo(json.dumps({**after, "python": before["rss"]}))


def gguf_of(pair: str, given: Path | None) -> Path | None:
    """The file for llama.cpp: what is given, else the pair's own in Q4_0; None where llama.cpp is not installed."""
    from tools.bench import llama

    try:
        llama.library()
    except OutriderError as error:
        click.echo(f"without llama.cpp: {error}", err=True)
        return None
    if gives_huge_pages() and not llama.has_huge_pages():
        click.echo(f"llama.cpp is without huge pages here: start with GLIBC_TUNABLES={llama.HUGE_PAGES}", err=True)
    if given is not None:
        return given
    source = fetch(PAIRS[pair].drafter)
    return llama.quantise(source, FOLDER / f"{source.stem}-pure-q4_0.gguf")


def _exports(context: click.Context, option: click.Parameter, values: Sequence[str]) -> dict[str, Path]:
    named = [value.partition("=") for value in values]
    if bad := [value for value, (name, _, path) in zip(values, named, strict=True) if not name or not path]:
        raise click.BadParameter(f"{bad[0]!r} is not NAME=DIR")
    return {name: Path(path) for name, _, path in named}


@click.command()
@click.option("--pair", type=click.Choice(sorted(PAIRS)), default="smollm2", show_default=True)
@click.option(
    "--export", "exports", multiple=True, callback=_exports, metavar="NAME=DIR",
    help="An exported drafter; the pair's own, by its runtime's name, when none is given.",
)  # fmt: skip
@click.option(
    "--gguf", type=click.Path(path_type=Path, exists=True), help="For llama.cpp, instead of the pair's in Q4_0."
)
@click.option("--threads", multiple=True, type=int, default=(1, 2), show_default=True)
@click.option("--rounds", type=int, default=15, show_default=True, help="Of which the median counts.")
@click.option("--no-memory", is_flag=True, help="Leave out the fresh process of each rival.")
def main(
    pair: str, exports: dict[str, Path], gguf: Path | None, threads: tuple[int, ...], rounds: int, no_memory: bool
) -> None:
    """Drafters beside bare ONNX Runtime and llama.cpp: passes, tokens a second, bandwidth, memory."""
    console = Console(stderr=True)
    exports = exports or named(prepare(pair)[0])
    specs = specs_of(exports, gguf_of(pair, gguf))
    record: dict[str, object] = {"benchmark": "drafter", "machine": machine(), "runs": (runs := [])}
    if LLAMA not in {spec.name for spec in specs}:
        from tools.bench.llama import INSTALL

        record["without"] = {LLAMA: INSTALL}
    for number in threads:
        console.print(f"{number} threads: {', '.join(spec.name for spec in specs)} …")
        specs, tried = settled(specs, number)
        run = measure(specs, threads=number, rounds=rounds)
        runs.append({**run, "llama_cpp_settings": tried} if tried else run)
        console.print(_table(run))
        gc.collect()
    if not no_memory:
        console.print("memory, each alone in a process …")
        record["memory_mib"] = memory = {spec.name: weigh(spec, max(threads)) for spec in specs}
        console.print(", ".join(f"{name} {found['peak_rss']:.0f} MiB" for name, found in memory.items()))
    click.echo(json.dumps(record))


def _table(run: dict) -> Table:
    limit = run["bandwidth_gb_s"]["median"]
    table = Table(title=f"{run['threads']} threads, {limit} GB/s, passes of 1, 2, 4 and 8 rows behind {CONTEXT} tokens")
    table.add_column("")
    for column in ("tokens/s", *(f"{rows}: ms" for rows in ROWS), "MB a token", "of the limit"):
        table.add_column(column, justify="right")
    for name, figures in run["rivals"].items():
        took = figures["ms"]
        table.add_row(
            name,
            str(figures["tokens_per_s"]),
            *(f"{took[f'pass {rows}']:.1f}" for rows in ROWS),
            f"{figures['read_mb']:.0f}",
            f"{figures['share_of_bandwidth']:.0%}",
        )
    return table


if __name__ == "__main__":
    _weighed(*sys.argv[1:])
