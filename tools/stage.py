"""The processes of a small fleet on loopback: broker and verifier near, boards behind long links."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from link.config import BrokerConfig, TlsConfig
from protocol.errors import OutriderError
from tools.broker import Broker
from tools.models import ROOT
from tools.wan import Counters

QUIET_S = 0.05  # beyond a round trip: what the ends themselves need to answer
START_S = 180.0


def pin(core: int) -> Callable[[], None] | None:
    """What a child runs first, to stay on one core as a machine of its own would; None where there are too few."""
    if not hasattr(os, "sched_setaffinity") or core not in os.sched_getaffinity(0):
        return None
    return lambda: os.sched_setaffinity(0, {core})


def spawn(arguments: Sequence[str], *, core: int | None = None, **pipes: object) -> subprocess.Popen[str]:
    """A Python child of the checkout, on one core if asked."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        preexec_fn=None if core is None else pin(core),
        **pipes,  # type: ignore[call-overload]
    )


def last_words(process: subprocess.Popen[str]) -> int:
    """End a child by its id, gently first."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    return process.returncode


class LongLink:
    """A link of `rtt_ms` to the broker, a process of its own. port: where boards find the broker at this end."""

    def __init__(self, broker_port: int, rtt_ms: float) -> None:
        self.rtt_ms = rtt_ms
        arguments = ["-m", "tools.wan", "--to", f"127.0.0.1:{broker_port}", "--rtt-ms", str(rtt_ms), "--json"]
        self._process = spawn(arguments, stdout=subprocess.PIPE)
        self.port = int(self._hear()["listening"].rpartition(":")[2])

    def __enter__(self) -> LongLink:
        return self

    def __exit__(self, *_: object) -> None:
        last_words(self._process)

    def counters(self) -> Counters:
        """What has crossed it up to now."""
        self._process.send_signal(signal.SIGUSR1)
        return Counters(**self._hear())

    def settled(self) -> Counters:
        """Its counters once nothing has crossed it for a round trip."""
        latest = self.counters()
        while True:
            time.sleep(self.rtt_ms / 1e3 + QUIET_S)
            before, latest = latest, self.counters()
            if (latest.bytes_up, latest.bytes_down) == (before.bytes_up, before.bytes_down):
                return latest

    def _hear(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise OutriderError(f"the link emulator ended with {self._process.wait()}", where="tools.wan")
        found: dict = json.loads(line)
        return found


class Stage:
    """A broker and its verifiers, ended together. A context manager.

    folder: for the files of all; broker_kind: which broker it is.
    """

    def __init__(self, *, tls: bool = False) -> None:
        self._tls = tls
        self._children: list[subprocess.Popen[str]] = []
        self._broker: Broker | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-stage-")
        self.folder = Path(self._folder.name)

    def __enter__(self) -> Stage:
        try:
            self._broker = Broker.start(tls=self._tls)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):
            last_words(child)
        if self._broker is not None:
            self._broker.stop()
        self._folder.cleanup()

    @property
    def broker_kind(self) -> str:
        assert self._broker is not None
        return self._broker.kind

    @property
    def broker_pid(self) -> int:
        assert self._broker is not None
        return self._broker.pid

    def broker(self, at: LongLink | None = None) -> BrokerConfig:
        """How to reach the broker: directly, or from the far end of a link."""
        assert self._broker is not None
        tls = TlsConfig(ca=self._broker.ca) if self._tls else None
        return BrokerConfig(port=at.port if at else self._broker.port, tls=tls)

    def link(self, rtt_ms: float) -> LongLink:
        assert self._broker is not None
        return LongLink(self._broker.port, rtt_ms)

    def serve(self, arguments: Sequence[str], *, core: int | None = None, **pipes: object) -> subprocess.Popen[str]:
        """Start a verifier's process and return once it serves. Raises OutriderError with its log if it does not."""
        log = open(self.folder / f"verifier-{len(self._children)}.log", "w+")  # noqa: SIM115 (closed with the folder)
        verifier = spawn(arguments, core=core, stderr=log, **pipes)
        self._children.append(verifier)
        self._await_serving(verifier, log)
        return verifier

    def serve_model(self, target: Path, *, numerics: str, core: int | None = None, threads: int = 1) -> None:
        """Serve an exported target with `outrider-cloud serve`."""
        broker = self.broker()
        config = self.folder / "cloud.toml"
        config.write_text(
            f"[broker]\nport = {broker.port}\n"
            + (f"[broker.tls]\nca = {json.dumps(str(broker.tls.ca))}\n" if broker.tls else "")
            + f"[engine]\nmodel = {json.dumps(str(target))}\nthreads = {threads}\n"
            f"[numerics]\nmode = {json.dumps(numerics)}\n"
        )
        self.serve(["-m", "cloud", "serve", "--config", str(config)], core=core)

    @staticmethod
    def _await_serving(verifier: subprocess.Popen[str], log: IO[str]) -> None:
        deadline = time.monotonic() + START_S
        while True:
            log.seek(0)
            text = log.read()
            if "serving " in text:
                return
            if verifier.poll() is not None or time.monotonic() > deadline:
                raise OutriderError(f"the verifier did not start: {text.strip()[-2000:]}", where="tools.stage")
            time.sleep(0.05)
