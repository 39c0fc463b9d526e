"""`outrider-edge`: run the board's service, chat once, or check that everything is in place."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from queue import SimpleQueue

import click
import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text as Styled

from edge.board import Board, Stream
from edge.checks import run_checks
from edge.config import EdgeConfig
from edge.loading import load_drafter, load_text
from edge.session import Request
from edge.text import Text
from edge.updates.boot import begin, flashed_environment, restart
from edge.updates.service import Following
from link.command import CommandGroup
from link.config import load

log = logging.getLogger(__name__)

SWITCH_S = 0.0005  # a message that arrives beside a busy thread would wait ten times as long by default
AGAIN = 0  # no signal's number: the board begins again, with another release

DEFAULT_CONFIG = Path("/etc/outrider/edge.toml")
config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG,
    show_default=True,
    help="The board's TOML file.",
)


@click.group(cls=CommandGroup, command="outrider-edge")
@click.option("-v", "--verbose", is_flag=True, help="Log every detail.")
def main(verbose: bool) -> None:
    """A board: drafts ahead, shows what the verifier has certified."""
    sys.setswitchinterval(SWITCH_S)
    level = logging.DEBUG if verbose else logging.INFO
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)


@main.command()
@config_option
def run(config_path: Path) -> None:
    """Stay connected, finish what a crash cut short, and serve applications on the board until SIGTERM."""
    from edge.api import Api  # its web server is not needed for the other commands

    config = load(config_path, EdgeConfig)
    boot = begin(config)
    if boot is not None:
        boot.become_runtime(sys.argv[1:])
    config, drafter = boot.load(load_drafter) if boot is not None else (config, load_drafter(config))
    board = Board(config, drafter)
    api = Api(board, load_text(config), config.api)
    stopped: SimpleQueue[int] = SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.put(number))
    following = Following(boot, config_path, board, lambda: stopped.put(AGAIN)) if boot is not None else None
    board.start()
    for entry in board.journal.unfinished():
        log.info("going on with session %016x after %d tokens", entry.request.session, len(entry.committed))
        board.resume(entry)
    api.start()
    try:
        told = stopped.get()
    finally:
        if following is not None:
            following.close()
        api.stop()
        board.close()
    if told == AGAIN and stopped.empty():
        restart(sys.argv[1:], flashed_environment(os.environ))


@main.command()
@click.argument("prompt")
@config_option
@click.option("--show-drafts", is_flag=True, help="Show the unverified tail, dimmed.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Instead of the configuration's.")
@click.option("--seed", type=click.IntRange(min=0), help="Random when absent.")
@click.option("--wait-s", type=float, default=inf, help="How long to wait for broker and verifier.")
def chat(
    prompt: str, config_path: Path, show_drafts: bool, max_tokens: int | None, seed: int | None, wait_s: float
) -> None:
    """Stream the verified answer to PROMPT."""
    config = load(config_path, EdgeConfig)
    text = load_text(config)
    client_id = f"outrider-{config.device.name}-chat-{secrets.token_hex(3)}"
    board = Board(config, load_drafter(config), client_id=client_id, present=False)
    board.start()
    try:
        target = board.find_target(wait_s)
        request = Request(
            session=secrets.randbits(64),
            target=target.target,
            prompt=tuple(text.chat([{"role": "user", "content": prompt}])),
            sampling=config.session.sampling(secrets.randbits(64) if seed is None else seed),
            max_tokens=max_tokens or config.session.max_tokens,
            stop_ids=tuple(sorted(text.stop_ids)),
            patience_s=config.session.patience_s,
        )
        stream = board.open(request)
        try:
            _show(stream, text, show_drafts)
        except KeyboardInterrupt:
            assert stream.run is not None
            stream.run.cancel()
            raise
        finally:
            board.journal.remove(request.session)
    finally:
        board.close()


@main.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option("--wait-s", type=float, default=5.0, show_default=True, help="How long to wait for broker and verifier.")
def check(config_path: Path, as_json: bool, wait_s: float) -> None:
    """Configuration, models, tokenizer, broker, verifier: is everything in place?"""
    findings = run_checks(config_path, wait_s)
    if as_json:
        click.echo(msgspec.json.encode(findings))
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'FAIL'} {finding.name}: {finding.detail}")
    sys.exit(next((finding.exit_code for finding in findings if not finding.ok), 0))


@dataclass(slots=True)
class _Answer:
    """Verified text so far, and the ids that the drafter guesses behind it."""

    verified: str
    tail: list[int]


def _answers(stream: Stream, text: Text) -> Iterator[_Answer]:
    pieces = text.stream()
    so_far = ""
    for ids in stream:
        so_far += pieces.push(ids)
        assert stream.run is not None
        yield _Answer(so_far, stream.run.draft_tail())
    yield _Answer(so_far + pieces.flush(), [])


def _show(stream: Stream, text: Text, show_drafts: bool) -> None:
    if not show_drafts:
        shown = 0
        for answer in _answers(stream, text):
            click.echo(answer.verified[shown:], nl=False)
            shown = len(answer.verified)
        click.echo()
        return
    with Live(console=Console(), auto_refresh=False, vertical_overflow="visible") as live:
        for answer in _answers(stream, text):
            live.update(Styled.assemble(answer.verified, (text.decode(answer.tail), "dim")), refresh=True)
