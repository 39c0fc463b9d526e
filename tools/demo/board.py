"""The board's process in the demo: one drafter, each prompt in each mode, told to the parent as JSON lines."""

from __future__ import annotations

import json
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path

import click

from edge.board import Board
from edge.config import EdgeConfig
from edge.loading import load_drafter, load_text
from edge.session import Request
from edge.text import Text
from tools.demo.modes import MODES, PROMPTS, board_config

TARGET_WAIT_S = 30.0
WARM_TOKENS = 12


def tell(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def play(board: Board, text: Text, mode: str, prompt: str, seed: int, *, max_tokens: int, quiet: bool = False) -> None:
    """One text; the parent hears each piece as it is verified, and at the end what it took."""
    config = board.config
    target = board.find_target(TARGET_WAIT_S)
    ids = tuple(text.chat([{"role": "user", "content": prompt}]))
    request = Request(
        secrets.randbits(64),
        target.target,
        ids,
        config.session.sampling(seed),
        max_tokens,
        tuple(sorted(text.stop_ids)),
        config.session.patience_s,
    )
    before = board.link.counters()
    started = time.perf_counter()
    stream, pieces = board.open(request), text.stream()
    out: list[int] = []
    arrivals: list[tuple[float, int]] = []
    for fresh in stream:
        arrivals.append((time.perf_counter() - started, len(fresh)))
        out += fresh
        if not quiet:
            tell(event="piece", mode=mode, text=pieces.push(fresh))
    after = board.link.counters()
    while board.busy:  # the boards of all modes take turns with one drafter
        time.sleep(0.005)
    assert stream.run is not None
    tally = stream.run.window.tally
    if not quiet:
        tell(
            event="done",
            mode=mode,
            prompt=prompt,
            prompt_tokens=len(ids),
            ids=out,
            arrivals=arrivals,
            bytes=after.bytes_sent - before.bytes_sent + after.bytes_received - before.bytes_received,
            passes=stream.run.passes,
            finish=stream.run.window.finish,
            tally={key: value for key, value in asdict(tally).items() if key != "ignored"},
        )


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--drafter", type=click.Path(path_type=Path), required=True)
@click.option("--state", type=click.Path(path_type=Path), required=True)
@click.option("--mode", "modes", multiple=True, required=True)
@click.option("--max-tokens", type=int, required=True)
@click.option("--threads", type=int, default=1)
@click.option("--temperature", type=float, default=0.0)
@click.option("--top-p", type=float, default=1.0)
@click.option("--prompts", "num_prompts", type=int, default=len(PROMPTS))
def main(
    port: int, drafter: Path, state: Path, modes: tuple[str, ...], max_tokens: int, threads: int, temperature: float,
    top_p: float, num_prompts: int,
) -> None:  # fmt: skip
    """Play all prompts in all modes, after a warm-up; modes take turns, so that a noisy moment meets them all."""

    def config(mode: str) -> EdgeConfig:
        return board_config(
            mode,
            port=port,
            drafter=drafter,
            state=state,
            max_tokens=max_tokens,
            threads=threads,
            temperature=temperature,
            top_p=top_p,
        )

    first = config(modes[0])
    model, text = load_drafter(first), load_text(first)
    boards = {mode: Board(config(mode), model, present=False).start() for mode in modes}
    try:
        for seed, prompt in enumerate([PROMPTS[0], *PROMPTS[:num_prompts]]):
            for mode, board in boards.items():
                warming = not seed
                tokens = WARM_TOKENS if warming else max_tokens
                play(board, text, mode, prompt, seed, max_tokens=tokens, quiet=warming)
    finally:
        for board in boards.values():
            board.close()
    tell(event="end", drafter=asdict(model.info), titles={mode: MODES[mode].title for mode in modes})


if __name__ == "__main__":
    main()
