"""`outrider-edge`: run the board's service, chat once, enrol it, or check that everything is in place."""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TextIO

import click
import msgspec

from edge.board import Board, Stream
from edge.config import EdgeConfig
from edge.loading import load_drafter, load_text
from edge.memory import give_back, keep_few_heaps
from edge.session import Request
from edge.systemd import JournalFormatter, Notifier, Service, is_journal
from edge.text import Text
from edge.updates.boot import as_running, begin, flashed_environment, restart
from link.command import CommandGroup
from link.config import load
from protocol.errors import OutriderError

log = logging.getLogger(__name__)

SWITCH_S = 0.0005  # a message that arrives beside a busy thread would wait ten times as long by default
AGAIN = 0  # no signal's number: the board begins again, with another release

MARKS = {"ok": "ok  ", "warn": "WARN", "fail": "FAIL"}
DEFAULT_CONFIG = Path("/etc/outrider/edge.toml")
STDIO = Path("-")
DASHED = click.Path(path_type=Path, allow_dash=True)
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
    handler = logging.StreamHandler(sys.stderr)
    formatter = JournalFormatter if is_journal(sys.stderr, os.environ) else logging.Formatter
    handler.setFormatter(formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler])


@main.command()
@config_option
def run(config_path: Path) -> None:
    """Stay connected, finish what a crash cut short, and serve applications on the board until SIGTERM."""
    faulthandler.enable()  # a watchdog's SIGABRT leaves in the log where each thread hung
    notifier = Notifier.of(os.environ)
    try:
        _serve(config_path, notifier)
    except OutriderError as error:
        notifier.status(str(error))
        raise


def _serve(config_path: Path, notifier: Notifier) -> None:
    from edge.api import Api  # its web server is not needed for the other commands

    keep_few_heaps()
    config = load(config_path, EdgeConfig)
    boot = begin(config)
    if boot is not None:
        boot.become_runtime(sys.argv[1:])
    notifier.status(f"loading {config.drafter.model}")
    config, drafter = boot.load(load_drafter) if boot is not None else (config, load_drafter(config))
    board = Board(config, drafter)
    api = Api(board, load_text(config), config.api)
    stopped: SimpleQueue[int] = SimpleQueue()  # an Event that is set in mid-wait by a signal's handler locks up
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.put(number))
    following = None
    if boot is not None:
        from edge.updates.service import Following  # what fetches and tests: many boards take no updates

        following = Following(boot, config_path, board, lambda: stopped.put(AGAIN))
    give_back()  # a tokenizer's file is parsed into many times its size, and weights are packed beside themselves
    board.start()
    for entry in board.journal.unfinished():
        log.info("going on with session %016x after %d tokens", entry.request.session, len(entry.committed))
        board.resume(entry)
    api.start()
    service = Service(notifier, board.loops, board.status)
    service.ready()
    told = None
    try:
        while (told := _told(stopped, within_s=service.look())) is None:
            pass
    finally:
        service.beginning_again() if told == AGAIN else service.stopping()
        if following is not None:
            following.close()
        api.stop()
        board.close()
    if told == AGAIN and stopped.empty():
        restart(sys.argv[1:], flashed_environment(os.environ))


def _told(stopped: SimpleQueue[int], within_s: float) -> int | None:
    try:
        return stopped.get(timeout=within_s)
    except Empty:
        return None


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
    config, _ = as_running(load(config_path, EdgeConfig))
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
    """The board, its clock and certificates, the drafter, broker and verifier: is everything in place?

    Ends with the code of the first thing that failed; a warning is no failure.
    """
    from edge.checks import run_checks

    report = run_checks(config_path, wait_s)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        for finding in report.findings:
            remedy = f". {finding.remedy}" if finding.remedy else ""
            click.echo(f"{MARKS[finding.status]} {finding.name}: {finding.what}{remedy}")
    sys.exit(report.exit_code)


@main.command()
@config_option
@click.option("--request", "request_path", type=DASHED, help="Where to write the request; - for stdout.")
@click.option("--code-file", type=click.File(), default="-", help="Holds the one-time code; stdin when absent.")
@click.option("--answer", "answer_path", type=DASHED, help="The answer to install; - for stdin.")
def enroll(config_path: Path, request_path: Path | None, code_file: TextIO, answer_path: Path | None) -> None:
    """Make this board's key and a request for its certificate; later, install the answer."""
    from edge import enroll as identity  # a board that is enrolled starts without it

    if (request_path is None) == (answer_path is None):
        raise click.UsageError("either --request or --answer")
    config = load(config_path, EdgeConfig)
    device, tls = config.device.name, config.broker.tls
    if request_path is not None:
        request = identity.request(device, tls, code_file.readline())
        if request_path == STDIO:
            click.echo(request, nl=False)
        else:
            identity.write_file(request_path, request, identity.PUBLIC)
            click.echo(f"{device}: take {request_path} to `python -m tools.provision sign`")
    if answer_path is not None:
        stdin = sys.stdin.buffer
        answer = stdin.read() if answer_path == STDIO else identity.read_file(answer_path)
        ends = identity.install(device, tls, answer, "stdin" if answer_path == STDIO else str(answer_path))
        click.echo(f"{device}: enrolled until {ends:%Y-%m-%d}")


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
    from rich.console import Console  # a board that serves applications shows nothing
    from rich.live import Live
    from rich.text import Text as Styled

    with Live(console=Console(), auto_refresh=False, vertical_overflow="visible") as live:
        for answer in _answers(stream, text):
            live.update(Styled.assemble(answer.verified, (text.decode(answer.tail), "dim")), refresh=True)
