"""The processes of a small fleet on loopback: broker, verifier and the long link before the board."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from protocol.errors import OutriderError
from tools.broker import Broker
from tools.models import ROOT


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
    return process.returncode


class Stage:
    """Broker and verifier near, the board behind `rtt_ms`. A context manager; `board_port` is the far end's broker."""

    def __init__(self, target: Path, *, rtt_ms: float, numerics: str, verifier_core: int, threads: int = 1) -> None:
        self._target, self._rtt_ms, self._numerics = target, rtt_ms, numerics
        self._core, self._threads = verifier_core, threads
        self._children: list[subprocess.Popen[str]] = []
        self._broker: Broker | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-demo-")
        self.folder = Path(self._folder.name)
        self.board_port = 0

    def __enter__(self) -> Stage:
        try:
            self._broker = Broker.start()
            self.board_port = self._start_link(self._broker.port)
            self._start_verifier(self._broker.port)
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

    def _start_link(self, broker_port: int) -> int:
        link = spawn(
            ["-m", "tools.wan", "--to", f"127.0.0.1:{broker_port}", "--rtt-ms", str(self._rtt_ms), "--json"],
            stdout=subprocess.PIPE,
        )
        self._children.append(link)
        assert link.stdout is not None
        line = link.stdout.readline()
        if not line:
            raise OutriderError("the link emulator did not start", where="tools.wan")
        return int(json.loads(line)["listening"].rpartition(":")[2])

    def _start_verifier(self, broker_port: int) -> None:
        config = self.folder / "cloud.toml"
        config.write_text(
            f"[broker]\nport = {broker_port}\n"
            f"[engine]\nmodel = {json.dumps(str(self._target))}\nthreads = {self._threads}\n"
            f"[numerics]\nmode = {json.dumps(self._numerics)}\n"
        )
        log = open(self.folder / "verifier.log", "w+")  # noqa: SIM115 (closed with the folder)
        verifier = spawn(["-m", "cloud", "serve", "--config", str(config)], core=self._core, stderr=log)
        self._children.append(verifier)
        self._await_serving(verifier, log)

    @staticmethod
    def _await_serving(verifier: subprocess.Popen[str], log: IO[str], timeout_s: float = 180.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            log.seek(0)
            text = log.read()
            if "serving " in text:
                return
            if verifier.poll() is not None or time.monotonic() > deadline:
                raise OutriderError(f"the verifier did not start: {text.strip()[-2000:]}", where="outrider-cloud serve")
            time.sleep(0.1)
