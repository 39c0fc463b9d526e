"""A fleet as a person starts it: broker, verifiers and a board, each its command in a process, with real models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from link.config import BrokerConfig
from link.mqtt import MqttLink
from protocol import topics
from protocol.messages import Commit, VerifierState, decode
from tools.broker import Broker, free_port
from tools.models import ROOT

PROMPT = "Write three sentences about the sea."
NUM_TOKENS = 48


class CommandFleet:
    """Broker, verifiers and a board as processes, with an ear on the broker."""

    def __init__(self, folder: Path, drafter: Path, target: Path) -> None:
        self.folder, self.drafter, self.target = folder, drafter, target
        self.broker = Broker.start()
        self.children: list[subprocess.Popen[str]] = []
        self.verifiers: dict[str, subprocess.Popen[str]] = {}
        self.states: dict[str, VerifierState] = {}
        self.commits: dict[int, int] = {}
        self.begun: dict[int, int] = {}  # the first base of each epoch
        self.owner = ""
        self.api_port = free_port()
        self.edge_config = self.write_edge()
        self.ear = MqttLink(
            BrokerConfig(port=self.broker.port),
            "ear",
            on_message=self._hear,
            subscriptions=[("outrider/v1/#", 0)],
        ).start()
        self.ear.wait_up(10)

    def _hear(self, topic: str, payload: bytes) -> None:
        where, message = topics.parse(topic), decode(payload)
        if where.kind == "draft":
            self.owner = where.name
        if isinstance(message, VerifierState):
            self.states[message.verifier] = message
        if isinstance(message, Commit) and message.ids:
            self.commits[message.base] = len(message.ids)
            self.begun.setdefault(message.epoch, message.base)

    def write_edge(self, name: str = "edge.toml", **sections: str) -> Path:
        path = self.folder / name
        given = {
            "device": f'name = "test.board"\nstate = "{self.folder / "state"}"',
            "broker": f"port = {self.broker.port}",
            "drafter": f'model = "{self.drafter}"\nthreads = 1',
            "api": f"port = {self.api_port}",
            **sections,
        }
        path.write_text("".join(f"[{section}]\n{body}\n" for section, body in given.items()))
        return path

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        log = open(self.folder / f"{len(self.children)}.log", "w")  # noqa: SIM115 (the child's)
        child = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=environment, text=True, stderr=log)
        self.children.append(child)
        return child

    def start_verifier(self, name: str) -> None:
        path = self.folder / f"{name}.toml"
        path.write_text(
            f'verifier = "{name}"\n[broker]\nport = {self.broker.port}\n'
            f'[engine]\nmodel = "{self.target}"\nthreads = 1\n'
        )
        self.verifiers[name] = self.spawn("cloud", "serve", "--config", str(path))
        self.until(lambda: name in self.states and self.states[name].status == "up", 120)

    def start_board(self) -> subprocess.Popen[str]:
        board = self.spawn("edge", "run", "--config", str(self.edge_config))
        self.until(self.api_is_up, 60)
        return board

    def api_is_up(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.api_port}/healthz", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def until(self, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log")))

    def ask(self, **more: object) -> Iterator[str]:
        """Pieces of the streamed answer."""
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": NUM_TOKENS, "stream": True, **more}
        url = f"http://127.0.0.1:{self.api_port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, timeout=120) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield event["choices"][0]["delta"].get("content", "")

    def run(self, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=environment,
            text=True,
            capture_output=True,
            timeout=seconds,
        )

    def stop(self) -> None:
        self.ear.close()
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()
        self.broker.stop()
