"""`python -m tools.bench board`: what a board's whole process takes. Start, memory, waiting, and ten thousand tokens.

Everything is a process of its own, as on a board: `outrider-edge run` with a real drafter, mosquitto, and a verifier
that agrees with the drafts as late as a part needs it (`tools.bench.late_verifier`).
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from edge.drafters import manifest
from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.errors import OutriderError, WireError
from protocol.messages import DeviceState, decode
from tools.bench.process import cpu_s, memory_mib, threads_cpu_s
from tools.bench.record import machine
from tools.broker import free_port
from tools.models import PAIRS, prepare
from tools.stage import Stage, last_words, spawn

PROMPT = "Write a short story about a lighthouse keeper who learns to code."
START_S, FIRST_DRAFT_S, TEXT_S = 60.0, 60.0, 600.0
SETTLE_S = 3.0  # until a board has drafted as far ahead as it may
LOOK_S = 0.005
TOKENS = 200  # of a text after which memory is looked at
TEXT_TOKENS = 500  # of each text of the long run
NEVER_S = 3600.0  # a step that nobody sees the end of
MODULES = "import sys, json; from edge.cli import main; import edge.api; print(json.dumps(sorted(sys.modules)))"


class Ear:
    """Hears everything at a broker. first: kind of message -> when the first one came, by `time.monotonic()`."""

    def __init__(self, broker: BrokerConfig) -> None:
        self.first: dict[str, float] = {}
        self._changed = threading.Condition()
        self._link = MqttLink(broker, "ear", on_message=self._hear, subscriptions=[("outrider/v1/#", 0)]).start()
        self._link.wait_up(START_S)

    def forget(self) -> None:
        with self._changed:
            self.first.clear()

    def wait(self, kind: str, timeout_s: float) -> float:
        """When the first message of this kind came. Raises OutriderError when none comes."""
        with self._changed:
            if not self._changed.wait_for(lambda: kind in self.first, timeout_s):
                raise OutriderError(f"no {kind} came within {timeout_s:g} s", where="tools.bench board")
            return self.first[kind]

    def close(self) -> None:
        self._link.close()

    def _hear(self, topic: str, payload: bytes) -> None:
        now = time.monotonic()
        with suppress(WireError):
            kind = topics.parse(topic).kind
            if kind == "state":
                message = decode(payload)
                kind = f"state {message.status}" if isinstance(message, DeviceState) else kind
            with self._changed:
                self.first.setdefault(kind, now)
                self._changed.notify_all()


class BoardProcess:
    """`outrider-edge run`, from exec to the end. A context manager. pid: of the process; started: by
    `time.monotonic()`.
    """

    def __init__(
        self, folder: Path, broker: BrokerConfig, drafter: Path, *, threads: int, patience_s: float,
        module: Sequence[str] = ("-m", "edge"),
    ) -> None:  # fmt: skip
        folder = Path(tempfile.mkdtemp(dir=folder))
        self._port = free_port()
        config = folder / "edge.toml"
        config.write_text(
            f'[device]\nname = "bench.board"\nstate = {json.dumps(str(folder / "state"))}\n'
            f"[broker]\nport = {broker.port}\n[api]\nport = {self._port}\n"
            f"[drafter]\nmodel = {json.dumps(str(drafter))}\nthreads = {threads}\n"
            f"[session]\npatience_s = {patience_s}\n[timing]\nsilence_s = {2 * NEVER_S}\n"
        )
        self._log = open(folder / "log", "w+")  # noqa: SIM115 (closed in __exit__)
        self.started = time.monotonic()
        self._process = spawn(
            [*module, "run", "--config", str(config)],
            stderr=self._log,
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
        )
        self.pid = self._process.pid

    def __enter__(self) -> BoardProcess:
        return self

    def __exit__(self, *_: object) -> None:
        last_words(self._process)
        self._log.close()

    def wait_listening(self) -> float:
        """When applications are answered. Raises OutriderError with the log where it does not start."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
                return time.monotonic()
            time.sleep(LOOK_S)
        self._log.seek(0)
        raise OutriderError(f"the board did not start: {self._log.read()[-2000:]}", where="edge run")

    def count(self) -> dict[str, int]:
        """What a watched process holds, see `tools.bench.watched_edge`."""
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGUSR1)
        found: dict[str, int] = json.loads(self._process.stdout.readline())
        return found

    def ask(self, max_tokens: int) -> http.client.HTTPResponse:
        """Ask for a text; the answer is a stream of events that may be left unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TEXT_S)
        body = {"messages": [{"role": "user", "content": PROMPT}], "stream": True, "max_tokens": max_tokens}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise OutriderError(f"the board refused: {answer.read().decode()}", where="edge run")
        return answer


@contextmanager
def fleet(drafter: Path, *verifier: str) -> Iterator[tuple[Stage, Ear]]:
    """A broker, a late verifier and an ear."""
    with Stage() as stage:
        broker = stage.broker()
        options = ["--port", str(broker.port), "--drafter", str(drafter), *verifier]
        stage.serve(["-m", "tools.bench.late_verifier", *options])
        ear = Ear(broker)
        try:
            yield stage, ear
        finally:
            ear.close()


def start(drafter: Path, *, threads: int, rounds: int) -> dict[str, object]:
    """From exec to the first draft on the wire, asked for a text as soon as the board answers; medians. The first round
    only warms the file cache. memory_mib: after a text of TOKENS tokens.
    """
    found: list[dict[str, float]] = []
    memory: list[dict[str, float]] = []
    with fleet(drafter, "--step-s", "0.05") as (stage, ear):
        for _ in range(1 + rounds):
            ear.forget()
            with BoardProcess(stage.folder, stage.broker(), drafter, threads=threads, patience_s=0.0) as board:
                listening = board.wait_listening()
                answer = board.ask(TOKENS)
                moments = {
                    "online": ear.wait("state online", FIRST_DRAFT_S),
                    "listening": listening,
                    "open": ear.wait("open", FIRST_DRAFT_S),
                    "first_draft": ear.wait("draft", FIRST_DRAFT_S),
                }
                computed_s = cpu_s(board.pid)
                answer.read()
                memory.append(memory_mib(board.pid))
                found.append({**{name: at - board.started for name, at in moments.items()}, "cpu": computed_s})
    return {
        "rounds": rounds,
        "s": {name: round(statistics.median(each[name] for each in found[1:]), 3) for name in found[0]},
        "tokens": TOKENS,
        "memory_mib": {name: round(statistics.median(each[name] for each in memory), 1) for name in memory[0]},
    }


def imports() -> dict[str, object]:
    """Seconds that importing takes by top-level package, what it imports itself included where nobody had it before."""
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", MODULES], capture_output=True, text=True, check=True
    )
    own: dict[str, float] = {}
    for line in told.stderr.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[0].strip().isdigit():
            package = fields[2].strip().partition(".")[0]
            own[package] = own.get(package, 0.0) + int(fields[0]) / 1e6
    ranked = sorted(own.items(), key=lambda item: -item[1])
    return {"s": round(sum(own.values()), 3), "by_package": {name: round(s, 3) for name, s in ranked[:12]}}


def waiting(drafter: Path, *, threads: int, seconds: float) -> dict[str, object]:
    """CPU in per cent of a core: idle; waiting for a verdict, with nothing left that may be drafted; and streaming,
    while a verifier that steps every two seconds takes one guess a step: then some of it is drafting.
    """
    record: dict[str, object] = {"seconds": seconds}
    for name, patience_s, step_s in (
        ("waiting", inf, NEVER_S),
        ("streaming", inf, 2.0),
        ("streaming_patience_0", 0.0, 2.0),
    ):
        with (
            fleet(drafter, "--step-s", str(step_s), "--most", "1") as (stage, ear),
            BoardProcess(stage.folder, stage.broker(), drafter, threads=threads, patience_s=patience_s) as board,
        ):
            board.wait_listening()
            if "idle" not in record:
                time.sleep(SETTLE_S)
                record["idle"] = _cpu(board.pid, seconds)
            answer = board.ask(400)
            ear.wait("draft", FIRST_DRAFT_S)
            time.sleep(SETTLE_S)
            record[name] = _cpu(board.pid, seconds)
            answer.close()
    return record


def _cpu(pid: int, seconds: float) -> dict[str, object]:
    before, threads_before, began = cpu_s(pid), threads_cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    spent = cpu_s(pid) - before
    threads = {name: s - threads_before.get(name, 0.0) for name, s in threads_cpu_s(pid).items()}
    return {
        "percent": round(100 * spent / took, 2),
        "threads": {name: round(100 * s / took, 2) for name, s in threads.items() if s > 1e-4 * took},
    }


def growth(drafter: Path, *, threads: int, tokens: int) -> dict[str, object]:
    """Texts of TEXT_TOKENS one after the other until there are so many tokens: MiB of the process after each, all and
    what it does not map from files, and, in another process that counts them, Python's objects and what they hold.
    """
    num_texts = -(-tokens // TEXT_TOKENS)
    memory: list[dict[str, float]] = []
    held: list[dict[str, int]] = []
    with fleet(drafter, "--step-s", "0.02", "--wrong-every", "6") as (stage, _):
        with BoardProcess(stage.folder, stage.broker(), drafter, threads=threads, patience_s=0.0) as board:
            board.wait_listening()
            for _ in range(num_texts):
                board.ask(TEXT_TOKENS).read()
                memory.append(memory_mib(board.pid))
        watched = ("-m", "tools.bench.watched_edge")
        with BoardProcess(
            stage.folder, stage.broker(), drafter, threads=threads, patience_s=0.0, module=watched
        ) as board:
            board.wait_listening()
            for _ in range(num_texts):
                board.ask(TEXT_TOKENS).read()
                held.append(board.count())
    half = num_texts // 2
    rss, anonymous = ([each[name] for each in memory] for name in ("rss", "anonymous"))
    return {
        "tokens": num_texts * TEXT_TOKENS,
        "rss_mib": rss,
        "anonymous_mib": anonymous,
        "objects": [each["objects"] for each in held],
        "python_kib": [each["kib"] for each in held],
        "second_half": {
            "rss_mib": round(rss[-1] - rss[half], 1),
            "anonymous_mib": round(anonymous[-1] - anonymous[half], 1),
            "objects": held[-1]["objects"] - held[half]["objects"],
            "python_kib": held[-1]["kib"] - held[half]["kib"],
        },
    }


@click.command()
@click.option("--pair", type=click.Choice(sorted(PAIRS)), default="smollm2", show_default=True)
@click.option("--drafter", type=click.Path(path_type=Path), help="An exported directory, instead of the pair's.")
@click.option("--threads", type=int, default=2, show_default=True)
@click.option("--rounds", type=int, default=5, show_default=True, help="Starts, of which the median counts.")
@click.option("--seconds", type=float, default=10.0, show_default=True, help="That waiting is watched.")
@click.option("--tokens", type=int, default=10_000, show_default=True, help="Of the long run.")
@click.option("--part", "parts", multiple=True, type=click.Choice(["start", "waiting", "growth"]))
def main(
    pair: str, drafter: Path | None, threads: int, rounds: int, seconds: float, tokens: int, parts: tuple[str, ...]
) -> None:
    """What a board's whole process takes: start, memory, CPU while it waits, and memory over 10,000 tokens."""
    drafter = (drafter or prepare(pair)[0]).absolute()  # the board runs in a folder of its own
    facts = manifest.read(drafter, "drafter")
    record: dict[str, Any] = {
        "benchmark": "board",
        "machine": machine(),
        "drafter": {
            "name": facts.name,
            "runtime": facts.runtime,
            "compute": facts.compute,
            "quantisation": facts.quantisation,
        },
        "threads": threads,
    }
    measures: dict[str, Callable[[], dict[str, object]]] = {
        "start": lambda: {**start(drafter, threads=threads, rounds=rounds), "imports": imports()},
        "waiting": lambda: waiting(drafter, threads=threads, seconds=seconds),
        "growth": lambda: growth(drafter, threads=threads, tokens=tokens),
    }
    console = Console(stderr=True)
    for part in parts or measures:
        with console.status(part):
            record[part] = measures[part]()
    console.print(_table(record))
    click.echo(json.dumps(record))


def _table(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['drafter']['name']}, {record['drafter']['runtime']}, {record['threads']} threads")
    for column in ("", "measured", "bar"):
        table.add_column(column, justify="right" if column else "left")
    if start := record.get("start"):
        table.add_row("start to first draft, s", str(start["s"]["first_draft"]), "3.0")
        table.add_row("of that computing, s of a core", str(start["s"]["cpu"]), "")
        table.add_row(f"memory after {start['tokens']} tokens, MiB", str(start["memory_mib"]["rss"]), "250")
    if waiting := record.get("waiting"):
        for name, bar in (("idle", ""), ("waiting", "5"), ("streaming", ""), ("streaming_patience_0", "")):
            table.add_row(f"{name.replace('_', ' ')}, % of a core", str(waiting[name]["percent"]), bar)
    if growth := record.get("growth"):
        grown = growth["second_half"]
        table.add_row(f"growth, second half of {growth['tokens']} tokens, MiB", str(grown["rss_mib"]), "")
        table.add_row("of that not mapped from files", str(grown["anonymous_mib"]), "0")
        table.add_row("Python objects", str(grown["objects"]), "0")
    return table


if __name__ == "__main__":
    main()
